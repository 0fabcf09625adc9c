"""Front ends on the units of ``units``: the twin of front.py.

A program has a row, unit after unit in its threads, N units a step. The contract's sums halve bits 0 to 2 of a
channel's index in a thread, then what a warp holds of a step, then warps and steps: a row of one warp needs no shared
memory. exp2 and the reciprocal are the hardware's.
"""

import triton
import triton.language as tl

from hadaquant.front import SUM_RUN, FrontEnd, halvings
from hadaquant.kernels import front
from hadaquant.kernels.front import (
    LOG2E,
    LOG2E_CUBIC,
    LOG2E_LINEAR,
    divide_by,
    halved,
    inverse_root,
    sigmoid_by_exp2,
)
from hadaquant.kernels.units import load_words, widen_words


def constants(front_end: FrontEnd, unit: int, threads: int, each: int) -> tuple[object, ...]:
    """``front.constants`` with the steps of the sums of rows that are ``each`` times one unit a thread.

    They are the halvings of a step's sums of eight channels to one a warp, then those of all warps and steps.
    """
    described = front.constants(front_end)
    if not front_end.sums:
        return described
    runs, sums = 32 * unit // SUM_RUN, threads // 32 * triton.next_power_of_2(each)
    return *described[:4], halvings()[3:] + (1,) * (runs.bit_length() - 1), (1,) * (sums.bit_length() - 1)


@triton.constexpr_function
def _bits(n):
    """How many bits number n things."""
    return (n - 1).bit_length()


@triton.jit
def units_of(first, units_in_row, N: tl.constexpr, WHOLE: tl.constexpr):
    """int32 [N]: units of a row from ``first`` on, the last one in place of those beyond it."""
    unit = first + tl.arange(0, N)
    return unit if WHOLE else tl.minimum(unit, units_in_row - 1)


@triton.jit
def load_unit(row_ptr, unit, UNIT: tl.constexpr):
    """Words of units of a row that begins at a multiple of 16 bytes."""
    WORDS: tl.constexpr = UNIT * row_ptr.dtype.element_ty.primitive_bitwidth // 64
    return load_words(row_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + unit * WORDS, WORDS)


@triton.jit
def _joined(parts):
    """A power of two of tensors -> one whose last dimensions are the bits of their number, the highest first."""
    for _ in tl.static_range(_bits(len(parts))):
        pairs = ()
        for i in tl.static_range(len(parts) // 2):
            pairs = pairs + (tl.join(parts[i], parts[i + len(parts) // 2]),)
        parts = pairs
    return parts[0]


@triton.jit
def _terms(v, mean, SQUARE: tl.constexpr, FRONT: tl.constexpr):
    """What a unit adds to a sum."""
    terms = ()
    for i in tl.static_range(len(v)):
        t = v[i]
        if SQUARE:
            if FRONT[0] == "ada_norm":
                t = t - mean
            t = t * t
        terms = terms + (t,)
    return terms


@triton.jit
def _eights(v):
    """A unit's sums of eight channels each."""
    sums = ()
    for i in tl.static_range(0, len(v), 8):
        low = (v[i] + v[i + 1]) + (v[i + 2] + v[i + 3])
        high = (v[i + 4] + v[i + 5]) + (v[i + 6] + v[i + 7])
        sums = sums + (low + high,)
    return sums


@triton.jit
def _row_sum(words, mean, units_in_row, SQUARE: tl.constexpr, DTYPE: tl.constexpr, N: tl.constexpr,
             UNIT: tl.constexpr, WHOLE: tl.constexpr, FRONT: tl.constexpr):  # fmt: skip
    """float32: the sum of the row, or of the squared differences from the mean if it goes."""
    WARPS: tl.constexpr = N // 32
    STEPS: tl.constexpr = 1 << _bits(len(words))
    sums = ()
    for i in tl.static_range(STEPS):
        if i < len(words):
            eights = _eights(_terms(widen_words(words[i], DTYPE), mean, SQUARE, FRONT))
            eights = tl.reshape(_joined(eights), (N, UNIT // 8))
            if not WHOLE:
                eights = tl.where((i * N + tl.arange(0, N) < units_in_row)[:, None], eights, 0.0)
            step = halved(tl.reshape(eights, (1, N * UNIT // 8)), FRONT, 4, 1, N * UNIT // 8)
            sums = sums + (tl.reshape(step, (WARPS,)),)
        else:
            sums = sums + (tl.zeros((WARPS,), tl.float32),)
    by_step = tl.permute(tl.reshape(_joined(sums), (WARPS, STEPS)), (1, 0))
    # a scalar, which is of every layout
    return tl.sum(halved(tl.reshape(by_step, (1, STEPS * WARPS)), FRONT, 5, 1, STEPS * WARPS))


@triton.jit
def moments(x_row, units_in_row, N: tl.constexpr, EACH: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr,
            FRONT: tl.constexpr):  # fmt: skip
    """float32: a row's mean, where it goes, and inverse root."""
    mean = 0.0
    inverse = 1.0
    if FRONT[3] > 0:
        words = ()
        for i in tl.static_range(EACH):
            words = words + (load_unit(x_row, units_of(i * N, units_in_row, N, WHOLE), UNIT),)
        k = units_in_row * UNIT
        DTYPE: tl.constexpr = x_row.dtype.element_ty
        if FRONT[0] == "ada_norm":
            mean = divide_by(_row_sum(words, mean, units_in_row, False, DTYPE, N, UNIT, WHOLE, FRONT), k)
        squares = _row_sum(words, mean, units_in_row, True, DTYPE, N, UNIT, WHOLE, FRONT)
        inverse = inverse_root(divide_by(squares, k), FRONT[3])
    return mean, inverse


@triton.jit
def front_unit(v, mean, inverse, factor, shift, FRONT: tl.constexpr):
    """The front end of a unit: of its row are mean and inverse root, of itself factor and shift, if FRONT has them."""
    KIND: tl.constexpr = FRONT[0]
    out = ()
    for i in tl.static_range(len(v)):
        y = v[i]
        if KIND == "ada_norm":
            y = y - mean
        if FRONT[3] > 0:
            y = y * inverse
        if KIND == "silu_mul":
            y = y * sigmoid_by_exp2(y * LOG2E)
        if KIND == "gelu_tanh":
            y = y * sigmoid_by_exp2(y * tl.fma(y * y, LOG2E_CUBIC, LOG2E_LINEAR))
        if FRONT[1]:
            f = factor[i]
            if KIND == "ada_norm":
                f = 1.0 + f
            y = y * f
        if FRONT[2]:
            y = y + shift[i]
        out = out + (y,)
    return out
