"""INT8 behind a front end for 16-bit rows at memory speed: ``quantize_rows_gluon`` with an op on what it loads.

Norms and GELU move 3 bytes an element, SiLU · up 5, up's row being fetched along with x's. What is the same
for many rows, weights and modulations, comes from the L1 cache.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hadaquant.formats import Format
from hadaquant.front import FrontEnd
from hadaquant.kernels import quantize_rows_gluon
from hadaquant.kernels.front import constants, operand
from hadaquant.kernels.quantize_rows_gluon import quantize_row, row_shape
from hadaquant.kernels.rows_gluon import load_row
from hadaquant.kernels.runtime import Launch, given, launches_overlap, on
from hadaquant.rotation import Rotation

#: Row strides are compiled as multiples of this many 32-bit words.
WORDS = 16
#: Most half tiles a thread may hold where the next row of x waits with one of up (measured on an H200).
MOST_OF_TWO = 5


@gluon.jit(do_not_specialize=["M", "factor_rows", "shift_rows"])
def quantize_front_gluon(
    x_ptr, q_ptr, s_ptr, signs_ptr, factor_ptr, shift_ptr, M, x_stride, factor_stride, factor_rows, shift_stride,
    shift_rows, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr, H: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, NORM: gl.constexpr, SIGNED: gl.constexpr, RULE: gl.constexpr, OVERLAP: gl.constexpr,
    FRONT: gl.constexpr,
):  # fmt: skip
    """Strides are in 32-bit words."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    UP: gl.constexpr = FRONT[0] == "silu_mul"
    first = gl.program_id(0)
    step = gl.num_programs(0)
    tiles = load_row(x_ptr, first, x_stride, K, W, T, H)
    operands = ((factor_ptr, factor_stride, factor_rows), (shift_ptr, shift_stride, shift_rows))
    if UP:
        operands = load_row(factor_ptr, first, factor_stride, K, W, T, H)
    for row in range(first, M, step):
        then = gl.minimum(row + step, M - 1)
        following = load_row(x_ptr, then, x_stride, K, W, T, H)
        following_operands = operands
        if UP:
            following_operands = load_row(factor_ptr, then, factor_stride, K, W, T, H)
        quantize_row(tiles, row, operands, q_ptr, s_ptr, signs_ptr, DTYPE, FRONT, KIND, GROUP, NORM, SIGNED, RULE,
                     K, W, T, H)  # fmt: skip
        tiles = following
        operands = following_operands


def config(
    format: Format, kind: str, group: int, signed: bool, front_end: tuple[object, ...], k: int, overlap: bool
) -> dict[str, Any]:
    """Compile-time arguments and launch options. ``overlap``: launches may start before the last one has ended."""
    config = {**quantize_rows_gluon.config(format, kind, group, signed, k, overlap), "FRONT": front_end}
    if front_end[0] == "silu_mul":
        warps, whole, half = row_shape(k, group, MOST_OF_TWO)
        config |= {"W": warps, "T": whole, "H": half, "num_warps": warps}
        if (warps, whole, half) == (8, 1, 1):
            config["maxnreg"] = 128  # two rows on a multiprocessor instead of one
    return config


@functools.cache
def _launch_of(
    format: Format,
    rotation: tuple[str, int, bool],
    front_end: tuple[object, ...],
    k: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    device: torch.device,
) -> Launch:
    """The kernel for rows of K elements; ``dtypes`` of x, factor and shift."""
    arguments = (dtypes[0], torch.int8, torch.float32, torch.float32, *dtypes[1:], 1, *([WORDS, WORDS, 1, WORDS, 1]))
    constants = config(format, *rotation, front_end, k, launches_overlap(device))
    return Launch(quantize_front_gluon, arguments, constants, device)


def _in_words(t: Tensor) -> tuple[Tensor, int]:
    """Rows [M, K] and their stride in 32-bit words; a copy of rows that do not begin where wide loads may."""
    if t.data_ptr() % 16 or t.stride(0) * t.element_size() % (4 * WORDS):
        t = t.clone(memory_format=torch.contiguous_format)
    return t, t.stride(0) * t.element_size() // 4


def _operand(t: Tensor | None, x: Tensor) -> tuple[Tensor, int, int]:
    """A factor or shift: tensor, row stride in words, rows of x for each of its own."""
    if t is None:
        return x, 0, 1
    rows, _, each = operand(t, x)
    return *_in_words(rows), each


def quantize_front(
    x: Tensor, codes: Tensor, scales: Tensor, format: Format, rotation: Rotation, front_end: FrontEnd
) -> None:
    """Fill codes and scales of x [M, K]."""
    m, k = x.shape
    x, stride = _in_words(x)
    factor, *of_factor = _operand(front_end.factor, x)
    shift, *of_shift = _operand(front_end.shift, x)
    described = (rotation.kind, rotation.group, rotation.signs is not None)
    dtypes = (x.dtype, factor.dtype, shift.dtype)
    launch = _launch_of(format, described, constants(front_end), k, dtypes, x.device)
    with on(x.device):
        signs = given(rotation.signs, x)
        launch(launch.grid_of(m), x, codes, scales, signs, factor, shift, m, stride, *of_factor, *of_shift)
