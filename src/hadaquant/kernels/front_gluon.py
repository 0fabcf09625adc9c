"""Front ends on the register tiles of ``quantize_rows_gluon``; the twin of front.py.

Pass 1 holds channel bits 0, 1, 2, 6 and 7 in a thread, a half tile all of these but 2; lanes hold the other
bits, then those of the run. The contract's sums halve in this order, so that most additions need no other
thread, and warps meet once a sum, in shared memory. exp2 and the reciprocal are the hardware's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hadaquant.kernels.front import LOG2E, LOG2E_CUBIC, LOG2E_LINEAR, divide_by, inverse_root, sigmoid_by_exp2
from hadaquant.kernels.rows_gluon import inside, ragged, widen
from hadaquant.kernels.shared_gluon import met, operand_tile

#: Without a branch a root is right from here on, and a mean that is not is too small to be seen beside it.
LEAST_EPS = gl.constexpr(2.0**-60)
#: Its reciprocal is 0 in hardware.
LARGEST_ROOT = gl.constexpr(2.0**127)


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


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
def _row_sum(tiles, place, SQUARE: gl.constexpr, FRONT: gl.constexpr, W: gl.constexpr):
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
    sums = met(place, sums, W, len(parts))
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


@gluon.constexpr_function
def _inverse(n):
    """1/n, rounded to float32."""
    ulps = 2.0 ** (23 + (n - 1).bit_length())
    return round(ulps / n) / ulps


@gluon.jit
def by_count(v, N: gl.constexpr):
    """The correctly rounded v / N of v = 0 and from 2**-100 up, without the branch of a division; NaN for Inf."""
    q = v * _inverse(N)
    return gl.fma(gl.fma(q, -1.0 * N, v), _inverse(N), q)


@gluon.jit
def inverse_root_of(squares, EPS: gl.constexpr, K: gl.constexpr):
    """``inverse_root`` of a mean, without branches; 0 for Inf or NaN, which leave only Inf or NaN of a row's own."""
    if EPS < LEAST_EPS:
        return inverse_root(divide_by(squares, K), EPS)
    else:
        v = by_count(squares, K) + EPS
        r = gl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1
        )
        root = v * r
        root = gl.fma(gl.fma(-root, root, v), r * 0.5, root)
        root = gl.minimum(root, LARGEST_ROOT)
        hi = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [root], dtype=gl.float32, is_pure=True, pack=1
        )
        return gl.fma(gl.fma(-root, hi, 1.0), hi, hi)


@gluon.jit
def open_row(tiles, places, DTYPE: gl.constexpr, FRONT: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
             T: gl.constexpr):  # fmt: skip
    """The words of a row -> float32 tiles in the layout of pass 1, less their mean if it goes, and the inverse root.

    Without sums the inverse root is 1. places: a meeting place for each sum.
    """
    wide = ()
    for t in gl.static_range(len(tiles)):
        wide = wide + (widen(tiles[t], DTYPE, W, t == T),)
    inverse = 1.0
    if FRONT[3] > 0:
        if FRONT[0] == "ada_norm":
            mean = divide_by(_row_sum(wide, places[0], False, FRONT, W), K)
            less = ()
            for t in gl.static_range(len(tiles)):
                less = less + (_less(wide[t], mean, K, t, W, t == T),)
            wide = less
        inverse = inverse_root_of(_row_sum(wide, places[1], True, FRONT, W), FRONT[3], K)
    return wide, inverse


@gluon.jit
def fronted(v, inverse, row, operands, kept, DTYPE: gl.constexpr, FRONT: gl.constexpr, KEPT: gl.constexpr,
            K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """The front end of tile t that :func:`open_row` gave, ready to be rotated.

    operands: of ``silu_mul`` the tiles of up in words; else factor and shift, each a pointer, its row stride in
    words, and how many rows of x each of its rows serves. kept: their memory, as KEPT says.
    """
    if FRONT[3] > 0:
        v = v * inverse
    if FRONT[0] == "gelu_tanh":
        v = v * sigmoid_by_exp2(v * gl.fma(v * v, gl.full_like(v, LOG2E_CUBIC), gl.full_like(v, LOG2E_LINEAR)))
    elif FRONT[0] == "silu_mul":
        v = v * sigmoid_by_exp2(v * LOG2E)
        v = v * widen(operands[t], DTYPE, W, HALF)
    elif FRONT[0] == "ada_norm":
        v = v * operand_tile(kept[0], operands[0], row, KEPT[0], True, K, t, W, HALF)
        v = v + operand_tile(kept[1], operands[1], row, KEPT[1], False, K, t, W, HALF)
    elif FRONT[1]:
        v = v * operand_tile(kept[0], operands[0], row, KEPT[0], False, K, t, W, HALF)
    return v
