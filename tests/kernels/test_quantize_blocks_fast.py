"""The fast FP4 kernels give the reference's bytes: on a GPU, or in the interpreter with what that lacks emulated."""

import pytest
import torch

from hadaquant import front, reference
from hadaquant.formats import get_format
from hadaquant.kernels import amax_fast
from hadaquant.kernels import quantize_blocks_fast as fast
from hadaquant.kernels import quantize_blocks_front as fronted
from hadaquant.ops.plan import interpreting
from hadaquant.rotation import Rotation, parse
from hadaquant.tensor import QuantizedTensor

from .front_ends import check_explained, norms, on
from .test_twins import DTYPES, all_bf16, assert_same, nasty

FORMATS = ("nvfp4", "mxfp4", "mxfp4-ceil", "mxfp4-even")
ROTATIONS = ("none", "sylvester:16", "regular:16", "sylvester:32", "sylvester:64", "regular:64")


@pytest.fixture(autouse=True)
def _emulated(device, monkeypatch):
    if interpreting():
        from .emulated import emulate

        emulate(monkeypatch)


def run(x, format, rotation, g, scale_layout, device) -> tuple[torch.Tensor, torch.Tensor]:
    shape, tiled = tuple(x.shape), scale_layout == "tiled"
    x, g = x.contiguous().to(device), None if g is None else torch.tensor(g, device=device)
    codes = torch.full(format.codes_shape(shape), 0xA5, dtype=torch.uint8, device=device)
    scales = torch.full(format.scales_shape(shape, scale_layout), 0xA5, dtype=torch.uint8, device=device)
    if not interpreting():
        fast.quantize_blocks(x, codes, scales, format, rotation.to(device), g, scale_layout)
        return codes, scales
    k = x.shape[-1]
    m = x.numel() // k
    tiles = fast.tiling(format, rotation, m, k, tiled)
    # numpy likes its steps large
    wide = 128 if tiled else 256
    if tiled or m * (k // tiles["UNIT"]) >= wide:
        tiles["N"] = wide
    config = {**fast.config(format, rotation, False, tiles), "FEW": tiles["N"]}
    signs = x if rotation.signs is None else rotation.signs
    in_row = k // tiles["UNIT"]
    fast.quantize_blocks_fast_kernel[fast.grid(tiles, m, k)](
        x, codes, scales, x if g is None else g, signs, m * in_row, m, in_row, **config
    )
    return codes, scales


def check(x, format: str, rotation, device, g: float = 0.003, scale_layout: str = "linear") -> None:
    f, r = get_format(format), parse(rotation)
    scale = g if f.has_global_scale else None
    ours = run(x, f, r, scale, scale_layout, device)
    oracle = reference.quantize(x, f, r, None if scale is None else torch.tensor(scale), scale_layout)
    assert_same(ours[0], oracle[0], "codes")
    assert_same(ours[1], oracle[1], "scales")


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_same_bytes(format, rotation, device):
    check(nasty(9, 256, torch.bfloat16), format, rotation, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rotation", ["none", "regular:16", "sylvester:32"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4-even"])
