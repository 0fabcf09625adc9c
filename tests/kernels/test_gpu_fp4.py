"""FP4 products on a GPU: each kernel as close to the exact product as torch, at every shape, NaN where it belongs."""

import pytest
import torch

import hadaquant as hq

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from hadaquant.kernels.gemm import scaled_mm

FORMATS = ("nvfp4", "mxfp4-even")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def operand(rows: int, k: int, format: str, seed: int) -> hq.QuantizedTensor:
    gen = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, k, generator=gen, device="cuda") * torch.randn(rows, 1, generator=gen, device="cuda").exp()
    return hq.quantize(x, format)


def product(x, w, bias, dtype, kernel: str, tile=None) -> torch.Tensor:
    gs = (x.global_scale, w.global_scale)
    return scaled_mm(
        x.codes, x.scales, gs[0], w.codes, w.scales, gs[1], x.format, bias, dtype, kernel=kernel, tile=tile
    )


def assert_close(x, w, bias, dtype, kernel: str, tile=None) -> None:
    y = product(x, w, bias, dtype, kernel, tile)
    values = x.dequantize(), w.dequantize()
    exact = values[0].double() @ values[1].double().T
    torchs = values[0] @ values[1].T
    if bias is not None:
        exact, torchs = exact + bias.double(), torchs + bias.float()
    error, allowed = ((t.double() - exact).norm() for t in (y, torchs.to(dtype)))
    assert error <= 2 * allowed + 2.0**-22 * exact.norm(), f"{kernel} {tile} {tuple(y.shape)} {dtype}"


def cases(kernel: str):
    if kernel == "fp4_gemv":
        return [(m, None) for m in (1, 2, 3, 4)]
    if kernel == "fp4_few_rows":
        return [(1, (16, 16)), (16, (16, 16)), (15, (16, 32)), (31, (32, 16)), (40, (32, 32)), (64, (64, 16))]
    return [(1, (16, 128)), (17, (32, 128)), (64, (64, 128)), (130, (128, 128)), (300, (256, 128)), (1100, (256, 128))]


@pytest.mark.parametrize("kernel", ["fp4_gemv", "fp4_few_rows", "fp4_mm_hopper"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(40, 32), (520, 1056), (1032, 4096), (4096, 4128)], ids=str)
def test_products_are_as_close_as_torchs(kernel, format, shape):
    n, k = shape
    if kernel == "fp4_mm_hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is written for sm_90")
    w = operand(n, k, format, 0)
    for m, tile in cases(kernel):
        x = operand(m, k, format, m)
        for dtype in DTYPES[: 2 if kernel == "fp4_mm_hopper" else 3]:
            for bias in (None, torch.randn(n, device="cuda").to(dtype)):
                assert_close(x, w, bias, dtype, kernel, tile)


@pytest.mark.parametrize("kernel", ["fp4_gemv", "fp4_few_rows"])
@pytest.mark.parametrize("n", [1, 17, 33, 22473])
def test_s3_odd_numbers_of_outputs(kernel, n):
    assert_close(operand(2, 96, "nvfp4", 1), operand(n, 96, "nvfp4", 2), None, torch.float32, kernel, (16, 16))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m", [1, 2, 9, 33, 100, 257])
def test_a_nan_stays_in_its_row_and_its_column(format, m):
    x, w = torch.randn(m, 256, device="cuda"), torch.randn(64, 256, device="cuda")
    clean = hq.scaled_mm(hq.quantize(x, format, **scale_of(format)), hq.quantize(w, format, **scale_of(format)))
    x[0, 5], w[3, 200] = torch.nan, torch.inf
    y = hq.scaled_mm(hq.quantize(x, format, **scale_of(format)), hq.quantize(w, format, **scale_of(format)))
    assert y[0].isnan().all() and y[:, 3].isnan().all()
    keep = torch.ones_like(y, dtype=torch.bool)
    keep[0], keep[:, 3] = False, False
    assert torch.equal(y[keep], clean[keep])


def scale_of(format: str) -> dict[str, float]:
    return {"global_scale": 0.001} if format == "nvfp4" else {}


@pytest.mark.parametrize("m", [1, 16, 64, 300])
def test_weights_that_begin_anywhere(m):
    x, w = operand(m, 128, "nvfp4", 0), operand(64, 128, "nvfp4", 1)
    moved = torch.empty(w.codes.numel() + 8, dtype=torch.uint8, device="cuda")[8:].view_as(w.codes).copy_(w.codes)
    other = hq.QuantizedTensor(moved, w.scales, w.global_scale, w.format, w.rotation)
    assert torch.equal(hq.scaled_mm(x, other), hq.scaled_mm(x, w))
