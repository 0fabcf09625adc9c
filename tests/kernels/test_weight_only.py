"""Weights alone quantized: the kernels round as the reference, and multiply as closely as torch."""

import pytest
import torch

import hadaquant as hq
from hadaquant import front, layout, reference
from hadaquant.kernels import rotate as rotate_module
from hadaquant.kernels import weight_only
from hadaquant.rotation import Rotation, parse

FORMATS = ("int8", "nvfp4", "mxfp4", "mxfp4-even")
SIGNED = Rotation("regular", 64, torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(1)) * 2.0 - 1)


def bits(t: torch.Tensor) -> torch.Tensor:
    """int16 of bfloat16, every NaN the same."""
    return torch.where(t.isnan(), torch.full_like(t, torch.nan), t).view(torch.int16)


@pytest.mark.parametrize(("rotation", "dtype"), [
    ("none", torch.float16),
    ("sylvester:16", torch.bfloat16),
    ("sylvester:16", torch.float32),
    ("regular:256", torch.bfloat16),
    (SIGNED, torch.bfloat16),
], ids=str)  # fmt: skip
def test_rotated_inputs_are_rounded_as_in_the_reference(rotation, dtype, device):
    r = parse(rotation)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(7, 512, generator=gen) * torch.tensor([1.0, 1e-30, 1e4, 0.0, 1e-4, 3.0, 1.0])[:, None]
    x[5, 3], x[6, 300] = torch.nan, torch.inf
    x = x.to(dtype)
    y = rotate_module.rotate_round(x.to(device), r.to(device)).cpu()
    assert y.dtype == torch.bfloat16
    assert torch.equal(bits(y), bits(reference.rotate_round(x, r)))


@pytest.mark.parametrize("rotation", ["none", "sylvester:16", "regular:256", SIGNED], ids=str)
def test_rotated_inputs_in_the_order_of_nibbles(rotation, device):
    r, x = parse(rotation), torch.randn(5, 512).bfloat16()
    y = rotate_module.rotate_round(x.to(device), r.to(device), by_nibble=True).cpu()
    assert torch.equal(bits(y), bits(layout.by_nibble(reference.rotate_round(x, r))))


def test_every_tie_is_rounded_to_even(device):
    i = torch.arange(1 << 16, dtype=torch.int32) << 16
    x = torch.cat([(i | low).view(torch.float32) for low in (0x7FFF, 0x8000, 0x8001)]).view(-1, 64)
    y = rotate_module.rotate_round(x.to(device), parse("none")).cpu()
    assert torch.equal(bits(y), bits(reference.rotate_round(x, parse("none"))))


def test_a_front_end_is_rounded_once(device):
    x, weight = torch.randn(5, 256).bfloat16(), torch.randn(256)
    expected = reference.rotate_round(x, parse("regular:64"), front.rms_norm(weight))
    y = rotate_module.rotate_round(x.to(device), parse("regular:64"), front.rms_norm(weight.to(device)))
    assert torch.equal(bits(y.cpu()), bits(expected))


def operands(m: int, n: int, k: int, format: str, device: str) -> tuple[torch.Tensor, hq.QuantizedTensor]:
    gen = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=gen).bfloat16() * torch.randn(m, 1, generator=gen).exp().bfloat16()
    w = hq.quantize(torch.randn(n, k, generator=gen), format, backend="reference")
    return x.to(device), w.to(device)


def weight_mm(x, w, bias, dtype, kernel: str, tile=None, **how) -> torch.Tensor:
    return weight_only.weight_mm(
        x, w.codes, w.scales, w.global_scale, w.format, bias, dtype, kernel=kernel, tile=tile, **how
    )


def assert_close(x, w, bias, dtype, kernel: str, tile=None) -> None:
    """At most twice the error of torch's own float32 product of the same numbers, against float64."""
    y = weight_mm(x, w, bias, dtype, kernel, tile)
    assert y.dtype == dtype and y.is_contiguous()
    values = w.dequantize()
    exact, torchs = x.double() @ values.double().T, x.float() @ values.T
    if bias is not None:
        exact, torchs = exact + bias.double(), torchs + bias.float()
    error, allowed = ((t.double() - exact).norm() for t in (y, torchs.to(dtype)))
    assert error <= 2 * allowed + 2.0**-22 * exact.norm(), f"{kernel} {tile} {tuple(y.shape)} {dtype}: {error}"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1, 32), (5, 33, 96), (70, 40, 160), (17, 130, 64)], ids=str)
def test_tiles_are_as_close_as_torchs(shape, format, device):
    x, w = operands(*shape, format, device)
    assert_close(x, w, torch.randn(shape[1], device=device), torch.bfloat16, "weight_mm")
    if format == "nvfp4":
        for dtype in (torch.float16, torch.float32):
            assert_close(x, w, None, dtype, "weight_mm")


@pytest.mark.parametrize("format", ["int8", "nvfp4"])
def test_k_that_is_no_multiple_of_a_tile(format, device):
    assert_close(*operands(3, 20, 48, format, device), None, torch.float32, "weight_mm")


@pytest.mark.parametrize("format", FORMATS)
def test_a_nan_stays_in_its_row_and_its_column(format, device):
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(40, 64)
    g = {"global_scale": 0.001} if format == "nvfp4" else {}
    clean = weight_mm(x.to(device), hq.quantize(w, format, **g).to(device), None, torch.float32, "weight_mm")
    x[1, 3], w[7, 33] = torch.nan, torch.inf
    y = weight_mm(x.to(device), hq.quantize(w, format, **g).to(device), None, torch.float32, "weight_mm")
    assert y[1].isnan().all() and y[:, 7].isnan().all()
    keep = torch.ones_like(y, dtype=torch.bool)
    keep[1], keep[:, 7] = False, False
    assert torch.equal(y[keep], clean[keep])
