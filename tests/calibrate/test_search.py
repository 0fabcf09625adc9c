"""Scale search: never worse than the contract, the best of what it tries, and read as the contract reads."""

import itertools

import pytest
import torch
from ml_dtypes import float8_e4m3fn

import hadaquant as hq
import oracle
from hadaquant import reference
from hadaquant.calibrate import search_scales
from hadaquant.calibrate.search import E4M3_STEPS, E8M0_STEPS, FACTORS, Grid
from hadaquant.errors import BlockError, GroupError, LayerError, ShapeError
from hadaquant.formats import FORMATS, get_format

every_format = pytest.mark.parametrize("format", sorted(FORMATS))
every_rotation = pytest.mark.parametrize("rotation", ["none", "sylvester:32", "regular:16"])


def error(weight, q, importance=None):
    """The squared error in the rotated basis, in float64."""
    y = reference.rotate(weight, q.rotation).double()
    decoded = reference.decode(q.codes, q.scales, q.global_scale, q.format).double()
    return ((decoded - y).square() * (1 if importance is None else importance)).sum()


def heavy_tailed(n, k):
    return torch.randn(n, k) * torch.rand(n, k).pow(-0.3)


@every_format
@every_rotation
@pytest.mark.parametrize("weighted", [False, True])
def test_never_worse_than_round_to_nearest(format, rotation, weighted):
    weight = heavy_tailed(24, 96)
    importance = torch.rand(96).pow(3) if weighted else None
    nearest = error(weight, hq.quantize(weight, format, rotation=rotation), importance)
    found = error(weight, search_scales(weight, format, rotation, importance=importance), importance)
    assert found <= nearest
    assert found < nearest or format in ("mxfp4-even", "int8")  # whose contract is hard to beat


@every_format
def test_codes_are_the_contracts_for_the_scales_found(format):
    weight = heavy_tailed(8, 64)
    q = search_scales(weight, format)
    again, multiplier = (
        reference.divisor(q.scales.view(8, -1), q.format, q.global_scale),
        q.format.scale.multiplier(q.scales.view(8, -1), q.global_scale),
    )
    blocks = weight.view(8, again.shape[1], -1)
    codes = reference.encode(blocks, again[..., None], q.format)
    values = q.format.element.decode(codes) * multiplier[..., None]
    assert torch.equal(values.view(8, 64), q.dequantize())


@pytest.mark.parametrize(("format", "block"), [("nvfp4", 16), ("mxfp4", 32), ("mxfp4-ceil", 32)])
def test_each_block_has_the_best_scale_of_all_bytes_around_the_contracts(format, block):
    """By another road: numpy and ml_dtypes, every legal byte in turn."""
    weight = heavy_tailed(4, 2 * block)
    contract, found = hq.quantize(weight, format), search_scales(weight, format)
    steps = E4M3_STEPS if format == "nvfp4" else E8M0_STEPS
    y = weight.numpy()
    for row, column in itertools.product(range(4), range(2)):
        piece = y[row, column * block : (column + 1) * block]

        def squares(byte, piece=piece):
            if format == "nvfp4":
                scale = oracle.np.uint8(byte).view(float8_e4m3fn).astype(oracle.F32)
                m = oracle.multiply(scale, contract.global_scale.numpy())
            else:
                m = oracle.np.ldexp(oracle.F32(1), byte - 127)
            codes = oracle.e2m1(oracle.divide(piece, m), piece) & 7
            values = oracle.np.sign(piece) * oracle.np.array(oracle.E2M1_VALUES)[codes] * oracle.np.float64(m)
            return ((values - piece) ** 2).sum()

        base = int(contract.scales[row, column])
        least = min(squares(base + step) for step in steps if 0 < base + step < 0x7F + 128 * (format != "nvfp4"))
        assert squares(int(found.scales[row, column])) == pytest.approx(least, rel=1e-5)


def test_int8_tries_smaller_scales_of_each_row():
    weight = torch.randn(6, 512)
    weight[:, 7] = 40.0  # one element decides the contract's scale, though the others hold the error
    contract, found = hq.quantize(weight, "int8"), search_scales(weight, "int8")
    assert torch.allclose(found.scales, contract.scales)
    importance = torch.ones(512)
    importance[7] = 1e-6
    found = search_scales(weight, "int8", importance=importance)
    ratios = found.scales / contract.scales
    torch.testing.assert_close(ratios, torch.full_like(ratios, min(FACTORS)))


def test_a_global_scale_can_be_searched_too():
    # exact if the largest magnitude becomes 4, which needs a scale beyond the largest E4M3 number
    weight = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0])[torch.randint(0, 6, (64, 64))]
    contract = search_scales(weight, "nvfp4")
    found = search_scales(weight, "nvfp4", global_factors=(0.9, 1.5))
    assert error(weight, contract) > 1.0 and error(weight, found) < 1e-9
    assert torch.equal(
        search_scales(weight, "mxfp4", global_factors=(2.0,)).scales, search_scales(weight, "mxfp4").scales
    )


@every_format
def test_zero_blocks_stay_as_the_contract_has_them(format):
    weight = torch.randn(4, 64)
    weight[:, :32] = 0
    weight[2] = 0
    contract, found = hq.quantize(weight, format), search_scales(weight, format)
    assert torch.equal(found.scales[2], contract.scales[2]) and not found.codes[2].any()
    if get_format(format).block:
        blocks = 32 // get_format(format).block
        assert not found.scales[:, :blocks].any() and not found.codes[:, :16].any()


def test_a_mark_for_nan_has_no_neighbours():
    for format, mark in (("nvfp4", 0x7F), ("mxfp4", 0xFF)):
        grid = Grid(get_format(format), torch.ones(()) if format == "nvfp4" else None)
        tried = grid.candidates(torch.tensor([mark, mark - 1, 0, 60], dtype=torch.uint8)).long()
        assert (tried[:, 0] == mark).all() and tried[:, 1:].max() < mark
        assert tried[0].tolist() == [mark, mark - 1, 0, 60]


def test_refusals():
    weight = torch.randn(4, 64)
    with pytest.raises(BlockError, match="K=40"):
        search_scales(torch.randn(4, 40), "nvfp4")
    with pytest.raises(GroupError, match="group 128"):
        search_scales(weight, "nvfp4", "sylvester:128")
    with pytest.raises(ShapeError, match="weight has shape"):
        search_scales(weight[0], "nvfp4")
    with pytest.raises(ShapeError, match="one number a channel"):
        search_scales(weight, "nvfp4", importance=torch.ones(63))
    weight[1, 2] = float("inf")
    with pytest.raises(LayerError, match="holds NaN or Inf"):
        search_scales(weight, "nvfp4")
