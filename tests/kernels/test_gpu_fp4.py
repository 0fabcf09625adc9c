"""FP4 products on a GPU: each kernel as close to the exact product as torch, at every shape, NaN where it belongs."""

import pytest
import torch

import hadaquant as hq

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from hadaquant.kernels.gemm import scaled_mm

FORMATS = ("nvfp4", "mxfp4-even")
#: Rows of x, tile, dtype of y, whether with a bias: each kernel once in each of its forms, since each is compiled.
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = {
    "fp4_gemv": [(1, None, BF16, True), (2, None, FP32, False), (3, None, FP16, False), (4, None, BF16, True)],
    "fp4_value_rows": [
        (5, (8, 16), BF16, True),
        (13, (16, 16), BF16, False),
        (16, (16, 32), FP32, False),
        (7, (8, 32), FP16, True),
        (31, (32, 32), FP16, False),
        (64, (64, 32), BF16, True),
    ],
    "fp4_mm_hopper": [
        (1, (16, 128), BF16, True),
        (17, (32, 128), FP16, False),
        (64, (64, 128), BF16, False),
        (130, (128, 128), BF16, True),
        (300, (256, 128), BF16, False),
    ],
}


def operand(rows: int, k: int, format: str, seed: int) -> hq.QuantizedTensor:
    gen = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, k, generator=gen, device="cuda") * torch.randn(rows, 1, generator=gen, device="cuda").exp()
    return hq.quantize(x, format, backend="reference")


def product(x, w, bias, dtype, kernel: str, tile=None) -> torch.Tensor:
    gs = (x.global_scale, w.global_scale)
    return scaled_mm(
        x.codes, x.scales, gs[0], w.codes, w.scales, gs[1], x.format, bias, dtype, kernel=kernel, tile=tile
    )


def assert_close(y, x, w, bias, what: str = "") -> None:
    values = x.dequantize(), w.dequantize()
    exact = values[0].double() @ values[1].double().T
    torchs = values[0] @ values[1].T
    if bias is not None:
        exact, torchs = exact + bias.double(), torchs + bias.float()
    error, allowed = ((t.double() - exact).norm() for t in (y, torchs.to(y.dtype)))
    assert error <= 2 * allowed + 2.0**-22 * exact.norm(), f"{what} {tuple(y.shape)} {y.dtype}"


def needs_hopper(kernel: str) -> None:
    if kernel == "fp4_mm_hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is written for sm_90")


@pytest.mark.parametrize("kernel", CASES)
@pytest.mark.parametrize("format", FORMATS)
def test_products_are_as_close_as_torchs(kernel, format):
    needs_hopper(kernel)
    for n, k in ((40, 96), (520, 1056), (1032, 4128)):
        w = operand(n, k, format, 0)
        for m, tile, dtype, has_bias in CASES[kernel]:
            x = operand(m, k, format, m)
            bias = torch.randn(n, device="cuda").to(dtype) if has_bias else None
            assert_close(product(x, w, bias, dtype, kernel, tile), x, w, bias, f"{kernel} {tile} {k}")


@pytest.mark.parametrize("shares", [(16, 2, 1), (64, 4, 1), (128, 1, 2), (256, 1, 2)], ids=str)
@pytest.mark.parametrize("programs", [7, 132])
def test_slices_of_k_and_parts_of_tiles(shares, programs):
    needs_hopper("fp4_mm_hopper")
    from hadaquant.kernels.gemm_fp4 import unpack_words
    from hadaquant.kernels.gemm_fp4_hopper import multiply

    m, n, k = 2 * shares[0] - 9, 1032, 1056
    x, w, y = operand(m, k, "nvfp4", 1), operand(n, k, "nvfp4", 2), torch.full((m, n), torch.nan).to("cuda", BF16)
    values = unpack_words(x.codes, x.scales, x.format, by_nibble=True)
    gs = x.global_scale, w.global_scale
    multiply(values, gs[0], w.codes, w.scales, gs[1], None, y, x.format, shares=shares, programs=programs)
    assert_close(y, x, w, None, str(shares))


@pytest.mark.parametrize("kernel", ["fp4_gemv", "fp4_value_rows"])
@pytest.mark.parametrize("n", [17, 22473])
def test_s3_odd_numbers_of_outputs(kernel, n):
    x, w = operand(2, 96, "nvfp4", 1), operand(n, 96, "nvfp4", 2)
    assert_close(product(x, w, None, FP32, kernel, (16, 16)), x, w, None)


@pytest.mark.parametrize(("format", "m"), [("nvfp4", m) for m in (1, 9, 33, 257)] + [("mxfp4-even", 9)])
def test_a_nan_stays_in_its_row_and_its_column(format, m):
    x, w = torch.randn(m, 256, device="cuda"), torch.randn(72, 256, device="cuda")
    clean = hq.scaled_mm(hq.quantize(x, format, **scale_of(format)), hq.quantize(w, format, **scale_of(format)))
    x[0, 5], w[3, 200] = torch.nan, torch.inf
    y = hq.scaled_mm(hq.quantize(x, format, **scale_of(format)), hq.quantize(w, format, **scale_of(format)))
    assert y[0].isnan().all() and y[:, 3].isnan().all()
    keep = torch.ones_like(y, dtype=torch.bool)
    keep[0], keep[:, 3] = False, False
    assert torch.equal(y[keep], clean[keep])


def scale_of(format: str) -> dict[str, float]:
    return {"global_scale": 0.001} if format == "nvfp4" else {}


@pytest.mark.parametrize("m", [1, 16, 300])
def test_weights_that_begin_anywhere(m):
    x, w = operand(m, 128, "nvfp4", 0), operand(72, 128, "nvfp4", 1)
    moved = torch.empty(w.codes.numel() + 8, dtype=torch.uint8, device="cuda")[8:].view_as(w.codes).copy_(w.codes)
    other = hq.QuantizedTensor(moved, w.scales, w.global_scale, w.format, w.rotation)
    assert torch.equal(hq.scaled_mm(x, other), hq.scaled_mm(x, w))
