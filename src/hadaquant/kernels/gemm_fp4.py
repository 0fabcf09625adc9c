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
from hadaquant.kernels.numerics import decode_e2m1, decode_e4m3, decode_e8m0, narrow, widen
from hadaquant.kernels.runtime import OPTIONS, given, launches_overlap, on, overlapping
from hadaquant.kernels.vendor import bfloat16_mm, row_chunks

#: Columns between which BY_NIBBLE changes their order: the codes of 16 words.
SPAN = 128


@triton.jit
def unpack_kernel(
    codes_ptr, scales_ptr, y_ptr, M, K, WIDTH, BLOCK: tl.constexpr, RULE: tl.constexpr,
    BY_NIBBLE: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """code · scale [M, WIDTH]; BY_NIBBLE: nibble i of word c of span s in column 128 s + 16 i + c."""
    spans = tl.cdiv(WIDTH, COLS)
    row = (tl.program_id(0) // spans).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out = (tl.program_id(0) % spans) * COLS + tl.arange(0, COLS)
    k = out
    if BY_NIBBLE:
        k = out // SPAN * SPAN + out % (SPAN // 8) * 8 + out // (SPAN // 8) % 8
    inside = (row < M)[:, None] & (k < K)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    byte = tl.load(codes_ptr + row[:, None] * (K // 2) + (k // 2)[None, :], mask=inside, other=0).to(tl.int32)
    stored = tl.load(scales_ptr + row[:, None] * (K // BLOCK) + (k // BLOCK)[None, :], mask=inside, other=0)
    if RULE == "e4m3_global":
        scale = decode_e4m3(stored.to(tl.int32))
    else:
        scale = decode_e8m0(stored.to(tl.int32))
    y = decode_e2m1((byte >> (k % 2 * 4)[None, :]) & 15) * scale
    tl.store(
        y_ptr + row[:, None] * WIDTH + out[None, :],
        narrow(y, tl.bfloat16),
        mask=(row < M)[:, None] & (out < WIDTH)[None, :],
    )


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


def unpack_config(format: Format, by_nibble: bool, overlap: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`unpack_kernel`."""
    rule = {"BLOCK": format.block, "RULE": format.scale.name, "BY_NIBBLE": by_nibble, "SPAN": SPAN}
    return {**rule, "ROWS": 8, "COLS": SPAN, "OVERLAP": overlap, "num_warps": 4, **OPTIONS}


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


def unpack(codes: Tensor, scales: Tensor, format: Format, by_nibble: bool = False) -> Tensor:
    """bfloat16 [M, K] of contiguous codes and scales.

    ``by_nibble``: K is rounded up to whole spans, and nibble i of word c of a span comes in column 16 i + c of it.
    """
    m, k = codes.shape[0], format.k_of(codes.shape[1])
    config = unpack_config(format, by_nibble, launches_overlap(codes.device))
    width = triton.cdiv(k, SPAN) * SPAN if by_nibble else k
    y = torch.empty(m, width, dtype=torch.bfloat16, device=codes.device)
    grid = (triton.cdiv(m, config["ROWS"]) * triton.cdiv(width, config["COLS"]),)
    with on(codes.device):
        unpack_kernel[grid](codes, scales, y, m, k, width, **config, **overlapping(config))
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
        with on(y.device):
            finish_kernel[grid](acc, gx, gw, b, y[rows], m, n, **config)
