"""INT8 rotate -> scale -> encode for 16-bit rows at memory speed, in Gluon; twin of ``quantize_rows_kernel``.

One CTA keeps a whole row in registers, laid out as rows_gluon.py says. CTAs are persistent and fetch the
next row while they work on this one. 3 bytes an element move and device memory is the roof; what has to
be small is the number of instructions and of passes through shared memory, so the layouts decide all.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hadaquant.formats import Format
from hadaquant.kernels.numerics import choose, multiplier
from hadaquant.kernels.rows_gluon import (
    negated,
    rotate_half,
    rotate_whole,
    stored_layout,
    widen,
    words_layout,
)
from hadaquant.kernels.runtime import OPTIONS, Launch, given, launches_overlap, multiprocessors, on
from hadaquant.rotation import Rotation, norm

#: Below it y · (1/d), 1/d in two float32 terms, rounds to the code of the true quotient. The floor under
#: INT8's scales keeps d above 2**-47, far from the other end, where the lower term would be subnormal.
LARGEST_DIVISOR = gl.constexpr(2.0**90)
#: Brings larger divisors, and what is divided by them, into that range.
SHRINK = gl.constexpr(2.0**-64)
#: Adding it rounds |q| < 2**22 to an integer, ties to even, in the low bits.
ROUND = gl.constexpr(1.5 * 2.0**23)


@gluon.constexpr_function
def _ragged(K, t, W, HALF):
    """Whether tile t reaches beyond the row."""
    return (t * 4 + (2 if HALF else 4)) * W * 256 > K


@gluon.jit
def _inside(K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr, WIDTH: gl.constexpr,
            layout: gl.constexpr):  # fmt: skip
    rows: gl.constexpr = 2 * W if HALF else 4 * W
    run = t * (4 * W) + gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    return (run * 256 < K)[:, None] & (column < WIDTH)[None, :]


@gluon.jit
def _words(x_ptr, row, K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr):
    layout: gl.constexpr = words_layout(W, HALF)
    rows: gl.constexpr = 2 * W if HALF else 4 * W
    run = t * (4 * W) + gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    return (x_ptr + row.to(gl.int64) * (K // 2)) + (run * 128)[:, None] + word[None, :]


@gluon.jit
def _load_tile(x_ptr, row, K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr):
    where = _words(x_ptr, row, K, t, W, HALF)
    if _ragged(K, t, W, HALF):
        return gl.load(where, mask=_inside(K, t, W, HALF, 128, words_layout(W, HALF)), other=0)
    else:
        return gl.load(where)


@gluon.jit
def _load(x_ptr, row, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr, H: gl.constexpr):
    tiles = ()
    for t in gl.static_range(T + H):
        tiles = tiles + (_load_tile(x_ptr, row, K, t, W, t == T),)
    return tiles


@gluon.jit
def _fetch(x_ptr, row, M, ring, slot, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr):
    """Start copying a row into a slot of the ring; nothing if there is no such row."""
    for t in gl.static_range(T):
        mask = _inside(K, t, W, False, 128, words_layout(W)) & (row < M)
        async_copy.async_copy_global_to_shared(ring.index(slot * T + t), _words(x_ptr, row, K, t, W, False), mask=mask)
    async_copy.commit_group()


@gluon.jit
def _largest(v):
    return gl.max(gl.max(gl.reshape(v, (v.numel // 32, 32)), axis=1), axis=0)


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
    return (q + ROUND).to(gl.int32, bitcast=True).to(gl.int8)


@gluon.jit
def _store(codes, q_ptr, row, K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr):
    layout: gl.constexpr = stored_layout(W, HALF)
    rows: gl.constexpr = 2 * W if HALF else 4 * W
    codes = gl.convert_layout(codes, layout)
    run = t * (4 * W) + gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    channel = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
    where = (q_ptr + row.to(gl.int64) * K) + (run * 256)[:, None] + channel[None, :]
    if _ragged(K, t, W, HALF):
        gl.store(where, codes, mask=_inside(K, t, W, HALF, 256, layout))
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
def _row(tiles, row, q_ptr, s_ptr, signs_ptr, DTYPE: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
         NORM: gl.constexpr, SIGNED: gl.constexpr, RULE: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
         T: gl.constexpr, H: gl.constexpr):  # fmt: skip
    rotated = ()
    largest = None
    amax = 0
    for t in gl.static_range(T + H):
        v = widen(tiles[t], DTYPE, W, t == T)
        if SIGNED:
            v = _signed(v, signs_ptr, GROUP)
        if t == T:
            v, m = rotate_half(v, KIND, GROUP, W)
            amax = _largest(m)
        else:
            v, largest = rotate_whole(v, largest, t == 0, KIND, GROUP, W)
        rotated = rotated + (v,)
    if T > 0:
        amax = gl.maximum(amax, _largest(largest))
    # the norm is monotone, so it commutes with the maximum
    amax = (amax.to(gl.float32, bitcast=True) * NORM).to(gl.int32, bitcast=True)
    stored = choose(amax, 1.0, RULE)
    gl.store(s_ptr + row, stored)
    d = multiplier(stored, 1.0, RULE)

    # a power-of-two norm divides d, exactly, instead of multiplying each y
    POWER: gl.constexpr = NORM == 0.25 or NORM == 0.125 or NORM == 0.0625 or NORM == 0.03125
    SCALE: gl.constexpr = 1.0 if POWER else NORM
    small = d < LARGEST_DIVISOR
    hi, lo = _reciprocal(gl.where(small, d, d * SHRINK) * (SCALE / NORM))
    if small:
        for t in gl.static_range(T + H):
            y = rotated[t]
            if not POWER:
                y = y * NORM
            _store(_quotient(y, hi, lo, KIND, t == T), q_ptr, row, K, t, W, t == T)
    else:
        # what SHRINK makes subnormal has code 0 with or without it; a NaN divisor gives codes 0
        for t in gl.static_range(T + H):
            y = gl.where(d == d, rotated[t] * SCALE * SHRINK, 0.0)
            codes = _quotient(y, gl.where(d == d, hi, 0.0), gl.where(d == d, lo, 0.0), KIND, t == T)
            _store(codes, q_ptr, row, K, t, W, t == T)


@gluon.jit(do_not_specialize=["M"])
def quantize_rows_gluon(
    x_ptr, q_ptr, s_ptr, signs_ptr, M, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr, H: gl.constexpr,
    RING: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, NORM: gl.constexpr, SIGNED: gl.constexpr,
    RULE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    if OVERLAP:
        # the next kernel may start its set-up; this one must not read before the last one has written
        gdc_launch_dependents()
        gdc_wait()
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    words_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    if RING == 0:
        tiles = _load(words_ptr, first, K, W, T, H)
        for row in range(first, M, step):
            following = _load(words_ptr, gl.minimum(row + step, M - 1), K, W, T, H)
            _row(tiles, row, q_ptr, s_ptr, signs_ptr, DTYPE, KIND, GROUP, NORM, SIGNED, RULE, K, W, T, H)
            tiles = following
    else:
        gl.static_assert(H == 0, "the ring holds whole tiles")
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        ring = gl.allocate_shared_memory(gl.int32, [RING * T, 4 * W, 128], plain)
        for i in gl.static_range(RING - 1):
            _fetch(words_ptr, first + i * step, M, ring, i, K, W, T)
        here = 0
        there = RING - 1
        for row in range(first, M, step):
            _fetch(words_ptr, row + (RING - 1) * step, M, ring, there, K, W, T)
            async_copy.wait_group(RING - 1)
            tiles = ()
            for t in gl.static_range(T):
                tiles = tiles + (ring.index(here * T + t).load(words_layout(W)),)
            _row(tiles, row, q_ptr, s_ptr, signs_ptr, DTYPE, KIND, GROUP, NORM, SIGNED, RULE, K, W, T, H)
            here = gl.where(here == RING - 1, 0, here + 1)
            there = gl.where(there == RING - 1, 0, there + 1)


def row_shape(k: int, group: int, warps: int = 0) -> tuple[int, int, int]:
    """Warps a row, and whole and half tiles a warp: as few warps as hold the row in three tiles.

    Groups above 256 have no half tiles. Three tiles leave eight to twelve warps on a
    multiprocessor of an H200, enough to hide the memory's latency; four leave too few.
    """
    for w in (warps,) if warps else (1, 2, 4, 8):
        halves = -(-k // (512 * w))
        whole, half = halves // 2, halves % 2
        if group > 256:
            whole, half = whole + half, 0
        if 2 * whole + half <= 6:
            break
    return w, whole, half


def config(
    format: Format, rotation: Rotation, k: int, overlap: bool = False, warps: int = 0, ring: int | None = None
) -> dict[str, Any]:
    """Compile-time arguments and launch options."""
    warps, whole, half = row_shape(k, rotation.group, warps)
    if ring is None:
        # the next row waits in registers, or in shared memory where this one leaves too few of them
        ring = 2 if whole == 3 and half == 0 and warps > 1 and k <= 12288 else 0
    return {
        "K": k,
        "W": warps,
        "T": whole,
        "H": half,
        "RING": ring,
        "KIND": rotation.kind,
        "GROUP": rotation.group,
        "NORM": norm(rotation.group),
        "SIGNED": rotation.signs is not None,
        "RULE": format.scale.name,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_warps": warps,
        **OPTIONS,
    }


def quantize_rows(x: Tensor, codes: Tensor, scales: Tensor, format: Format, rotation: Rotation) -> None:
    """Fill codes and scales of contiguous x [M, K]."""
    k = x.shape[-1]
    m = x.numel() // k
    signs = given(rotation.signs, x)
    key = (x.device.index, x.dtype, k, rotation.spec, rotation.signs is None)
    launch = _launches.get(key)
    if launch is None:
        constants = config(format, rotation, k, launches_overlap(x.device))
        launch = Launch(quantize_rows_gluon, (x, codes, scales, signs, m), constants)
        _launches[key] = launch
    programs = min(m, multiprocessors(x.device) * launch.occupancy)
    with on(x.device):
        launch((programs, 1, 1), x, codes, scales, signs, m)


_launches: dict[tuple[object, ...], Launch] = {}
