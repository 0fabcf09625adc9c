"""bfloat16 copies of FP4 operands, in their own order and in those of the products: exact, all of it written."""

import pytest
import torch

import hadaquant as hq
from hadaquant import reference
from hadaquant.kernels.gemm_fp4 import interleaved, through_bfloat16, unpack, unpack_words
from hadaquant.layout import NIBBLE_SPAN, by_nibble

SHAPES = [(1, 32), (3, 96), (9, 256), (5, 1056)]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpacked_values_are_exact(format, shape, device):
    q = hq.quantize(torch.randn(shape), format, backend="reference")
    expected = reference._scaled_codes(q.codes, q.scales, q.format)
    found = unpack(q.codes.to(device), q.scales.to(device), q.format).cpu()
    assert torch.equal(found.float(), expected)


def test_interleaved_columns():
    assert interleaved(torch.arange(16)[None]).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_in_the_orders_of_the_products(format, shape, device):
    q = hq.quantize(torch.randn(shape), format, backend="reference")
    values = reference._scaled_codes(q.codes, q.scales, q.format)
    codes, scales = q.codes.to(device), q.scales.to(device)
    assert torch.equal(unpack_words(codes, scales, q.format, by_nibble=False).cpu().float(), interleaved(values))
    padded = by_nibble(torch.nn.functional.pad(values, (0, -shape[1] % NIBBLE_SPAN)))
    assert torch.equal(unpack_words(codes, scales, q.format, by_nibble=True).cpu().float(), padded)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_nan_scale_gives_nan(format, device):
    x = torch.randn(4, 64)
    x[2, 40] = torch.nan
    q = hq.quantize(x, format, backend="reference")
    codes, scales = q.codes.to(device), q.scales.to(device)
    for copy in (unpack(codes, scales, q.format), *(unpack_words(codes, scales, q.format, o) for o in (False, True))):
        found = copy.cpu()
        assert found.isnan().any(1).tolist() == [False, False, True, False]
        assert int(found.isnan().sum()) == q.format.block


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", [(1, 48, 64), (19, 33, 96), (5, 1, 32), (130, 70, 160)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_product_of_copies_is_as_close_as_torchs(format, shape, dtype, device):
    m, n, k = shape
    x, w = (hq.quantize(torch.randn(rows, k), format, backend="reference") for rows in (m, n))
    for bias in (None, torch.randn(n).to(dtype)):
        y = torch.full((m, n), torch.nan, dtype=dtype, device=device)
        gx, gw = (None if q.global_scale is None else q.global_scale.to(device) for q in (x, w))
        moved = [t.to(device) for t in (x.codes, x.scales, w.codes, w.scales)]
        through_bfloat16(*moved[:2], gx, *moved[2:], gw, None if bias is None else bias.to(device), y, x.format)
        values = x.dequantize(), w.dequantize()
        exact, torchs = values[0].double() @ values[1].double().T, values[0] @ values[1].T
        if bias is not None:
            exact, torchs = exact + bias.double(), torchs + bias.float()
        error, allowed = ((t.double() - exact).norm() for t in (y.cpu(), torchs.to(dtype)))
        assert error <= 2 * allowed + 2.0**-22 * exact.norm()
