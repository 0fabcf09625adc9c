"""FP4 products of one to four rows on hardware without FP4 units, in Gluon; twin of ``fp4_mm_kernel``.

Codes are twice a small integer, so the products of 16 codes sum exactly on the integer cores, four products an
instruction; float32 begins where two block scales meet the sum.

0.5625 bytes a weight move. What binds is decoding: a weight costs about two instructions, so every
weight is decoded once, by the warp that multiplies it.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hadaquant.formats import Format
from hadaquant.kernels.fp4_words import dot_codes, unpack_codes, wide_scale
from hadaquant.kernels.runtime import OPTIONS, given, launch, launches_overlap, overlapping

#: Weight rows, units and warps of a program of ``gemv`` for each number of x rows. Measured on an H200.
_GEMV: dict[int, tuple[int, int, int]] = {1: (8, 256, 4), 2: (4, 256, 4), 3: (8, 128, 2), 4: (8, 128, 2)}


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


def gemv_config(m: int, format: Format, has_bias: bool, overlap: bool, at_rest: bool = False) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`gemv_kernel`.

    ``at_rest``: the kernel ahead does not write the weights, and all before that one are done.
    """
    rows, units, warps = _GEMV[m]
    return {
        "M": m,
        "BLOCK": format.block,
        "RULE": format.scale.name,
        "HAS_GLOBAL": format.has_global_scale,
        "HAS_BIAS": has_bias,
        "BN": rows,
        "UNITS": units,
        "OVERLAP": overlap,
        "AT_REST": overlap and at_rest,
        "num_warps": warps,
        **OPTIONS,
    }


def gemv(
    x: Tensor, sx: Tensor, gx: Tensor | None, w: Tensor, sw: Tensor, gw: Tensor | None, bias: Tensor | None, y: Tensor,
    format: Format,
) -> None:  # fmt: skip
    """y [M, N] of contiguous packed x [M, K/2], w [N, K/2], M up to four, K % 32 == 0."""
    m, n, k = x.shape[0], w.shape[0], format.k_of(w.shape[1])
    config = gemv_config(m, format, bias is not None, launches_overlap(x.device))
    arguments = x, sx, given(gx, sx), w, sw, given(gw, sw), given(bias, y), y, n, k // 32
    launch(gemv_kernel, (triton.cdiv(n, config["BN"]),), arguments, config | overlapping(config))
