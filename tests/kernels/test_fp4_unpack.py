"""bfloat16 copies of FP4 operands, in their own order and in that of their words' nibbles: exact, all of it written."""

import pytest
import torch

import hadaquant as hq
from hadaquant import reference
from hadaquant.kernels.gemm_fp4 import SPAN, unpack

SHAPES = [(1, 32), (3, 96), (9, 256), (5, 1056)]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpacked_values_are_exact(format, shape, device):
    q = hq.quantize(torch.randn(shape), format, backend="reference")
    expected = reference._scaled_codes(q.codes, q.scales, q.format)
    found = unpack(q.codes.to(device), q.scales.to(device), q.format).cpu()
    assert torch.equal(found.float(), expected)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nibble_i_of_word_c_comes_in_column_16_i_plus_c(format, shape, device):
    q = hq.quantize(torch.randn(shape), format, backend="reference")
    m, k = shape
    spans = -(-k // SPAN)
    padded = torch.zeros(m, spans * SPAN)
    padded[:, :k] = reference._scaled_codes(q.codes, q.scales, q.format)
    expected = padded.view(m, spans, 16, 8).transpose(2, 3).reshape(m, -1)
    found = unpack(q.codes.to(device), q.scales.to(device), q.format, by_nibble=True).cpu()
    assert torch.equal(found.float(), expected)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_nan_scale_gives_nan(format, device):
    x = torch.randn(4, 64)
    x[2, 40] = torch.nan
    q = hq.quantize(x, format, backend="reference")
    for by_nibble in (False, True):
        found = unpack(q.codes.to(device), q.scales.to(device), q.format, by_nibble).cpu()
        assert found.isnan().any(1).tolist() == [False, False, True, False]
        assert int(found.isnan().sum()) == q.format.block
