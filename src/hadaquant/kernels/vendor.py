"""INT8 products by other libraries' kernels, with the contract's scales and bias.

``int8_cublas``: cuBLASLt's int32 sums (torch._int_mm), then one pass of scales and bias.
``int8_bf16``: bfloat16 matrix units over slices of K short enough to be exact, summed in int32: for
GPUs whose int8 units are slow. Both give the bits of ``int8_mm_kernel``.
``int8_sgl``: CUTLASS through sgl_kernel, which multiplies the two scales first: within one ulp.

The int32 sums of all rows can be twice the size of the output and more, so rows go in chunks. Works
without Triton; with it the scales take one pass instead of four.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from hadaquant.errors import DtypeError

#: What the int32 sums of one chunk of rows may take.
ACCUMULATOR_BYTES = 1 << 30
#: 128 · 127 · 1024 < 2**24: every partial sum of int8 products over so many is an exact float32.
BF16_K = 1024
#: torch._int_mm refuses fewer rows on CUDA, and sizes N and K that are no multiple of this.
INT_MM_ROWS, INT_MM_MULTIPLE = 17, 8

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def row_chunks(m: int, n: int, limit: int = ACCUMULATOR_BYTES) -> Iterator[slice]:
    """Slices of m rows, as even as can be, whose int32 sums [rows, n] take at most ``limit`` bytes."""
    most = max(1, limit // (4 * n))
    size = -(-m // -(-m // most))
    for start in range(0, m, size):
        yield slice(start, min(start + size, m))


def scaled_mm(
    x: Tensor,
    sx: Tensor,
    w: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    kernel: str,
    limit: int = ACCUMULATOR_BYTES,
) -> Tensor:
    """[M, N] of int8 x [M, K], w [N, K]: RN_out(((float(acc) · sx) · sw) + bias).

    ``kernel`` is the plan's; ``limit`` bounds the bytes of int32 sums at a time.

    Raises:
        DtypeError: ``int8_sgl`` with a bias of another dtype than the output.
    """
    x, sx, w, sw = (t.contiguous() for t in (x, sx, w, sw))
    bias = bias.contiguous() if bias is not None else None
    if kernel == "int8_sgl":
        return _sgl(x, sx, w, sw, bias, out_dtype)
    n = w.shape[0]
    sums = _cublas_sums if kernel == "int8_cublas" else _bf16_sums
    if kernel == "int8_cublas" and (n % INT_MM_MULTIPLE or w.shape[1] % INT_MM_MULTIPLE):
        w = pad(w, (0, -w.shape[1] % INT_MM_MULTIPLE, 0, -n % INT_MM_MULTIPLE))
    y = torch.empty(x.shape[0], n, dtype=out_dtype, device=x.device)
    for rows in row_chunks(x.shape[0], w.shape[0], limit):
        _scale(sums(x[rows], w)[:, :n], sx[rows], sw, bias, y[rows])
    return y


def _cublas_sums(x: Tensor, w: Tensor) -> Tensor:
    """int32 x · wᵀ; w is padded already."""
    m, k = x.shape
    if m < INT_MM_ROWS or k < w.shape[1]:
        x = pad(x, (0, w.shape[1] - k, 0, max(0, INT_MM_ROWS - m)))
    return torch._int_mm(x, w.T)[:m]


def _bf16_sums(x: Tensor, w: Tensor) -> Tensor:
    """int32 x · wᵀ: each slice of K is exact in float32, and their sum in int32."""
    acc = torch.zeros(x.shape[0], w.shape[0], dtype=torch.int32, device=x.device)
    for k in range(0, x.shape[1], BF16_K):
        a, b = (t[:, k : k + BF16_K].to(torch.bfloat16) for t in (x, w))
        acc += bfloat16_mm(a, b).to(torch.int32)
    return acc


def bfloat16_mm(a: Tensor, b: Tensor) -> Tensor:
    """float32 a · bᵀ of bfloat16 matrices. The CPU has no such product; float32 operands give the same sums."""
    if a.device.type == "cuda":
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return a.to(torch.float32) @ b.to(torch.float32).T


def _scale(acc: Tensor, sx: Tensor, sw: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = RN(((float(acc) · sx) · sw) + bias), every step float32 and rounded."""
    if _HAS_TRITON and acc.device.type == "cuda":
        from hadaquant.kernels.epilogue import scale

        return scale(acc, sx, sw, bias, y)
    wide = acc.to(torch.float32).mul_(sx[:, None]).mul_(sw)
    y.copy_(wide if bias is None else wide.add_(bias.to(torch.float32)))


def _sgl(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    from sgl_kernel import int8_scaled_mm  # type: ignore[import-not-found]

    if bias is not None and bias.dtype != out_dtype:
        fix = f"cast the bias to {out_dtype}, or choose another backend"
        raise DtypeError(
            what="bias with backend='sgl'", found=bias.dtype, expected=f"{out_dtype}, the output's", fix=fix
        )
    return int8_scaled_mm(x, w.T, sx, sw, out_dtype, bias)
