"""Front ends on loaded tiles: the device twin of ``reference.front``.

Norms first walk their rows for the sums, in the contract's order whatever the tile: a tile's sum is a
subtree, and the tiles' sums wait side by side until the last one is there.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.front import GELU_CUBIC, GELU_LINEAR, SUM_RUN, FrontEnd, halvings
from hadaquant.kernels.numerics import widen

CUBIC = tl.constexpr(GELU_CUBIC)
LINEAR = tl.constexpr(GELU_LINEAR)
#: exp(-z) = exp2(z · -log2 e), for kernels that take the hardware's exp2; GELU's z comes multiplied.
LOG2E = tl.constexpr(-math.log2(math.e))
LOG2E_CUBIC = tl.constexpr(-math.log2(math.e) * GELU_CUBIC)
LOG2E_LINEAR = tl.constexpr(-math.log2(math.e) * GELU_LINEAR)


def constants(front_end: FrontEnd, width: int = SUM_RUN, tiles: int = 1) -> tuple[object, ...]:
    """Compile-time description of a front end: kind, whether it has a factor, a shift, eps, and the steps of its sums.

    Steps are the halvings of a tile of ``width`` elements and of ``tiles`` tiles, both powers of two. Without
    sums eps is 0.
    """
    described = (front_end.kind, front_end.factor is not None, front_end.shift is not None)
    if not front_end.sums:
        return *described, 0.0, (), ()
    runs = width // SUM_RUN
    return *described, front_end.eps, halvings() + (1,) * (runs.bit_length() - 1), (1,) * (tiles.bit_length() - 1)


def operand(t: Tensor | None, rows: Tensor) -> tuple[Tensor, int, int]:
    """A factor or shift as kernels take it: tensor, row stride, and how many rows of x each of its rows serves."""
    if t is None:
        return rows, 0, 1
    t = as_rows(t)
    return t, t.stride(0), max(1, rows.shape[0] // t.shape[0])


def as_rows(x: Tensor) -> Tensor:
    """x [..., K] as [M, K] with adjacent channels: a view where there is one, as of the halves of a wider tensor."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def aligned_rows(t: Tensor, multiple: int) -> Tensor:
    """Rows [M, K] as they are, or a copy where they do not begin at 16 bytes, a multiple of so many bytes apart."""
    unfit = t.data_ptr() % 16 or row_bytes(t) % multiple
    return t.clone(memory_format=torch.contiguous_format) if unfit else t


def row_bytes(t: Tensor) -> int:
    """Bytes from row to row."""
    return t.stride(0) * t.element_size()


