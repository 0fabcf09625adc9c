"""INT8 rotate -> scale -> encode for 16-bit rows at memory speed, in Gluon; twin of ``quantize_rows_kernel``.

One CTA keeps a whole row in registers, laid out as rows_gluon.py says. CTAs are persistent and fetch the
next row while they work on this one. 3 bytes an element move and device memory is the roof; what has to
be small is the number of instructions and of passes through shared memory, so the layouts decide all.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hadaquant.formats import Format
from hadaquant.kernels.numerics import choose, multiplier
from hadaquant.kernels.rows_gluon import (
    largest_of_thread,
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
    each = gl.full((32 * W,), 0, gl.int32, layout=gl.BlockedLayout([1], [32], [W], [0]))
    for t in gl.static_range(T + H):
        v = widen(tiles[t], DTYPE, W, t == T)
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
    amax = gl.max(each, axis=0)
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
    KIND: gl.constexpr, GROUP: gl.constexpr, NORM: gl.constexpr, SIGNED: gl.constexpr, RULE: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    if OVERLAP:
        # the next kernel may start its set-up; this one must not read before the last one has written
        gdc_launch_dependents()
        gdc_wait()
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    words_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    tiles = _load(words_ptr, first, K, W, T, H)
    for row in range(first, M, step):
        # after the last row it is read once more: a mask would cost half an instruction an element
        following = _load(words_ptr, gl.minimum(row + step, M - 1), K, W, T, H)
        _row(tiles, row, q_ptr, s_ptr, signs_ptr, DTYPE, KIND, GROUP, NORM, SIGNED, RULE, K, W, T, H)
        tiles = following


#: Most half tiles a thread may hold, by warps a row. More leave too few rows on a multiprocessor to hide the
#: memory's latency, while more warps a row wait for each other more often (measured on an H200).
_MOST = {1: 5, 2: 6, 4: 7}


def row_shape(k: int, group: int) -> tuple[int, int, int]:
    """Warps a row, and whole and half tiles a warp. Groups above 256 have no half tiles."""
    if group > 256:
        warps = next((w for w in _MOST if k <= 3 * 1024 * w), 8)
        return warps, -(-k // (1024 * warps)), 0
    warps = next((w for w, most in _MOST.items() if k <= 512 * w * most), 8)
    return warps, *divmod(-(-k // (512 * warps)), 2)


def config(format: Format, rotation: Rotation, k: int, overlap: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options. ``overlap``: launches may start before the last one has ended."""
    warps, whole, half = row_shape(k, rotation.group)
    return {
        "K": k,
        "W": warps,
        "T": whole,
        "H": half,
        "KIND": rotation.kind,
        "GROUP": rotation.group,
        "NORM": norm(rotation.group),
        "SIGNED": rotation.signs is not None,
        "RULE": format.scale.name,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_warps": warps,
        # three rows of four warps instead of two on a multiprocessor, for one pointer that is read back
        "maxnreg": 168 if (warps, whole, half) == (4, 3, 0) else None,
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
