"""The clauses of INT8."""

import pytest
import torch

import hadaquant as hq


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def test_n15_division_not_a_reciprocal():
    for amax, half, code in ((2.796875, -1.3984375, -63), (3.734375, -1.8671875, -64)):
        q = hq.quantize(row(amax, half), "int8")
        assert q.codes.tolist() == [[127, code]]


def test_n16_ties():
    q = hq.quantize(row(127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 126.5), "int8")
    assert q.scales.tolist() == [1.0]
    assert q.codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, 0, 126]]


def test_n17_scale_bits():
    q = hq.quantize(row(2.796875, 0.5).to(torch.bfloat16), "int8")
    assert q.scales.view(torch.int32).tolist() == [0x3CB468D2]


def test_n4_zero_rows():
    floor = (torch.tensor(1e-12) / torch.tensor(127.0)).item()
    x = torch.randn(3, 40)
    x[1] = 0
    q = hq.quantize(x, "int8")
    assert q.scales[1] == floor and not q.codes[1].any() and not q.dequantize()[1].any()
    assert hq.quantize(torch.zeros(2, 5), "int8").scales.tolist() == [floor, floor]


def test_n6_tiny_rows():
    rows = torch.tensor([1.0, 1e-11, 1e-12, 1e-36, 3e-37, 1.2e-38, 9.2e-41])
    restored = hq.quantize(rows[:, None].expand(7, 33), "int8").dequantize()
    assert restored.isfinite().all()
    step = torch.maximum(rows, torch.tensor(1e-12)) / 127
    assert ((restored - rows[:, None]).abs() <= step[:, None] / 2).all()


@pytest.mark.parametrize("k", [1, 3, 17, 1000])
def test_any_k(k):
    x = torch.randn(4, k)
    q = hq.quantize(x, "int8")
    assert q.codes.shape == (4, k) and q.scales.shape == (4,)
    assert q.codes.abs().amax(-1).eq(127).all()
    assert ((q.dequantize() - x).abs() <= q.scales[:, None] * 0.5001).all()


def test_minus_128_is_never_written():
    x = torch.cat((torch.full((1, 64), -3.0), -torch.rand(200, 64)))
    assert hq.quantize(x, "int8").codes.min() == -127
