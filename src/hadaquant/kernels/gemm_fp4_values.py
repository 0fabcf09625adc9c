"""FP4 products of few rows with an x that is bfloat16 already, in Gluon; twin of ``fp4_mm_kernel``.

Only weights are decoded, each once, by the warp that multiplies it; x comes from the L2 cache, 16 bytes a thread a
load, in the order in which the words yield their codes. Warps take slices of K and add them at the end. 0.5625
bytes a weight move; what binds is decoding, at about three instructions a weight, and x, which every program reads.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hadaquant.formats import Format
from hadaquant.kernels.fp4_words import decode_slice, load_eight, load_scales, paired_scales
from hadaquant.kernels.gemm_fp4 import unpack_words
from hadaquant.kernels.runtime import OPTIONS, given, launch, launches_overlap, overlapping


@gluon.constexpr_function
def _pick_asm(second):
    return f"mov.b32 $0, {'$2' if second else '$1'}; // $1 $2"


@gluon.jit
def _pick(words, SECOND: gl.constexpr):
    """Of each two words the first, or the second, as the two bfloat16 that it is."""
    return gl.inline_asm_elementwise(_pick_asm(SECOND), "=r,r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def value_rows_kernel(
    x_ptr, gx_ptr, w_ptr, sw_ptr, gw_ptr, bias_ptr, y_ptr, M, N, K32,
    BLOCK: gl.constexpr, RULE: gl.constexpr, HAS_GLOBAL: gl.constexpr, HAS_BIAS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, WORDS: gl.constexpr, SLICES: gl.constexpr, OVERLAP: gl.constexpr,
    AT_REST: gl.constexpr,
):  # fmt: skip
    # transposed, as the matrix units take 16 rows of their left operand and 8 columns of the right
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SLICES, 1, 1], instr_shape=[1, 16, 8])
    wl: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    xl: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    words = K32 * 4
    blocks = K32 * (32 // BLOCK)
    EACH: gl.constexpr = 32 // BLOCK
    STEP: gl.constexpr = SLICES * WORDS
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
        if not AT_REST:
            gdc_wait()
    w = gl.load(w_words + wk, mask=(column < N) & (wk < words), other=0)
    sw = load_scales(w_scales + gl.minimum(wk, words - 4) // 4 * EACH, RULE, True)
    if AT_REST:
        gdc_wait()
    for k in range(0, words, STEP):
        x = load_eight(x_rows + gl.minimum(k + xk, words - 1) * 8)
        # the next words are on their way while these are decoded
        next_k = k + STEP + wk
        next_w = gl.load(w_words + next_k, mask=(column < N) & (next_k < words), other=0)
        next_sw = load_scales(w_scales + gl.minimum(next_k, words - 4) // 4 * EACH, RULE, True)
        sw = paired_scales(sw, RULE)
        for i in gl.static_range(8):
            acc = mma_v2(decode_slice(w, sw, RULE, i), _pick(x[i % 4], i >= 4), acc)
        w, sw = next_w, next_sw
    out: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [1, SLICES], [0, 1])
    y = gl.convert_layout(gl.sum(acc, 0), out)
    # decoded weights of E4M3 scales come 2**-7 too small
    REST: gl.constexpr = 128.0 if RULE == "e4m3_global" else 1.0
    g = gl.load(gx_ptr) * gl.load(gw_ptr) if HAS_GLOBAL else 1.0
    y = (y * REST) * g
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
    (8, 32): (4, 16),
    (16, 32): (4, 16),
    (32, 32): (8, 16),
    (64, 32): (8, 16),
}


def config(
    tile: tuple[int, int], format: Format, has_bias: bool, overlap: bool, at_rest: bool = False
) -> dict[str, Any]:
    """Compile-time arguments and launch options for a tile of x rows and weight rows.

    ``at_rest``: the kernel ahead does not write the weights, and all before that one are done.
    """
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
        "AT_REST": overlap and at_rest,
        "num_warps": slices,
        **OPTIONS,
    }


def value_rows(
    x: Tensor, sx: Tensor, gx: Tensor | None, w: Tensor, sw: Tensor, gw: Tensor | None, bias: Tensor | None, y: Tensor,
    format: Format, tile: tuple[int, int],
) -> None:  # fmt: skip
    """y [M, N] of contiguous packed x [M, K/2], w [N, K/2], K % 32 == 0."""
    m, n, k = x.shape[0], w.shape[0], format.k_of(w.shape[1])
    values = unpack_words(x, sx, format, by_nibble=False)
    c = config(tile, format, bias is not None, launches_overlap(x.device))
    arguments = values, given(gx, sx), w, sw, given(gw, sw), given(bias, y), y, m, n, k // 32
    launch(value_rows_kernel, (triton.cdiv(n, tile[1]), triton.cdiv(m, tile[0])), arguments, c | overlapping(c))
