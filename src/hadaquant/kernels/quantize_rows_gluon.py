"""INT8 rotate -> scale -> encode for 16-bit rows at memory speed, in Gluon; twin of ``quantize_rows_kernel``.

One CTA keeps a whole row in registers, laid out as rows_gluon.py says. CTAs are persistent and fetch the
next row while they work on this one. 3 bytes an element move and device memory is the roof; what has to
be small is the number of instructions and of passes through shared memory, so the layouts decide all.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hadaquant.formats import Format
from hadaquant.kernels.front_gluon import fronted, open_row
from hadaquant.kernels.numerics import choose, multiplier
from hadaquant.kernels.rows_gluon import (
    inside,
    largest_of_thread,
    load_row,
    negated,
    ragged,
    rotate_half,
    rotate_whole,
    stored_layout,
    wait_and_let_start,
    widen,
)
from hadaquant.kernels.runtime import OPTIONS, Launch, addresses, given, launches_overlap, on
from hadaquant.kernels.shared_gluon import meeting_place, met
from hadaquant.rotation import Rotation, norm

#: Below it y · (1/d), 1/d in two float32 terms, rounds to the code of the true quotient. The floor under
#: INT8's scales keeps d above 2**-47, far from the other end, where the lower term would be subnormal.
LARGEST_DIVISOR = gl.constexpr(2.0**90)
#: Brings larger divisors, and what is divided by them, into that range.
SHRINK = gl.constexpr(2.0**-64)
#: Four quotients -> the bytes of their nearest integers, ties to even, and 0 for NaN: two instructions.
_ENCODE = gl.constexpr("""{
.reg .s32 a, b, c, d;
cvt.rni.s32.f32 a, $1;
cvt.rni.s32.f32 b, $2;
cvt.rni.s32.f32 c, $3;
cvt.rni.s32.f32 d, $4;
cvt.pack.sat.s8.s32.b32 d, d, c, 0;
cvt.pack.sat.s8.s32.b32 $0, b, a, d;
}""")


@gluon.jit
def _reciprocal(d):
    """1/d = hi + lo to 48 bits."""
    approximate = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=gl.float32, is_pure=True, pack=1
    )
    hi = gl.fma(gl.fma(-d, approximate, 1.0), approximate, approximate)
    rest = gl.fma(-d, hi, 1.0)
    lo = rest * hi
    return hi, gl.fma(lo, rest, lo)


@gluon.jit
def _quotient(y, hi, lo, KIND: gl.constexpr, HALF: gl.constexpr):
    """int8 codes of a rotated tile divided by d = 1 / (hi + lo)."""
    if KIND == "regular" and not HALF:
        sign = negated(gl.arange(0, 256, layout=gl.SliceLayout(0, y.type.layout)))[None, :]
        q = gl.fma(y, hi * sign + gl.zeros_like(y), y * (lo * sign))
    else:
        q = gl.fma(y, hi + gl.zeros_like(y), y * lo)
    return gl.inline_asm_elementwise(_ENCODE, "=r,f,f,f,f", [q], dtype=gl.int8, is_pure=True, pack=4)


@gluon.jit
def _store(codes, q_ptr, row, K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr):
    layout: gl.constexpr = stored_layout(W, HALF)
    rows: gl.constexpr = 2 * W if HALF else 4 * W
    codes = gl.convert_layout(codes, layout)
    run = t * (4 * W) + gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    channel = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
    where = (q_ptr + row.to(gl.int64) * K) + (run * 256)[:, None] + channel[None, :]
    if ragged(K, t, W, HALF):
        gl.store(where, codes, mask=inside(K, t, W, HALF, 256, layout))
    else:
        gl.store(where, codes)


@gluon.jit
def _signed(v, signs_ptr, GROUP: gl.constexpr):
    layout: gl.constexpr = v.type.layout
    channel = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))[None, :]
    if GROUP > 256:
        channel = channel + 256 * gl.arange(0, v.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    return v * gl.load(signs_ptr + channel % GROUP)


@gluon.jit
def quantize_row(tiles, row, operands, kept, places, q_ptr, s_ptr, signs_ptr, DTYPE: gl.constexpr,
                 FRONT: gl.constexpr, KEPT: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, NORM: gl.constexpr,
                 SIGNED: gl.constexpr, RULE: gl.constexpr, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr,
                 H: gl.constexpr):  # fmt: skip
    """Front end, rotation, scale and codes of a row's words; operands of the front end as ``fronted`` takes them.

    places: meeting places of the front end's sums, and of the largest magnitude.
    """
    rotated = ()
    largest = None
    each = gl.full((32 * W,), 0, gl.int32, layout=gl.BlockedLayout([1], [32], [W], [0]))
    wide, inverse = tiles, 1.0
    if FRONT[0] != "none":
        wide, inverse = open_row(tiles, places, DTYPE, FRONT, K, W, T)
    for t in gl.static_range(T + H):
        if FRONT[0] == "none":
            v = widen(tiles[t], DTYPE, W, t == T)
        else:
            v = fronted(wide[t], inverse, row, operands, kept, DTYPE, FRONT, KEPT, K, t, W, t == T)
        if SIGNED:
            v = _signed(v, signs_ptr, GROUP)
        if t == T:
            v, m = rotate_half(v, KIND, GROUP, W)
            each = largest_of_thread(m, GROUP, W, True)
        else:
            v, largest = rotate_whole(v, largest, t == 0, KIND, GROUP, W)
        rotated = rotated + (v,)
    if T > 0:
        each = gl.maximum(each, largest_of_thread(largest, GROUP, W, False))
    amax = gl.max(met(places[2], gl.max(gl.reshape(each, (W, 32)), axis=1), W, 1), axis=0)
    # the norm is monotone, so it commutes with the maximum
    amax = (amax.to(gl.float32, bitcast=True) * NORM).to(gl.int32, bitcast=True)
    stored = choose(amax, 1.0, RULE)
    gl.store(s_ptr + row, stored)
    d = multiplier(stored, 1.0, RULE)

    # a power-of-two norm divides d, exactly, instead of multiplying each y
    POWER: gl.constexpr = NORM == 0.25 or NORM == 0.125 or NORM == 0.0625 or NORM == 0.03125
    SCALE: gl.constexpr = 1.0 if POWER else NORM
    large = d >= LARGEST_DIVISOR
    hi, lo = _reciprocal(gl.where(large, d * SHRINK, d) * (SCALE / NORM))
    if large:
        # what SHRINK makes subnormal has code 0 with or without it
        for t in gl.static_range(T + H):
            _store(_quotient(rotated[t] * SCALE * SHRINK, hi, lo, KIND, t == T), q_ptr, row, K, t, W, t == T)
    else:
        for t in gl.static_range(T + H):
            y = rotated[t]
            if not POWER:
                y = y * NORM
            _store(_quotient(y, hi, lo, KIND, t == T), q_ptr, row, K, t, W, t == T)


@gluon.jit(do_not_specialize=["M"])
def quantize_rows_gluon(
    x_ptr, q_ptr, s_ptr, signs_ptr, M, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr, H: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, NORM: gl.constexpr, SIGNED: gl.constexpr, RULE: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    first = gl.program_id(0)
    step = gl.num_programs(0)
    if OVERLAP:
        wait_and_let_start(step, M)
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    places = (None, None, meeting_place(gl.int32, W, 1))
    tiles = load_row(x_ptr, first, K // 2, K, W, T, H)
    for row in range(first, M, step):
        # after the last row it is read once more: a mask would cost half an instruction an element
        following = load_row(x_ptr, gl.minimum(row + step, M - 1), K // 2, K, W, T, H)
        quantize_row(tiles, row, (), (), places, q_ptr, s_ptr, signs_ptr, DTYPE, ("none",), (), KIND, GROUP, NORM,
                     SIGNED, RULE, K, W, T, H)  # fmt: skip
        tiles = following


#: Warps a row, the best first where none wastes more (measured on an H200), and most half tiles a thread may hold.
WARPS, FEWER_WARPS, MOST = (4, 2, 1, 8), (2, 4, 1, 8), 7


def row_shape(k: int, group: int, most: int = MOST, order: tuple[int, ...] = WARPS) -> tuple[int, int, int]:
    """Warps a row, and whole and half tiles a warp, that hold least beyond the row. ``most``: half tiles a thread.

    Groups above 256 have no half tiles.
    """
    best = (0, 0)
    for warps in order:
        halves = -(-k // (512 * warps))
        halves += halves % 2 if group > 256 else 0
        fits = halves <= most and (halves > 1 or warps == 1)
        if (fits and (not best[0] or halves * warps < best[0] * best[1])) or (warps == 8 and not best[0]):
            best = warps, halves
    return best[0], *divmod(best[1], 2)


def config(format: Format, kind: str, group: int, signed: bool, k: int, overlap: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options. ``overlap``: launches may start before the last one has ended."""
    warps, whole, half = row_shape(k, group)
    return {
        "K": k,
        "W": warps,
        "T": whole,
        "H": half,
        "KIND": kind,
        "GROUP": group,
        "NORM": norm(group),
        "SIGNED": signed,
        "RULE": format.scale.name,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_warps": warps,
        **OPTIONS,
    }