@triton.jit
def sigmoid_by_exp2(z):
    """1 / (1 + exp2(z)), exp2 and the reciprocal being the hardware's."""
    e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def halved(v, FRONT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """float32 [ROWS, WIDTH] -> the sums of pairs, of their pairs, ..., as far apart as FRONT[STEPS] says."""
    # Triton 3.6 indexes a tuple in a tuple, but does not name one
    for i in tl.static_range(len(FRONT[STEPS])):
        pairs = tl.reshape(v, (ROWS, (WIDTH >> (i + 1)) // FRONT[STEPS][i], 2, FRONT[STEPS][i]))
        v = tl.reshape(tl.sum(pairs, axis=2), (ROWS, WIDTH >> (i + 1)))  # a sum of two has no order
    return v


@triton.jit
def _row_sum(x_ptr, start, inside, mean, K, SQUARE: tl.constexpr, FRONT: tl.constexpr, ROWS: tl.constexpr,
             WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """float32 [ROWS]: the rows' sums, or the sums of the squared differences from a mean."""
    column = tl.arange(0, WIDTH)
    tile = tl.arange(0, TILES)
    sums = tl.zeros((ROWS, TILES), tl.float32)
    for t in range(tl.cdiv(K, WIDTH)):
        valid = inside & (t * WIDTH + column < K)[None, :]
        v = widen(tl.load(x_ptr + start[:, None] + (t * WIDTH + column)[None, :], mask=valid, other=0.0))
        if SQUARE:
            v = tl.where(valid, v - mean[:, None], 0.0)
            v = v * v
        sums = tl.where(tile[None, :] == t, halved(v, FRONT, 4, ROWS, WIDTH), sums)
    return tl.reshape(halved(sums, FRONT, 5, ROWS, TILES), (ROWS,))


@triton.jit
def divide_by(v, K):
    """The correctly rounded quotient by a number of channels."""
    return tl.div_rn(v, K * 1.0)


@triton.jit
def inverse_root(v, EPS: tl.constexpr):
    """RN(1 / RN(sqrt(RN(v + eps))))"""
    return tl.div_rn(1.0, tl.sqrt_rn(v + EPS))


@triton.jit
def open_rows(x_ptr, x_stride, factor, shift, row, M, K, ROWS: tl.constexpr, WIDTH: tl.constexpr,
              TILES: tl.constexpr, FRONT: tl.constexpr):  # fmt: skip
    """What :func:`load_front` needs of these rows: where they and their operands begin, mean and inverse root.

    row: int64 [ROWS]; factor, shift: as :func:`operand` gives them; TILES: a power of two, at least K / WIDTH.
    """
    KIND: tl.constexpr = FRONT[0]
    EPS: tl.constexpr = FRONT[3]
    inside = (row < M)[:, None]
    start = row * x_stride
    mean = tl.zeros((ROWS,), tl.float32)
    inverse = mean
    if EPS > 0:
        if KIND == "ada_norm":
            mean = divide_by(_row_sum(x_ptr, start, inside, mean, K, False, FRONT, ROWS, WIDTH, TILES), K)
        squares = _row_sum(x_ptr, start, inside, mean, K, True, FRONT, ROWS, WIDTH, TILES)
        inverse = inverse_root(divide_by(squares, K), EPS)
    factor_ptr, factor_stride, factor_rows = factor
    shift_ptr, shift_stride, shift_rows = shift
    factor_start = row // factor_rows * factor_stride
    shift_start = row // shift_rows * shift_stride
    return start, factor_ptr, factor_start, shift_ptr, shift_start, mean, inverse


@triton.jit
def _spread(v, ROWS: tl.constexpr, N: tl.constexpr):
    return tl.reshape(tl.broadcast_to(v[:, None], (ROWS, N)), (ROWS * N,))


@triton.jit
def spread_rows(rows, ROWS: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, FRONT: tl.constexpr):
    """Rows cut into N pieces of STEP elements, each piece a row of its own."""
    head = tl.reshape(tl.broadcast_to(tl.arange(0, N)[None, :] * STEP, (ROWS, N)), (ROWS * N,))
    start = _spread(rows[0], ROWS, N) + head
    if FRONT[0] == "none":
        return (start,)
    else:
        _, factor_ptr, factor_start, shift_ptr, shift_start, mean, inverse = rows
        factor_start = _spread(factor_start, ROWS, N) + head
        shift_start = _spread(shift_start, ROWS, N) + head
        return (
            start, factor_ptr, factor_start, shift_ptr, shift_start, _spread(mean, ROWS, N), _spread(inverse, ROWS, N)
        )  # fmt: skip


@triton.jit
def load_front(x_ptr, rows, column, valid, FRONT: tl.constexpr):
    """float32 front end of x at ``column`` [C] of rows that :func:`open_rows` gave; 0 where not ``valid``.

    Without a front end, rows are a tuple of their beginnings alone.
    """
    KIND: tl.constexpr = FRONT[0]
    v = widen(tl.load(x_ptr + rows[0][:, None] + column[None, :], mask=valid, other=0.0))
    if KIND == "none":
        return v
    else:
        _, factor_ptr, factor_start, shift_ptr, shift_start, mean, inverse = rows
        if KIND == "ada_norm":
            v = v - mean[:, None]
        if FRONT[3] > 0:
            v = v * inverse[:, None]
        if KIND == "silu_mul":
            v = v / (1.0 + tl.exp(-v))
        if KIND == "gelu_tanh":
            v = v / (1.0 + tl.exp(-(v * (v * v * CUBIC + LINEAR))))
        if FRONT[1]:
            factor = widen(tl.load(factor_ptr + factor_start[:, None] + column[None, :], mask=valid, other=0.0))
            if KIND == "ada_norm":
                factor = 1.0 + factor
            v = v * factor
        if FRONT[2]:
            shift = widen(tl.load(shift_ptr + shift_start[:, None] + column[None, :], mask=valid, other=0.0))
            v = tl.where(valid, v + shift, 0.0)
        return v


def row_arguments(x: Tensor, front_end: FrontEnd) -> tuple[Any, ...]:
    """Run-time arguments of a kernel of rows x [M, K]: its stride, factor and shift."""
    return x.stride(0), *operand(front_end.factor, x), *operand(front_end.shift, x)
