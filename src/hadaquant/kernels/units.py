"""Units of channels, each in the registers of one thread: loaded, widened, rotated.

A unit is a tuple of float32 [N], one a channel, N threads wide. Nothing crosses threads, so a butterfly is its
additions and no more: no shared memory and no shuffles. Good for groups up to what registers hold.
"""

import triton
import triton.language as tl

from hadaquant.kernels.numerics import from_bits


@triton.jit
def load_words(where, WORDS: tl.constexpr):
    """Tuple of int64 [N]: WORDS words of 8 bytes from each thread's 16-byte aligned pointer, 16 bytes a load."""
    words = ()
    two = tl.arange(0, 2)
    for i in tl.static_range(WORDS // 2):
        low, high = tl.split(tl.load(where[:, None] + (2 * i + two)[None, :]))
        words = words + (low, high)
    return words


@triton.jit
def widen_words(words, DTYPE: tl.constexpr):
    """Words of floats -> the unit, exact."""
    v = ()
    for i in tl.static_range(2 * len(words)):
        w = (words[i // 2] >> (32 * (i % 2))).to(tl.int32)
        if tl.float32 == DTYPE:
            v = v + (from_bits(w),)
        elif tl.bfloat16 == DTYPE:
            v = v + (from_bits(w << 16), from_bits(w & -65536))
        else:
            low = w.to(tl.int16).to(tl.float16, bitcast=True)
            high = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            v = v + (low.to(tl.float32), high.to(tl.float32))
    return v


@triton.jit
def _stage(v, ROTATION: tl.constexpr, STRIDE: tl.constexpr):
    REGULAR: tl.constexpr = ROTATION[0] == "regular"
    RADIX: tl.constexpr = 4 if 4 * STRIDE <= ROTATION[1] else 2  # noqa: SIM300
    out = ()
    for base in tl.static_range(0, len(v), RADIX * STRIDE):
        y0 = ()
        y1 = ()
        y2 = ()
        y3 = ()
        for i in tl.static_range(base, base + STRIDE):
            a = v[i] + v[i + STRIDE]
            c = v[i] - v[i + STRIDE]
            if RADIX == 2:
                y0 = y0 + (a,)
                y1 = y1 + (c,)
            else:
                b = v[i + 2 * STRIDE] + v[i + 3 * STRIDE]
                d = v[i + 2 * STRIDE] - v[i + 3 * STRIDE]
                if REGULAR:
                    y0 = y0 + (a + d,)
                    y1 = y1 + (a - d,)
                    y2 = y2 + (b + c,)
                    y3 = y3 + (b - c,)
                else:
                    y0 = y0 + (a + b,)
                    y1 = y1 + (c + d,)
                    y2 = y2 + (a - b,)
                    y3 = y3 + (c - d,)
        out = out + y0 + y1 + y2 + y3
    return out


@triton.jit
def rotate_unit(v, signs_ptr, ROTATION: tl.constexpr, NORMED: tl.constexpr):
    """The unit times R, its groups one by one; without the norm unless NORMED. ROTATION: ``hadamard.constants``."""
    if ROTATION[4]:
        signed = ()
        for i in tl.static_range(len(v)):
            signed = signed + (v[i] * tl.load(signs_ptr + i % ROTATION[1]),)
        v = signed
    for i in tl.static_range(len(ROTATION[2])):
        v = _stage(v, ROTATION, ROTATION[2][i])
    if NORMED:
        normed = ()
        for i in tl.static_range(len(v)):
            normed = normed + (v[i] * ROTATION[3],)
        v = normed
    return v


@triton.jit
def largest_magnitude(v, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """float32 [N]: largest magnitude of COUNT channels, NaN if there is one."""
    m = tl.abs(v[FIRST])
    for i in tl.static_range(FIRST + 1, FIRST + COUNT):
        m = tl.maximum(m, tl.abs(v[i]), propagate_nan=tl.PropagateNan.ALL)
    return m
