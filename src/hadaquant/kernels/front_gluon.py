"""Front ends on the register tiles of ``quantize_rows_gluon``; the twin of front.py.

Pass 1 holds channel bits 0, 1, 2, 6 and 7 in a thread, a half tile all of these but 2; lanes hold the other
bits, then those of the run. The contract's sums halve in this order, so that most additions need no other
thread, and warps meet once a sum, in shared memory. exp2 and the reciprocal are the hardware's.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hadaquant.front import GELU_CUBIC, GELU_LINEAR
from hadaquant.kernels.front import divide_by, inverse_root
from hadaquant.kernels.rows_gluon import first_layout, inside, load_tile, ragged, widen, words_layout

#: exp(-z) = exp2(z · -log2 e); GELU's z comes multiplied.
LOG2E = gl.constexpr(-math.log2(math.e))
CUBIC = gl.constexpr(-math.log2(math.e) * GELU_CUBIC)
LINEAR = gl.constexpr(-math.log2(math.e) * GELU_LINEAR)


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def _everywhere(warps, pairs):
    """[warps, 2, ...] that every thread holds whole."""
    shape = [warps] + [2] * pairs
    sizes = [(dim, 1 << i) for dim in reversed(range(len(shape))) for i in range(shape[dim].bit_length() - 1)]
    registers = [[n if d == dim else 0 for d in range(len(shape))] for dim, n in sizes]
    none = [0] * len(shape)
    return gl.DistributedLinearLayout(registers, [none] * 5, [none] * (warps.bit_length() - 1), [], shape)


@gluon.jit
def _halve(v, BELOW: gl.constexpr):
    # a sum of two has no order
    return gl.sum(gl.reshape(v, (v.numel // (2 * BELOW), 2, BELOW)), axis=1)


@gluon.jit
def _warp_sums(v, FRONT: gl.constexpr, W: gl.constexpr):
    """A tile [runs, 256] -> [W], the sum of each warp's runs."""
    for i in gl.static_range(len(FRONT[4])):
        v = _halve(v, FRONT[4][i])
    for _ in gl.static_range(_log2(v.numel // W)):
        v = _halve(v, 1)
    return gl.reshape(v, (W,))


@gluon.jit
def _row_sum(tiles, SQUARE: gl.constexpr, FRONT: gl.constexpr, W: gl.constexpr):
    """The sum of a row's tiles, or of their squares, known to every thread."""
    parts = ()
    for t in gl.static_range(len(tiles)):
        v = tiles[t]
        if SQUARE:
            v = v * v
        parts = parts + (_warp_sums(v, FRONT, W),)
    gl.static_assert(len(parts) <= 4)
    if len(parts) == 1:
        sums = parts[0]
        PAIRS: gl.constexpr = 0
    elif len(parts) == 2:
        sums = gl.join(parts[0], parts[1])
        PAIRS: gl.constexpr = 1
    else:
        last = gl.zeros_like(parts[2]) if len(parts) == 3 else parts[3]
        sums = gl.join(gl.join(parts[0], parts[1]), gl.join(parts[2], last))
        PAIRS: gl.constexpr = 2
    if W > 1:
        sums = gl.convert_layout(sums, _everywhere(W, PAIRS))
    # over the warps, then tiles 0 + 1 and 2 + 3, then these
    for i in gl.static_range(_log2(W)):
        sums = gl.sum(gl.reshape(sums, (W >> (i + 1), 2) + (2,) * PAIRS), axis=1)
    sums = gl.reshape(sums, (1,) + (2,) * PAIRS)
    for _ in gl.static_range(PAIRS):
        sums = gl.sum(sums, axis=1)
    return gl.sum(sums, axis=0)


@gluon.jit
def _less(v, mean, K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr):
    """v - mean, and 0 beyond the row."""
    if ragged(K, t, W, HALF):
        layout: gl.constexpr = v.type.layout
        return gl.where(inside(K, t, W, HALF, 256, layout), v - mean, 0.0)
    else:
        return v - mean


@gluon.jit
def open_row(tiles, DTYPE: gl.constexpr, FRONT: gl.constexpr, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr):
    """The words of a row -> float32 tiles in the layout of pass 1, less their mean if it goes, and the inverse root.

    Without sums the inverse root is 1.
    """
    wide = ()
    for t in gl.static_range(len(tiles)):
        wide = wide + (widen(tiles[t], DTYPE, W, t == T),)
    inverse = 1.0
    if FRONT[3] > 0:
        if FRONT[0] == "ada_norm":
            mean = divide_by(_row_sum(wide, False, FRONT, W), K)
            less = ()
            for t in gl.static_range(len(tiles)):
                less = less + (_less(wide[t], mean, K, t, W, t == T),)
            wide = less
        inverse = inverse_root(divide_by(_row_sum(wide, True, FRONT, W), K), FRONT[3])
    return wide, inverse


@gluon.jit
def _sigmoid(z):
    """1 / (1 + exp2(z))"""
    e = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=gl.float32, is_pure=True, pack=1)
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _operand(operand, row, K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr):
    """A tile of a factor or shift in float32."""
    ptr, stride, rows = operand
    start = (row // rows).to(gl.int64) * stride
    DTYPE: gl.constexpr = ptr.dtype.element_ty
    if gl.float32 == DTYPE:
        return load_tile(ptr + start, K, t, W, HALF, 256, first_layout(W, HALF))
    else:
        row_ptr = ptr.to(gl.pointer_type(gl.int32), bitcast=True) + start
        return widen(load_tile(row_ptr, K, t, W, HALF, 128, words_layout(W, HALF)), DTYPE, W, HALF)


@gluon.jit
def fronted(v, inverse, row, operands, DTYPE: gl.constexpr, FRONT: gl.constexpr, K: gl.constexpr, t: gl.constexpr,
            W: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """The front end of tile t that :func:`open_row` gave, ready to be rotated.

    operands: of ``silu_mul`` the tiles of up in words; else factor and shift, each a pointer, its row stride in
    words, and how many rows of x each of its rows serves.
    """
    if FRONT[3] > 0:
        v = v * inverse
    if FRONT[0] == "gelu_tanh":
        v = v * _sigmoid(v * gl.fma(v * v, gl.full_like(v, CUBIC), gl.full_like(v, LINEAR)))
    elif FRONT[0] == "silu_mul":
        v = v * _sigmoid(v * LOG2E)
        v = v * widen(operands[t], DTYPE, W, HALF)
    elif FRONT[0] == "ada_norm":
        v = v * (1.0 + _operand(operands[0], row, K, t, W, HALF)) + _operand(operands[1], row, K, t, W, HALF)
    elif FRONT[1]:
        v = v * _operand(operands[0], row, K, t, W, HALF)
    return v
