"""FP4 product by way of bfloat16 copies of both operands, for hardware without FP4 units.

``unpack`` writes code · scale, which bfloat16 holds exactly: 0.56 bytes read and 2 written a code, device memory
is the roof. ``through_bfloat16`` multiplies such copies by torch's own product into float32; one pass then
does the global scales, the bias and the rounding.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.kernels.numerics import bits, decode_e2m1, decode_e4m3, decode_e8m0, from_bits, narrow, widen
from hadaquant.kernels.runtime import OPTIONS, given, launch, launches_overlap, overlapping
from hadaquant.kernels.vendor import bfloat16_mm, row_chunks
from hadaquant.layout import NIBBLE_SPAN


@triton.jit
def unpack_kernel(
    codes_ptr, scales_ptr, y_ptr, M, K, BLOCK: tl.constexpr, RULE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """code · scale [M, K]."""
    spans = tl.cdiv(K, COLS)
    row = (tl.program_id(0) // spans).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = (tl.program_id(0) % spans) * COLS + tl.arange(0, COLS)
    inside = (row < M)[:, None] & (k < K)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    byte = tl.load(codes_ptr + row[:, None] * (K // 2) + (k // 2)[None, :], mask=inside, other=0).to(tl.int32)
    stored = tl.load(scales_ptr + row[:, None] * (K // BLOCK) + (k // BLOCK)[None, :], mask=inside, other=0)
    y = decode_e2m1((byte >> (k % 2 * 4)[None, :]) & 15) * _decode(stored, RULE)
    tl.store(y_ptr + row[:, None] * K + k[None, :], narrow(y, tl.bfloat16), mask=inside)


@triton.jit
def _decode(stored, RULE: tl.constexpr):
    if RULE == "e4m3_global":
        return decode_e4m3(stored.to(tl.int32))
    else:
        return decode_e8m0(stored.to(tl.int32))


@triton.jit
def _code(word, NIBBLE: tl.constexpr):
    """2^-126 times the E2M1 value of a nibble: its bits where a float32 has them."""
    UP: tl.constexpr = 22 - 4 * NIBBLE
    magnitude = word << UP if UP >= 0 else word >> -UP
    return from_bits(((word << (UP + 6)) & -2147483648) | (magnitude & 0x01C00000))


@triton.jit
def _pair(low, high, scale):
    """Two codes as :func:`_code` has them, times their scale, as bfloat16: the upper halves of float32, exactly."""
    low, high = bits((low * 2.0**126) * scale), bits((high * 2.0**126) * scale)
    return ((low >> 16) & 0xFFFF) | (high & -65536)


@triton.jit
def unpack_words_kernel(
    codes_ptr, scales_ptr, y_ptr, M, PAIRS, WIDTH, BLOCK: tl.constexpr, RULE: tl.constexpr, BY_NIBBLE: tl.constexpr,
    N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """code · scale [M, 16 · WIDTH] in the order of ``layout.by_nibble``, or of ``interleaved``.

    A thread has a pair of words, 16 codes of a block.
    """
    pair = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    row, column = pair // WIDTH, (pair % WIDTH).to(tl.int32)
    inside = (row < M) & (column < PAIRS)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pairs = codes_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    words = tl.load(pairs + row * PAIRS + column, mask=inside, other=0)
    first, second = words.to(tl.int32), (words >> 32).to(tl.int32)
    stored = tl.load(scales_ptr + (row * PAIRS + column) * 16 // BLOCK, mask=inside, other=0)
    scale = _decode(stored, RULE)
    where = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row * (WIDTH * 8)
    for i in tl.static_range(8):
        if BY_NIBBLE:
            both = _pair(_code(first, i), _code(second, i), scale)
            tl.store(where + column // 8 * 64 + column % 8 + 8 * i, both, mask=row < M)
        else:
            word = first if i < 4 else second
            both = _pair(_code(word, i % 4), _code(word, i % 4 + 4), scale)
            tl.store(where + column * 8 + i, both, mask=row < M)


@triton.jit
def finish_kernel(
    acc_ptr, gx_ptr, gw_ptr, bias_ptr, y_ptr, M, N,
    HAS_GLOBAL: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y = RN(acc · (gx · gw) + bias) of float32 sums [M, N]."""
    tiles_n = tl.cdiv(N, BN)
    row = (tl.program_id(0) // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    column = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    mask = (row < M)[:, None] & (column < N)[None, :]
    y = tl.load(acc_ptr + row[:, None] * N + column[None, :], mask=mask, other=0.0)
    if HAS_GLOBAL:
        y = y * (tl.load(gx_ptr) * tl.load(gw_ptr))
    if HAS_BIAS:
        y = y + widen(tl.load(bias_ptr + column, mask=column < N, other=0.0))[None, :]
    tl.store(y_ptr + row[:, None] * N + column[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)


def unpack_config(format: Format, overlap: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`unpack_kernel`."""
    rule = {"BLOCK": format.block, "RULE": format.scale.name}
    return {**rule, "ROWS": 8, "COLS": 128, "OVERLAP": overlap, "num_warps": 4, **OPTIONS}


def words_config(format: Format, by_nibble: bool, overlap: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`unpack_words_kernel`."""
    rule = {"BLOCK": format.block, "RULE": format.scale.name, "BY_NIBBLE": by_nibble}
    return {**rule, "N": 128, "OVERLAP": overlap, "num_warps": 4, **OPTIONS}


def finish_config(format: Format, has_bias: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`finish_kernel`."""
    return {
        "HAS_GLOBAL": format.has_global_scale,
        "HAS_BIAS": has_bias,
        "BM": 8,
        "BN": 512,
        "num_warps": 4,
        **OPTIONS,
    }


def interleaved(x: Tensor) -> Tensor:
    """x [M, K] with the first and the last four of each eight columns in turn: 0, 4, 1, 5, 2, 6, 3, 7."""
    m, k = x.shape
    return x.view(m, k // 8, 2, 4).transpose(2, 3).reshape(m, k)


def unpack(codes: Tensor, scales: Tensor, format: Format) -> Tensor:
    """bfloat16 [M, K] of contiguous codes and scales."""
    m, k = codes.shape[0], format.k_of(codes.shape[1])
    config = unpack_config(format, launches_overlap(codes.device))
    y = torch.empty(m, k, dtype=torch.bfloat16, device=codes.device)
    grid = (triton.cdiv(m, config["ROWS"]) * triton.cdiv(k, config["COLS"]),)
    launch(unpack_kernel, grid, (codes, scales, y, m, k), config | overlapping(config))
    return y


def unpack_words(codes: Tensor, scales: Tensor, format: Format, by_nibble: bool) -> Tensor:
    """bfloat16 [M, K] of contiguous, 16-byte aligned codes and scales in the order of :func:`interleaved`; K % 32 == 0.

    ``by_nibble``: in that of ``layout.by_nibble``, K rounded up to whole spans.
    """
    m, pairs = codes.shape[0], format.k_of(codes.shape[1]) // 16
    width = triton.cdiv(pairs * 16, NIBBLE_SPAN) * NIBBLE_SPAN // 16 if by_nibble else pairs
    config = words_config(format, by_nibble, launches_overlap(codes.device))
    y = torch.empty(m, width * 16, dtype=torch.bfloat16, device=codes.device)
    grid = (triton.cdiv(m * width, config["N"]),)
    launch(unpack_words_kernel, grid, (codes, scales, y, m, pairs, width), config | overlapping(config))
    return y


def through_bfloat16(
    x: Tensor, sx: Tensor, gx: Tensor | None, w: Tensor, sw: Tensor, gw: Tensor | None, bias: Tensor | None, y: Tensor,
    format: Format,
) -> None:  # fmt: skip
    """y [M, N] of contiguous packed x [M, K/2], w [N, K/2]. Rows of x in chunks, w [N, K] in bfloat16 at once."""
    n = w.shape[0]
    wide = unpack(w, sw, format)
    config = finish_config(format, bias is not None)
    gx, gw, b = given(gx, sw), given(gw, sw), given(bias, sw)
    for rows in row_chunks(x.shape[0], n):
        acc = bfloat16_mm(unpack(x[rows], sx[rows], format), wide)
        m = acc.shape[0]
        grid = (triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"]),)
        launch(finish_kernel, grid, (acc, gx, gw, b, y[rows], m, n), config)
