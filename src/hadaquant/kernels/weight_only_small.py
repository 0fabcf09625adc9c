"""Few rows of bfloat16 x times packed FP4 weights, in Gluon; twin of ``weight_mm_kernel``.

Packed words go straight into the registers that the bfloat16 matrix units read and
are decoded there, and warps take slices of K and add them at the end. Weights are the left operand, 16 rows of
them, so that as few as eight rows of x fill the right one. x comes in its natural order, the eight elements that
belong to a word in one load of 16 bytes; pairs of them are put together by byte permutes.

0.5625 bytes a weight move. What binds is latency with one row, and with more the reading of x by every program.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hadaquant.formats import Format
from hadaquant.kernels.fp4_words import decode_nibble, load_eight, load_scales, paired_scales
from hadaquant.kernels.runtime import OPTIONS, given, launch, launches_overlap, overlapping


@gluon.constexpr_function
def _half_asm(odd):
    return f"prmt.b32 $0, $1, $2, {'0x7632' if odd else '0x5410'};"


@gluon.jit
def _half(pairs, ODD: gl.constexpr):
    """The first, or the second, bfloat16 of each pair."""
    return gl.inline_asm_elementwise(_half_asm(ODD), "=r,r,r", [pairs], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def weight_few_rows_kernel(
    x_ptr, w_ptr, sw_ptr, gw_ptr, bias_ptr, y_ptr, M, N, K32,
    BLOCK: gl.constexpr, RULE: gl.constexpr, HAS_GLOBAL: gl.constexpr, HAS_BIAS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, WORDS: gl.constexpr, SLICES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SLICES, 1, 1], instr_shape=[1, 16, 8])
    wl: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    xl: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    words = K32 * 4
    blocks = K32 * (32 // BLOCK)
    EACH: gl.constexpr = 32 // BLOCK
    wk = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, wl)))[:, None, None] * WORDS
    wk = wk + gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, wl)))[None, None, :]
    xk = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, xl)))[:, None, None] * WORDS
    xk = xk + gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(2, xl)))[None, :, None]
    column = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(2, wl)))[None, :, None]
    row = gl.program_id(1) * BM + gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(1, xl)))[None, None, :]
    w_words = w_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + column.to(gl.int64) * words
    # x and scales are read without a mask: from the last row, word or block where there is none
    w_scales = sw_ptr + gl.minimum(column, N - 1).to(gl.int64) * blocks
    x_rows = x_ptr + gl.minimum(row, M - 1) * (words * 8)
    acc = gl.zeros((SLICES, BN, BM), gl.float32, mma)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    STEP: gl.constexpr = SLICES * WORDS
    w = gl.load(w_words + wk, mask=(column < N) & (wk < words), other=0)
    sw = load_scales(w_scales + gl.minimum(wk, words - 4) // 4 * EACH, RULE, True)
    for k in range(0, words, STEP):
        x0, x1, x2, x3 = load_eight(x_rows + gl.minimum(k + xk, words - 1) * 8)
        # the next words are on their way while these are decoded
        next_wk = k + STEP + wk
        next_w = gl.load(w_words + next_wk, mask=(column < N) & (next_wk < words), other=0)
        next_sw = load_scales(w_scales + gl.minimum(next_wk, words - 4) // 4 * EACH, RULE, True)
        sw = paired_scales(sw, RULE)
        pairs = (x0, x1, x2, x3)
        for i in gl.static_range(4):
            pair = gl.where(k + xk < words, pairs[i], 0)
            acc = mma_v2(decode_nibble(w, sw, RULE, 2 * i), _half(pair, False), acc)
            acc = mma_v2(decode_nibble(w, sw, RULE, 2 * i + 1), _half(pair, True), acc)
        w, sw = next_w, next_sw
    out: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [1, SLICES], [0, 1])
    y = gl.convert_layout(gl.sum(acc, 0), out)
    # decoded weights of E4M3 scales come 2**-7 too small
    y = y * (128.0 if RULE == "e4m3_global" else 1.0)
    if HAS_GLOBAL:
        y = y * gl.load(gw_ptr)
    rows = gl.program_id(1) * BM + gl.arange(0, BM, gl.SliceLayout(0, out))
    columns = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(1, out))
    if HAS_BIAS:
        y = y + gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[:, None]
    mask = (columns < N)[:, None] & (rows < M)[None, :]
    gl.store(y_ptr + rows[None, :] * N + columns[:, None], y.to(y_ptr.dtype.element_ty), mask=mask)


#: Warps of a program, each with its slices of K, and words of eight codes of one such slice, for each tile of x rows
#: and weight rows.
SLICES_AND_WORDS: dict[tuple[int, int], tuple[int, int]] = {
    (8, 16): (8, 32),
    (16, 16): (8, 16),
    (16, 32): (8, 16),
    (32, 16): (4, 16),
}


def config(tile: tuple[int, int], format: Format, has_bias: bool, overlap: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`weight_few_rows_kernel` for x rows and weight rows."""
    slices, words = SLICES_AND_WORDS[tile]
    return {
        "BLOCK": format.block,
        "RULE": format.scale.name,
        "HAS_GLOBAL": format.has_global_scale,
        "HAS_BIAS": has_bias,
        "BM": tile[0],
        "BN": tile[1],
        "WORDS": words,
        "SLICES": slices,
        "OVERLAP": overlap,
        "num_warps": slices,
        **OPTIONS,
    }


def few_rows(
    x: Tensor, w: Tensor, sw: Tensor, gw: Tensor | None, bias: Tensor | None, y: Tensor, format: Format,
    tile: tuple[int, int],
) -> None:  # fmt: skip
    """y [M, N] of contiguous bfloat16 x [M, K] and packed w [N, K/2], K % 32 == 0, bases at multiples of 16 bytes."""
    m, n, k = x.shape[0], w.shape[0], x.shape[1]
    c = config(tile, format, bias is not None, launches_overlap(x.device))
    arguments = x, w, sw, given(gw, sw), given(bias, y), y, m, n, k // 32
    launch(weight_few_rows_kernel, (triton.cdiv(n, tile[1]), triton.cdiv(m, tile[0])), arguments, c | overlapping(c))
