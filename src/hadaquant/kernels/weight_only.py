"""Products of bfloat16 x [M, K] that is not coded and a quantized w [N, K]: twins of ``reference.weight_mm``.

A weight stands in the product as code · block scale, or as its code where a row has one scale: exact in bfloat16.
Sums are float32; the global scale or the row's, the bias and the rounding come last. ``weight_mm_kernel`` is the
portable one and takes any M, N, K. 0.5625 bytes a weight move for NVFP4, 1 for INT8; with few rows that binds, and
decoding them, with many the bfloat16 matrix units.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from hadaquant.formats import Format
from hadaquant.kernels.gemm import _decode_tile, _tile_of
from hadaquant.kernels.gemm_fp4 import unpack
from hadaquant.kernels.numerics import narrow, widen
from hadaquant.kernels.rotate import rotate_round
from hadaquant.kernels.runtime import OPTIONS, aligned, given, launch
from hadaquant.kernels.vendor import bfloat16_mm, row_chunks
from hadaquant.layout import NIBBLE_SPAN
from hadaquant.rotation import NONE


@triton.jit
def _finish(acc, sw_ptr, gw_ptr, bias_ptr, column, N, RULE: tl.constexpr, HAS_GLOBAL: tl.constexpr,
            HAS_BIAS: tl.constexpr):  # fmt: skip
    """Float32 sums, times the row's or the global scale, plus the bias."""
    if RULE == "absmax":
        acc = acc * tl.load(sw_ptr + column, mask=column < N, other=0.0)[None, :]
    if HAS_GLOBAL:
        acc = acc * tl.load(gw_ptr)
    if HAS_BIAS:
        acc = acc + widen(tl.load(bias_ptr + column, mask=column < N, other=0.0))[None, :]
    return acc


@triton.jit
def weight_mm_kernel(
    x_ptr, w_ptr, sw_ptr, gw_ptr, bias_ptr, y_ptr, M, N, K,
    BLOCK: tl.constexpr, RULE: tl.constexpr, HAS_GLOBAL: tl.constexpr, HAS_BIAS: tl.constexpr, DOT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    row, column = _tile_of(M, N, BM, BN, GROUP_M)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_ptr + row[:, None] * K + k[None, :], mask=(row < M)[:, None] & (k < K)[None, :], other=0.0)
        if tl.float32 == DOT:
            x = widen(x)
        if RULE == "absmax":
            inside = (column < N)[:, None] & (k < K)[None, :]
            w = tl.load(w_ptr + column[:, None] * K + k[None, :], mask=inside, other=0).to(tl.float32).to(DOT)
        else:
            w = _decode_tile(w_ptr, sw_ptr, column, N, start, K, BN, BK, BLOCK, RULE, DOT)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    y = _finish(acc, sw_ptr, gw_ptr, bias_ptr, column, N, RULE, HAS_GLOBAL, HAS_BIAS)
    mask = (row < M)[:, None] & (column < N)[None, :]
    tl.store(y_ptr + row[:, None] * N + column[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish_kernel(
    acc_ptr, sw_ptr, gw_ptr, bias_ptr, y_ptr, M, N,
    RULE: tl.constexpr, HAS_GLOBAL: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y [M, N] of float32 sums."""
    tiles_n = tl.cdiv(N, BN)
    row = (tl.program_id(0) // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    column = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    mask = (row < M)[:, None] & (column < N)[None, :]
    acc = tl.load(acc_ptr + row[:, None] * N + column[None, :], mask=mask, other=0.0)
    y = _finish(acc, sw_ptr, gw_ptr, bias_ptr, column, N, RULE, HAS_GLOBAL, HAS_BIAS)
    tl.store(y_ptr + row[:, None] * N + column[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)


def of_format(format: Format, has_bias: bool) -> dict[str, Any]:
    """Compile-time arguments that say what the weight is."""
    return {"RULE": format.scale.name, "HAS_GLOBAL": format.has_global_scale, "HAS_BIAS": has_bias}


def config(m: int, format: Format, has_bias: bool) -> dict[str, Any]:
    """Tile, compile-time arguments and launch options of :func:`weight_mm_kernel`."""
    tile = {"BM": 64, "BN": 64, "BK": 64, "num_stages": 2}
    if m <= 16:  # narrow tiles, which are many, so that more weights are on their way
        tile = {"BM": 16, "BN": 16, "BK": 128, "num_stages": 4}
    return {**of_format(format, has_bias), "BLOCK": format.block or 0, **tile, "GROUP_M": 8, "num_warps": 4, **OPTIONS}


def finish_config(format: Format, has_bias: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`finish_kernel`."""
    return {**of_format(format, has_bias), "BM": 8, "BN": 512, "num_warps": 4, **OPTIONS}


def weight_mm(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_global: Tensor | None,
    format: Format,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    kernel: str,
    tile: tuple[int, int] | None = None,
    by_nibble: bool = False,
) -> Tensor:
    """[M, N] as ``reference.weight_mm``, but for the order of sums. ``kernel`` and ``tile`` are the plan's.

    ``by_nibble``: x is in that order already, as the Hopper product reads it.
    """
    m, n = x.shape[0], w_codes.shape[0]
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    x, w, sw = (t.contiguous() for t in (x, w_codes, w_scales))
    bias = bias.contiguous() if bias is not None else None
    if kernel == "weight_few_rows":
        from hadaquant.kernels.weight_only_small import few_rows

        x, w, sw = (aligned(t) for t in (x, w, sw))
        few_rows(x, w, sw, w_global, bias, y, format, tile or (16, 16))
    elif kernel == "weight_mm_hopper":
        from hadaquant.kernels.gemm_fp4_hopper import multiply

        if not by_nibble:
            missing = -x.shape[1] % NIBBLE_SPAN
            x = rotate_round(pad(x, (0, missing)) if missing else x, NONE, by_nibble=True)
        # that kernel multiplies by the global scales of both operands
        one = None if w_global is None else torch.ones_like(w_global)
        multiply(x, one, aligned(w), aligned(sw), w_global, bias, y, format, (tile or (256, 128))[0])
    elif kernel == "weight_unpacked":
        _through_bfloat16(x, w, sw, w_global, bias, y, format)
    else:
        c = config(m, format, bias is not None)
        # the interpreter's bfloat16 is not the hardware's; the values are exact in either
        dot = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
        grid = (triton.cdiv(m, c["BM"]) * triton.cdiv(n, c["BN"]),)
        arguments = x, w, sw, given(w_global, x), given(bias, x), y, m, n, x.shape[1]
        launch(weight_mm_kernel, grid, arguments, c | {"DOT": dot})
    return y


def _through_bfloat16(
    x: Tensor, w: Tensor, sw: Tensor, gw: Tensor | None, bias: Tensor | None, y: Tensor, format: Format
) -> None:
    """y [M, N] by torch's product with a bfloat16 copy of w, in chunks of rows of float32 sums."""
    wide = w.to(torch.bfloat16) if format.block is None else unpack(w, sw, format)
    n, c = w.shape[0], finish_config(format, bias is not None)
    gw, b = given(gw, sw), given(bias, sw)
    for rows in row_chunks(x.shape[0], n):
        acc = bfloat16_mm(x[rows], wide)
        m = acc.shape[0]
        grid = (triton.cdiv(m, c["BM"]) * triton.cdiv(n, c["BN"]),)
        launch(finish_kernel, grid, (acc, sw, gw, b, y[rows], m, n), c)