@functools.cache
def launch_of(
    format: Format, kind: str, group: int, signed: bool, k: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    """The kernel for rows of K elements of a dtype, compiled."""
    constants = config(format, kind, group, signed, k, launches_overlap(device))
    return Launch(quantize_rows_gluon, (dtype, torch.int8, torch.float32, torch.float32, 1), constants, device)


#: Bytes of rows that the programs of a multiprocessor work on. Measured on an H200: 40 to 54 KiB gave 0.95 of a copy's
#: speed and more, 60 to 80 KiB (six or eight rows of 5120 channels, twelve of 3072) 0.88 to 0.96.
_IN_HAND = 56 * 1024


def grid_of(launch: Launch, m: int, k: int) -> tuple[int, int, int]:
    """Of persistent programs for m rows of k 16-bit channels."""
    return launch.grid_of(m, max(1, _IN_HAND // (2 * k)))


def quantize_rows(x: Tensor, codes: Tensor, scales: Tensor, format: Format, rotation: Rotation) -> None:
    """Fill codes and scales of contiguous x [M, K] on a 16-byte boundary."""
    k = x.shape[-1]
    m = x.numel() // k
    launch = launch_of(format, rotation.kind, rotation.group, rotation.signs is not None, k, x.dtype, x.device)
    with on(x.device):
        launch(grid_of(launch, m, k), *addresses((x, codes, scales, given(rotation.signs, x), m)))
