"""FP4 products of few rows on hardware without FP4 units, in Gluon; twins of ``fp4_mm_kernel``.

``gemv``: codes are twice a small integer, so the products of 16 codes sum exactly on the integer cores,
four products an instruction; float32 begins where two block scales meet the sum. ``few_rows``: both
operands go from packed words straight into the registers that the bfloat16 matrix units read, decoded
there, code · scale being exact in bfloat16; warps take slices of K and add them at the end.

0.5625 bytes a weight move. What binds is decoding: a weight costs about two instructions, so every
weight is decoded once, by the warp that multiplies it.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hadaquant.formats import Format
from hadaquant.kernels.fp4_words import decode_slice, dot_codes, paired_scales, unpack_codes, wide_scale
from hadaquant.kernels.runtime import OPTIONS, given, launches_overlap, on, overlapping

#: Warps of a program of ``few_rows``, each with its slices of K, and words of eight codes of one such slice, for
#: each tile of x rows and weight rows. Measured on an H200.
SLICES_AND_WORDS: dict[tuple[int, int], tuple[int, int]] = {
    (16, 16): (8, 32),
    (16, 32): (4, 16),
}
#: Weight rows, units and warps of a program of ``gemv`` for each number of x rows. Measured on an H200.
_GEMV: dict[int, tuple[int, int, int]] = {1: (8, 256, 4), 2: (4, 256, 4), 3: (8, 128, 2), 4: (8, 128, 2)}


@gluon.constexpr_function
def _load_asm(rule):
    """Scale bytes of 32 codes at an address -> one for each of their four words."""
    if rule == "e4m3_global":
        text = "{ .reg .b32 v; ld.global.u16 v, [$4]; and.b32 $0, v, 255; mov.b32 $1, $0; shr.u32 $2, v, 8; "
        return text + "mov.b32 $3, $2; // $5 $6 $7\n}"
    return "ld.global.u8 $0, [$4]; mov.b32 $1, $0; mov.b32 $2, $0; mov.b32 $3, $0; // $5 $6 $7"


@gluon.jit
def _load_scales(addresses, RULE: gl.constexpr, PURE: gl.constexpr):
    return gl.inline_asm_elementwise(
        _load_asm(RULE), "=r,=r,=r,=r,l,l,l,l", [addresses], dtype=gl.int32, is_pure=PURE, pack=4
    )


@gluon.jit
def gemv_kernel(
    x_ptr, sx_ptr, gx_ptr, w_ptr, sw_ptr, gw_ptr, bias_ptr, y_ptr, N, K32,
    M: gl.constexpr, BLOCK: gl.constexpr, RULE: gl.constexpr, HAS_GLOBAL: gl.constexpr, HAS_BIAS: gl.constexpr,
    BN: gl.constexpr, UNITS: gl.constexpr, OVERLAP: gl.constexpr, AT_REST: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, gl.num_warps()], [1, 0])
    units = K32 * 2
    blocks = K32 * (32 // BLOCK)
    column = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(1, layout))
    unit = gl.arange(0, UNITS, gl.SliceLayout(0, layout))
    w_units = w_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    x_units = x_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    if OVERLAP:
        gdc_launch_dependents()
        if not AT_REST:
            gdc_wait()
    # E4M3 scales come 2**-120 too small; codes come doubled
    LIFT: gl.constexpr = 2.0**116 if RULE == "e4m3_global" else 1.0
    REST: gl.constexpr = 64.0 if RULE == "e4m3_global" else 0.25
    sums = ()
    for _ in gl.static_range(M):
        sums = sums + (gl.zeros((BN, UNITS), gl.float32, layout),)
    for k in range(0, units, UNITS):
        u = k + unit
        inside = (column < N)[:, None] & (u < units)[None, :]
        w = gl.load(w_units + column.to(gl.int64)[:, None] * units + u[None, :], mask=inside, other=0)
        b = u * 16 // BLOCK
        sw = gl.load(sw_ptr + column.to(gl.int64)[:, None] * blocks + b[None, :], mask=inside, other=0)
        sw = wide_scale(sw, RULE)
        if AT_REST:
            gdc_wait()
        new = ()
        for m in gl.static_range(M):
            x = gl.load(x_units + m * units + u[None, :], mask=(u < units)[None, :], other=0)
            sx = gl.load(sx_ptr + m * blocks + b[None, :], mask=(u < units)[None, :], other=0)
            sx = (wide_scale(sx, RULE) * LIFT) * LIFT
            x0, x1, x2, x3, start = unpack_codes(x)
            s = dot_codes(w, x0, x1, x2, x3, start) - 12582912.0
            new = new + (gl.fma(s, sx * sw, sums[m]),)
        sums = new
    g = gl.load(gx_ptr) * gl.load(gw_ptr) if HAS_GLOBAL else 1.0
    for m in gl.static_range(M):
        y = (gl.sum(sums[m], 1) * REST) * g
        if HAS_BIAS:
            y = y + gl.load(bias_ptr + column, mask=column < N, other=0.0).to(gl.float32)
        gl.store(y_ptr + m * N + column, y.to(y_ptr.dtype.element_ty), mask=column < N)


@gluon.jit
def few_rows_kernel(
    x_ptr, sx_ptr, gx_ptr, w_ptr, sw_ptr, gw_ptr, bias_ptr, y_ptr, M, N, K32,
    BLOCK: gl.constexpr, RULE: gl.constexpr, HAS_GLOBAL: gl.constexpr, HAS_BIAS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, WORDS: gl.constexpr, SLICES: gl.constexpr, OVERLAP: gl.constexpr,
    AT_REST: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SLICES, 1, 1], instr_shape=[1, 16, 8])
    xl: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    wl: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    words = K32 * 4
    blocks = K32 * (32 // BLOCK)
    EACH: gl.constexpr = 32 // BLOCK
    xk = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, xl)))[:, None, None] * WORDS
    xk = xk + gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, xl)))[None, None, :]
    wk = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, wl)))[:, None, None] * WORDS
    wk = wk + gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(2, wl)))[None, :, None]
    row = gl.program_id(1) * BM + gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(2, xl)))[None, :, None]
    column = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(1, wl)))[None, None, :]
    w_words = w_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + column.to(gl.int64) * words
    x_words = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + row * words
    # scales are read without a mask: from the last row or block where there is none
    w_scales = sw_ptr + gl.minimum(column, N - 1).to(gl.int64) * blocks
    x_scales = sx_ptr + gl.minimum(row, M - 1) * blocks
    acc = gl.zeros((SLICES, BM, BN), gl.float32, mma)
    if OVERLAP:
        gdc_launch_dependents()
        if not AT_REST:
            gdc_wait()
    STEP: gl.constexpr = SLICES * WORDS
    w = gl.load(w_words + wk, mask=(column < N) & (wk < words), other=0)
    sw = _load_scales(w_scales + gl.minimum(wk, words - 4) // 4 * EACH, RULE, True)
    if AT_REST:
        gdc_wait()
    x = gl.load(x_words + xk, mask=(row < M) & (xk < words), other=0)
    sx = _load_scales(x_scales + gl.minimum(xk, words - 4) // 4 * EACH, RULE, False)
    for k in range(STEP, words + STEP, STEP):
        # the next words are on their way while these are decoded
        next_w = gl.load(w_words + (k + wk), mask=(column < N) & (k + wk < words), other=0)
        next_sw = _load_scales(w_scales + gl.minimum(k + wk, words - 4) // 4 * EACH, RULE, True)
        next_x = gl.load(x_words + (k + xk), mask=(row < M) & (k + xk < words), other=0)
        next_sx = _load_scales(x_scales + gl.minimum(k + xk, words - 4) // 4 * EACH, RULE, False)
        sx, sw = paired_scales(sx, RULE), paired_scales(sw, RULE)
        for i in gl.static_range(8):
            acc = mma_v2(decode_slice(x, sx, RULE, i), decode_slice(w, sw, RULE, i), acc)
        w, sw, x, sx = next_w, next_sw, next_x, next_sx
    out: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [SLICES, 1], [1, 0])
    y = gl.convert_layout(gl.sum(acc, 0), out)
    REST: gl.constexpr = 2.0**14 if RULE == "e4m3_global" else 1.0
    g = gl.load(gx_ptr) * gl.load(gw_ptr) if HAS_GLOBAL else 1.0
    y = (y * REST) * g
    rows = gl.program_id(1) * BM + gl.arange(0, BM, gl.SliceLayout(1, out))
    columns = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(0, out))
    if HAS_BIAS:
        y = y + gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    gl.store(y_ptr + rows[:, None] * N + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def gemv_config(m: int, format: Format, has_bias: bool, overlap: bool, at_rest: bool = False) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`gemv_kernel`.

    ``at_rest``: the kernel ahead does not write the weights, and all before that one are done.
    """
    rows, units, warps = _GEMV[m]
    shape = {"BN": rows, "UNITS": units, **_launch(overlap, at_rest), "num_warps": warps}
    return {"M": m, **_of_format(format, has_bias), **shape, **OPTIONS}


