"""The launchers of products with full activations give each parameter of their kernels once, in its place."""

import pytest
import torch

import hadaquant as hq
from hadaquant.ops.plan import interpreting

if interpreting():
    pytest.skip("Gluon does not run in the interpreter", allow_module_level=True)

from hadaquant.kernels import gemm_fp4_hopper, weight_only, weight_only_small

from .test_fp4_launchers import launched


def operands(m: int, n: int, k: int, format: str) -> tuple[torch.Tensor, hq.QuantizedTensor]:
    return torch.randn(m, k).bfloat16(), hq.quantize(torch.randn(n, k), format, backend="reference")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tile", weight_only_small.SLICES_AND_WORDS, ids=str)
def test_few_rows(monkeypatch, format, with_bias, tile):
    m, n, k = 40, 100, 96
    x, w = operands(m, n, k, format)
    bias = torch.randn(n) if with_bias else None

    def run():
        y = weight_only.weight_mm(
            x, w.codes, w.scales, w.global_scale, w.format, bias, torch.float16, kernel="weight_few_rows", tile=tile
        )
        assert y.shape == (m, n) and y.dtype == torch.float16

    found = launched(monkeypatch, weight_only_small, "weight_few_rows_kernel", run)
    given = found.given
    assert given["K32"] == k // 32 and given["N"] == n and given["M"] == m
    assert torch.equal(given["x_ptr"], x) and torch.equal(given["w_ptr"], w.codes)
    assert torch.equal(given["sw_ptr"], w.scales)
    assert given["HAS_GLOBAL"] == (format == "nvfp4") and given["HAS_BIAS"] == with_bias
    assert (given["bias_ptr"] is bias) == with_bias
    if format == "nvfp4":
        assert given["gw_ptr"] is w.global_scale
    assert (found.grid[0] - 1) * given["BN"] < n <= found.grid[0] * given["BN"]
    assert (found.grid[1] - 1) * given["BM"] < m <= found.grid[1] * given["BM"]
    assert (given["BM"], given["BN"]) == tile


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_hopper_gets_the_weights_global_scale_once(monkeypatch, format):
    x, w = operands(20, 104, 256, format)
    calls = []
    monkeypatch.setattr(gemm_fp4_hopper, "multiply", lambda *arguments: calls.append(arguments))
    how = {"kernel": "weight_mm_hopper", "tile": (32, 128), "by_nibble": True}
    weight_only.weight_mm(x, w.codes, w.scales, w.global_scale, w.format, None, torch.bfloat16, **how)
    ((values, gx, codes, scales, gw, bias, y, f, rows),) = calls
    assert values is x and torch.equal(codes, w.codes) and torch.equal(scales, w.scales)
    assert gw is w.global_scale and (gx is None if format == "mxfp4" else gx.item() == 1.0)
    assert bias is None and y.shape == (20, 104) and f is w.format and rows == 32