def test_same_bytes_of_other_inputs(format, rotation, dtype, device):
    check(nasty(9, 256, dtype), format, rotation, device)


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (17, 160), (2, 3, 64), (64,), (131, 224), (1, 2048)], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_tails_and_ranks(format, shape, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    check(x, format, "sylvester:32", device)


@pytest.mark.parametrize("shape", [(1, 128), (128, 64), (131, 96), (257, 32)], ids=str)
@pytest.mark.parametrize("rotation", ["none", "regular:16", "sylvester:32"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4-even"])
def test_tiled_scales_and_their_padding(format, rotation, shape, device):
    check(nasty(*shape, torch.bfloat16), format, rotation, device, scale_layout="tiled")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_tiled_scales_of_large_groups(format, device):
    check(nasty(130, 128, torch.float16), format, "sylvester:64", device, scale_layout="tiled")


@pytest.mark.parametrize("format", FORMATS)
def test_with_signs(format, device):
    for group in (16, 64):
        signs = torch.randint(0, 2, (group,), generator=torch.Generator().manual_seed(1)) * 2 - 1
        x = nasty(9, 192, torch.bfloat16)
        x[8] = torch.where(torch.arange(192) % 3 == 0, -0.0, 0.0)
        check(x, format, Rotation("sylvester", group, signs=signs), device)


@pytest.mark.parametrize("g", [2.0**-126, 1e-30, 2.0**-60, 1e-5, 1.0, 40.0, 2.0**60, 1e30, 3e38, 0.0, -1.0])
def test_any_global_scale(g, device):
    x = nasty(9, 64, torch.float32) * torch.logspace(-9, 9, 9)[:, None]
    check(x, "nvfp4", "none", device, g)
    check(x, "nvfp4", "sylvester:16", device, g)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 6 * min(max(g, 1e-30), 1e30)
    check(x * torch.tensor([2.0**-10, 2.0**-9, 1.0, 300.0])[:, None], "nvfp4", "none", device, g)


@pytest.mark.parametrize("format", FORMATS)
def test_every_bf16_value(format, device):
    block = get_format(format).block or 1
    values = all_bf16()
    if interpreting():
        values = values[::64]
    alone = torch.zeros(len(values), block, dtype=torch.bfloat16)
    alone[:, 5] = values
    check(alone, format, "none", device)
    check(values.view(-1, block), format, "none", device)
    check(values.view(-1, block), format, "sylvester:16", device)


def test_sign_is_that_of_a_number_below_zero(device):
    # exact -0 is no such number; a quotient that underflows to -0 is one
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 2] = 1e31, -1e-30, -0.0
    check(x, "mxfp4", "none", device)
    check(x, "nvfp4", "none", device, 1e28)
    check(torch.full((2, 64), -0.0), "nvfp4", "none", device)
    check(torch.full((2, 64), -0.0), "mxfp4", "regular:16", device)


def test_a_block_beyond_the_fast_path_leaves_the_others_alone(device):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x[7, 100] = float("nan")
    x[33] *= 1e4  # its scale saturates
    check(x, "nvfp4", "sylvester:16", device, 0.001)
    check(x, "nvfp4", "sylvester:16", device, 0.001, "tiled")


@pytest.mark.parametrize("rotation", ["none", "sylvester:16", "regular:64", "sylvester:32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_largest_magnitude(rotation, dtype, device):
    r = parse(rotation)
    for x in (
        nasty(9, 192, dtype),
        nasty(1, 64, dtype),
        torch.randn(131, 64).to(dtype),
        torch.zeros(3, 64, dtype=dtype),
    ):
        x = x.to(device)
        if interpreting():
            config = amax_fast.config(r)
            found = torch.zeros((), dtype=torch.int32)
            units = x.numel() // config["UNIT"]
            amax_fast.amax_fast_kernel[(2,)](x, found, x, -(-units // config["N"]), units, **config)
            found = found.view(torch.float32)
        else:
            found = amax_fast.amax(x, r.to(device))
        assert_same(found, reference.amax(x.cpu(), r), "largest magnitude")


def run_front(
    x, format, rotation, front_end, g, scale_layout, device, threads=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K]; ``threads`` in place of those of the tiling, each with more or fewer units."""
    shape, tiled = tuple(x.shape), scale_layout == "tiled"
    codes = torch.full(format.codes_shape(shape), 0xA5, dtype=torch.uint8, device=device)
    scales = torch.full(format.scales_shape(shape, scale_layout), 0xA5, dtype=torch.uint8, device=device)
    x, front_end, rotation = x.to(device), on(front_end, device), rotation.to(device)
    g = None if g is None else torch.tensor(g, device=device)
    if not interpreting() and threads is None:
        fronted.quantize_blocks_front(x, codes, scales, format, rotation, front_end, g, scale_layout)
        return codes, scales
    m, k = shape
    tiles = fronted.tiling(format, rotation, front_end, x.dtype, m, k, tiled)
    if threads is not None:
        in_row = k // tiles["UNIT"]
        tiles |= {"N": threads, "EACH": -(-in_row // threads), "WHOLE": not tiled and in_row % threads == 0}
    config = fronted.config(format, rotation, front_end, False, tiles)
    if interpreting():
        config["FEW"] = tiles["N"]
    arguments = fronted.arguments(x, codes, scales, rotation, g, front_end, int(tiles["UNIT"]))
    fronted.quantize_blocks_front_kernel[fronted.grid(tiles, m, k)](*arguments, **config)
    return codes, scales


def check_front(x, format: str, rotation, front_end, device, g: float = 0.003, scale_layout: str = "linear", **how):
    """x [B, ..., K] or [M, K]."""
    f, r = get_format(format), parse(rotation)
    scale = torch.tensor(g) if f.has_global_scale else None
    rows = x.view(-1, x.shape[-1])
    ours = run_front(rows, f, r, front_end, None if scale is None else g, scale_layout, device, **how)
    oracle = reference.quantize(x, f, r, scale, scale_layout, front_end)
    if front_end.sums:
        assert_same(ours[0], oracle[0].view(len(rows), -1), "codes")
        assert_same(ours[1].flatten(), oracle[1].flatten(), "scales")
    else:
        check_explained(QuantizedTensor(*ours, scale, f, r), QuantizedTensor(*oracle, scale, f, r), rows, front_end)


#: Every kind, format, rotation, dtype and way to give operands, each with some of the others.
CASES = [
    ("rms_norm", "nvfp4", "none", torch.bfloat16),
    ("rms_norm with weight", "nvfp4", "sylvester:16", torch.bfloat16),
    ("rms_norm with weight", "mxfp4-even", "regular:64", torch.bfloat16),
    ("ada_norm", "mxfp4", "sylvester:32", torch.bfloat16),
    ("ada_norm", "mxfp4-ceil", "none", torch.float16),
    ("ada_norm", "nvfp4", "regular:64", torch.float16),
    ("ada_norm of batches", "nvfp4", "regular:16", torch.float32),
    ("ada_norm of batches", "mxfp4-even", "sylvester:32", torch.float32),
]


@pytest.mark.parametrize(("kind", "format", "rotation", "dtype"), CASES, ids=str)
def test_norms(kind, format, rotation, dtype, device):
    x = nasty(9, 320, dtype).view(3, 3, 320)
    check_front(x, format, rotation, norms(x, dtype)[kind], device)


@pytest.mark.parametrize("shape", [(1, 32), (3, 1280), (5, 96), (1, 5120)], ids=str)
@pytest.mark.parametrize(("format", "kind"), [("nvfp4", "rms_norm with weight"), ("mxfp4", "ada_norm")])
def test_rows_of_norms(format, kind, shape, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    check_front(x, format, "none", norms(x, torch.bfloat16)[kind], device)


@pytest.mark.parametrize(("threads", "k"), [(32, 3072), (64, 1120), (256, 4096)])
def test_rows_of_norms_in_any_number_of_threads(threads, k, device):
    x = nasty(2, k, torch.bfloat16) + 1
    check_front(x, "nvfp4", "none", norms(x, torch.bfloat16)["ada_norm"], device, threads=threads)


def test_more_rows_behind_norms(device):
    if interpreting():
        pytest.skip("too slow in the interpreter")
    for k in (3072, 3392):
        x = nasty(1030, k, torch.bfloat16).view(2, 515, k)
        for format, rotation in (("nvfp4", "sylvester:16"), ("mxfp4", "sylvester:32")):
            check_front(x, format, rotation, norms(x, torch.bfloat16)["ada_norm of batches"], device)


@pytest.mark.parametrize(
    ("format", "rotation", "shape"),
    [
        pytest.param("nvfp4", "none", (2, 48), marks=pytest.mark.slow),
        ("nvfp4", "sylvester:32", (131, 96)),
        ("mxfp4", "none", (128, 128)),
    ],
    ids=str,
)
def test_tiled_scales_behind_norms(format, rotation, shape, device):
    if interpreting() and shape[0] > 2:
        pytest.skip("too slow in the interpreter")
    x = nasty(shape[0], shape[1], torch.bfloat16)
    check_front(x, format, rotation, norms(x, torch.bfloat16)["rms_norm"], device, scale_layout="tiled")


@pytest.mark.parametrize("g", [2.0**-126, 1e-5, 40.0, 1e30, 0.0, -1.0])
def test_any_global_scale_behind_a_norm(g, device):
    x = nasty(5, 64, torch.float32) * torch.logspace(-9, 9, 5)[:, None]
    weight = torch.logspace(-20, 20, 64).roll(7)
    check_front(x, "nvfp4", "sylvester:16", front.ada_norm(weight, weight.flip(0)), device, g)


def test_norms_with_signs_and_strided_rows(device):
    wide, f, g = nasty(5, 384, torch.bfloat16), get_format("nvfp4"), 0.003
    signs = torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(1)) * 2 - 1
    rotation = Rotation("sylvester", 16, signs=signs)
    norm = front.rms_norm(torch.randn(193)[1:])  # which does not begin where wide loads may
    for x in (wide[:, :192], wide[:, 5:197]):
        ours = run_front(x, f, rotation, norm, g, "linear", device)
        oracle = reference.quantize(x, f, rotation, torch.tensor(g), "linear", norm)
        assert_same(ours[0], oracle[0], "codes")
        assert_same(ours[1], oracle[1], "scales")


@pytest.mark.parametrize(
    ("shape", "format", "rotation", "dtype"),
    [
        ((1, 1184), "nvfp4", "none", torch.bfloat16),
        ((4, 128), "nvfp4", "regular:64", torch.float16),
        ((5, 96), "mxfp4", "sylvester:32", torch.float32),
        ((601, 3072), "nvfp4", "sylvester:16", torch.bfloat16),
    ],
    ids=str,
)
def test_activations(shape, format, rotation, dtype, device):
    m, k = shape
    if interpreting() and m > 100:
        pytest.skip("too slow in the interpreter")
    whole = (torch.randn(m, 2 * k, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)
    gate, up = whole.chunk(2, -1)
    for front_end in (front.silu_mul(up), front.gelu_tanh()):
        check_front(gate, format, rotation, front_end, device)


@pytest.mark.parametrize(("format", "bad"), [("nvfp4", 0x7F), ("mxfp4", 0xFF)])
def test_bad_rows_behind_activations(format, bad, device):
    x, f = nasty(5, 96, torch.bfloat16), get_format(format)
    g = torch.tensor(0.003) if f.has_global_scale else None
    for front_end in (front.silu_mul(torch.ones_like(x)), front.gelu_tanh()):
        codes, scales = run_front(x, f, parse("none"), front_end, 0.003, "linear", device)
        expected = reference.quantize(x, f, parse("none"), g, "linear", front_end)[1].view(torch.uint8) == bad
        assert expected.any() and torch.equal(expected, scales.cpu() == bad)
        assert not codes.cpu().view(*expected.shape, -1)[expected].any()