def few_rows_config(
    tile: tuple[int, int], format: Format, has_bias: bool, overlap: bool, at_rest: bool = False
) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`few_rows_kernel` for a tile of x rows and weight rows.

    ``at_rest`` as in :func:`gemv_config`.
    """
    slices, words = SLICES_AND_WORDS[tile]
    shape = {"BM": tile[0], "BN": tile[1], "WORDS": words, "SLICES": slices, "num_warps": slices}
    return {**_of_format(format, has_bias), **shape, **_launch(overlap, at_rest), **OPTIONS}


def _launch(overlap: bool, at_rest: bool) -> dict[str, bool]:
    return {"OVERLAP": overlap, "AT_REST": overlap and at_rest}


def _of_format(format: Format, has_bias: bool) -> dict[str, Any]:
    return {
        "BLOCK": format.block,
        "RULE": format.scale.name,
        "HAS_GLOBAL": format.has_global_scale,
        "HAS_BIAS": has_bias,
    }


def gemv(
    x: Tensor, sx: Tensor, gx: Tensor | None, w: Tensor, sw: Tensor, gw: Tensor | None, bias: Tensor | None, y: Tensor,
    format: Format,
) -> None:  # fmt: skip
    """y [M, N] of contiguous packed x [M, K/2], w [N, K/2], M up to four, K % 32 == 0."""
    m, n, k = x.shape[0], w.shape[0], format.k_of(w.shape[1])
    config = gemv_config(m, format, bias is not None, launches_overlap(x.device))
    gx, gw, b = given(gx, sx), given(gw, sw), given(bias, y)
    with on(x.device):
        gemv_kernel[(triton.cdiv(n, config["BN"]),)](
            x, sx, gx, w, sw, gw, b, y, n, k // 32, **config, **overlapping(config)
        )


def few_rows(
    x: Tensor, sx: Tensor, gx: Tensor | None, w: Tensor, sw: Tensor, gw: Tensor | None, bias: Tensor | None, y: Tensor,
    format: Format, tile: tuple[int, int],
) -> None:  # fmt: skip
    """y [M, N] of contiguous packed x [M, K/2], w [N, K/2], K % 32 == 0."""
    m, n, k = x.shape[0], w.shape[0], format.k_of(w.shape[1])
    config = few_rows_config(tile, format, bias is not None, launches_overlap(x.device))
    gx, gw, b = given(gx, sx), given(gw, sw), given(bias, y)
    with on(x.device):
        few_rows_kernel[(triton.cdiv(n, tile[1]), triton.cdiv(m, tile[0]))](
            x, sx, gx, w, sw, gw, b, y, m, n, k // 32, **config, **overlapping(config)
        )
