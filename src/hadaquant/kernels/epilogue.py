"""Scales and bias of an int8 product whose int32 sums another library made: y = ((acc · sx) · sw) + bias.

Reads 4 bytes and writes 2 or 4 an output; the roof is device memory. Every step is float32 and
rounded, in the order of ``int8_mm_kernel``, so the bits are the same.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hadaquant.kernels.numerics import narrow, widen
from hadaquant.kernels.runtime import OPTIONS, given, launch


@triton.jit
def scale_kernel(
    acc_ptr, sx_ptr, sw_ptr, bias_ptr, y_ptr, M, N, stride,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BN)
    row = (tl.program_id(0) // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    column = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    mask = (row < M)[:, None] & (column < N)[None, :]
    acc = tl.load(acc_ptr + row[:, None] * stride + column[None, :], mask=mask, other=0)
    sx = tl.load(sx_ptr + row, mask=row < M, other=0.0)
    sw = tl.load(sw_ptr + column, mask=column < N, other=0.0)
    y = (acc.to(tl.float32) * sx[:, None]) * sw[None, :]
    if HAS_BIAS:
        y = y + widen(tl.load(bias_ptr + column, mask=column < N, other=0.0))[None, :]
    tl.store(y_ptr + row[:, None] * N + column[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)


def scale_config() -> dict[str, Any]:
    """Tile and launch options of :func:`scale_kernel`."""
    return {"BM": 8, "BN": 512, "num_warps": 4, **OPTIONS}


def scale(acc: Tensor, sx: Tensor, sw: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Write contiguous y [M, N] from int32 acc [M, N] with unit column stride."""
    m, n = y.shape
    config = scale_config() | {"HAS_BIAS": bias is not None}
    grid = (triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"]),)
    launch(scale_kernel, grid, (acc, sx, sw, given(bias, acc), y, m, n, acc.stride(0)), config)
