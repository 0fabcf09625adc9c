"""The clauses of MXFP4 and its three scale rules."""

import pytest
import torch

import hadaquant as hq
from hadaquant.formats.elements import decode_e2m1, decode_e8m0
from hadaquant.layout import unpack_nibbles

RULES = ("mxfp4", "mxfp4-ceil", "mxfp4-even")


def block_with(amax: float) -> torch.Tensor:
    x = torch.zeros(1, 32)
    x[0, 5] = -amax
    return x


@pytest.mark.parametrize(("name", "scales"), [
    ("mxfp4", [1, 1, 1, 1, 1, 1, 1, 2]),
    ("mxfp4-ceil", [1, 1, 2, 2, 2, 2, 2, 2]),
    ("mxfp4-even", [1, 1, 1, 1, 2, 2, 2, 2]),
])  # fmt: skip
def test_n12_three_rules(name, scales):
    amax = (4, 6, 6.0001, 6.5, 7, 7.5, 7.9999, 8)
    assert [decode_e8m0(hq.quantize(block_with(a), name).scales).item() for a in amax] == scales


@pytest.mark.parametrize("name", RULES)
def test_n12_at_every_power_of_two(name):
    for e in range(-120, 120, 7):
        small, large = hq.quantize(block_with(7.0), name), hq.quantize(block_with(7.0 * 2.0**e), name)
        assert large.scales.item() - small.scales.item() == e
        assert torch.equal(large.codes, small.codes)


@pytest.mark.parametrize("name", RULES)
def test_exponents_are_clamped(name):
    for tiny in (1e-45, 2.0**-149, 2.0**-127, 2.0**-126):
        assert hq.quantize(block_with(tiny), name).scales.item() == 0
    largest = torch.finfo(torch.float32).max
    assert hq.quantize(block_with(largest), name).scales.item() == {"mxfp4": 252}.get(name, 253)


@pytest.mark.parametrize("name", RULES)
def test_subnormal_blocks_keep_half_a_step(name):
    x = torch.zeros(4, 32)
    x[:, :4] = torch.tensor([2.0**-126, 2.0**-127, -(2.0**-128), 2.0**-149]) * torch.tensor([1, 1.5, 0.75, 1])[:, None]
    assert (hq.quantize(x, name).dequantize() - x).abs().max() <= 2.0**-127 * 0.25 + 2.0**-149


@pytest.mark.parametrize("name", RULES)
def test_n4_zero_block(name):
    x = torch.randn(4, 96)
    x[1, 32:64] = 0
    q = hq.quantize(x, name)
    assert q.scales[1, 1] == 0 and not q.codes[1, 16:32].any() and not (q.scales == 0xFF).any()
    assert not q.dequantize()[1, 32:64].any()


@pytest.mark.parametrize("name", RULES)
def test_n6_tiny_rows(name):
    rows = torch.tensor([1.0, 1e-36, 3e-37, 1.2e-38, 9.2e-41])
    restored = hq.quantize(rows[:, None].expand(5, 32), name).dequantize()
    assert restored.isfinite().all()
    step = torch.maximum(rows, torch.tensor(2.0**-126))  # half a step of codes 4 to 6 is at most amax / 4
    assert ((restored - rows[:, None]).abs() <= step[:, None] / 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RULES)
def test_n9_ties(name, dtype):
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat((torch.tensor([6.0]), ties, -ties, torch.zeros(17)))[None].to(dtype)
    q = hq.quantize(x, name)
    assert q.scales.item() == 127
    assert decode_e2m1(unpack_nibbles(q.codes))[0, 1:15].tolist() == [0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4]


def test_floor_saturates_and_ceil_does_not():
    x = block_with(7.9)
    assert hq.quantize(x, "mxfp4").dequantize()[0, 5] == -6
    assert hq.quantize(x, "mxfp4-ceil").dequantize()[0, 5] == -8
    assert hq.quantize(x, "mxfp4-even").dequantize()[0, 5] == -8
