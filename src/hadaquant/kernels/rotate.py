"""Rotation alone, a front end alone, and the largest finite magnitude of a rotated tensor.

``rotate`` and ``front`` move 2 + 4 bytes an element from bfloat16, ``amax`` 2; the roof is device memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.front import NONE, FrontEnd
from hadaquant.kernels.front import as_rows, open_rows, row_arguments
from hadaquant.kernels.front import constants as front_constants
from hadaquant.kernels.hadamard import constants, load_rotated
from hadaquant.kernels.numerics import FP32_INF_BITS, magnitude_bits, narrow, widen
from hadaquant.kernels.quantize import MATRIX_TILE, TILE, walk_config
from hadaquant.kernels.runtime import OPTIONS, given, launch, launches_overlap, overlapping
from hadaquant.layout import NIBBLE_SPAN
from hadaquant.rotation import FUSED_MATRIX_GROUPS, Rotation


@triton.jit
def rotate_kernel(
    x_ptr,
    y_ptr,
    signs_ptr,
    matrix_ptr,
    units,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    INVERSE: tl.constexpr,
    SPAN: tl.constexpr,
    ROTATION: tl.constexpr,
    FRONT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        # in this order: what starts behind it may read what all kernels ahead of it have written
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = (unit < units)[:, None] & (tl.arange(0, UNIT) < UNIT)[None, :]
    y = load_rotated(x_ptr, (unit * UNIT,), 0, valid, signs_ptr, matrix_ptr, ROWS, UNIT, ROTATION, INVERSE, FRONT)
    y = narrow(y, y_ptr.dtype.element_ty)
    if SPAN > 0:
        # as layout.by_nibble: [words, 8] of each span turned over
        y = tl.reshape(y, (ROWS, UNIT // SPAN, SPAN // 8, 8))
        y = tl.reshape(tl.permute(y, (0, 1, 3, 2)), (ROWS, UNIT))
    tl.store(y_ptr + (unit * UNIT)[:, None] + tl.arange(0, UNIT)[None, :], y, mask=valid)


@triton.jit
def _finite_bits(y):
    b = magnitude_bits(y)
    return tl.where(b < FP32_INF_BITS, b, 0)


@triton.jit
def amax_kernel(
    x_ptr,
    amax_ptr,
    signs_ptr,
    matrix_ptr,
    units,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    ROTATION: tl.constexpr,
    FRONT: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = (unit < units)[:, None] & (tl.arange(0, UNIT) < UNIT)[None, :]
    y = load_rotated(x_ptr, (unit * UNIT,), 0, valid, signs_ptr, matrix_ptr, ROWS, UNIT, ROTATION, False, FRONT)
    tl.atomic_max(amax_ptr, tl.max(tl.max(_finite_bits(y), axis=1), axis=0), sem="relaxed")


@triton.jit
def front_kernel(
    x_ptr,
    y_ptr,
    amax_ptr,
    signs_ptr,
    matrix_ptr,
    M,
    K,
    x_stride,
    factor_ptr,
    factor_stride,
    factor_rows,
    shift_ptr,
    shift_stride,
    shift_rows,
    WRITE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    ROTATION: tl.constexpr,
    FRONT: tl.constexpr,
):
    """Front end and rotation of whole rows: written, or their largest finite magnitude."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    factor = (factor_ptr, factor_stride, factor_rows)
    shift = (shift_ptr, shift_stride, shift_rows)
    rows = open_rows(x_ptr, x_stride, factor, shift, row, M, K, ROWS, WIDTH, TILES, FRONT)
    amax = tl.zeros((ROWS,), tl.int32)
    for k in range(0, K, WIDTH):
        valid = (row < M)[:, None] & (k + column < K)[None, :]
        y = load_rotated(x_ptr, rows, k, valid, signs_ptr, matrix_ptr, ROWS, WIDTH, ROTATION, False, FRONT)
        if WRITE:
            y = narrow(y, y_ptr.dtype.element_ty)
            tl.store(y_ptr + (row * K)[:, None] + (k + column)[None, :], y, mask=valid)
        else:
            amax = tl.maximum(amax, tl.max(_finite_bits(y), axis=1))
    if not WRITE:
        tl.atomic_max(amax_ptr, tl.max(tl.where(row < M, amax, 0), axis=0), sem="relaxed")


@triton.jit
def rotate_by_any_matrix_kernel(
    x_ptr, y_ptr, matrix_ptr, groups, group, INVERSE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """[groups, g] · R[g, g] for any g: a plain tiled float32 product."""
    STEP: tl.constexpr = 16
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(0, group, STEP):
        part = k + tl.arange(0, STEP)
        a_mask = (row < groups)[:, None] & (part < group)[None, :]
        a = widen(tl.load(x_ptr + row[:, None] * group + part[None, :], mask=a_mask, other=0.0))
        b_mask = (part < group)[:, None] & (column < group)[None, :]
        if INVERSE:
            b = tl.load(matrix_ptr + column[None, :] * group + part[:, None], mask=b_mask, other=0.0)
        else:
            b = tl.load(matrix_ptr + part[:, None] * group + column[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    mask = (row < groups)[:, None] & (column < group)[None, :]
    tl.store(y_ptr + row[:, None] * group + column[None, :], narrow(acc, y_ptr.dtype.element_ty), mask=mask)


def unit_config(rotation: Rotation) -> dict[str, Any]:
    """Compile-time arguments of :func:`rotate_kernel` and :func:`amax_kernel`."""
    rows = max(16, MATRIX_TILE // rotation.group) if rotation.kind == "matrix" else TILE // rotation.group
    return {"ROWS": rows, "UNIT": rotation.group, "ROTATION": constants(rotation), "FRONT": front_constants(NONE)}


def rotate_config(rotation: Rotation, inverse: bool, by_nibble: bool, overlap: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`rotate_kernel`."""
    config = unit_config(rotation) | {"INVERSE": inverse}
    if by_nibble and rotation.group < NIBBLE_SPAN:
        config |= {"UNIT": NIBBLE_SPAN, "ROWS": TILE // NIBBLE_SPAN}
    config |= {"SPAN": NIBBLE_SPAN if by_nibble else 0, "OVERLAP": overlap, **OPTIONS}
    return config | overlapping(config)


def rotate(
    x: Tensor, rotation: Rotation, inverse: bool, dtype: torch.dtype = torch.float32, by_nibble: bool = False
) -> Tensor:
    """x · R or x · Rᵀ, rounded to ``dtype``: the bytes of ``reference.rotate``, but for a matrix's order of sums.

    ``by_nibble``: in the order of ``layout.by_nibble``. Not for a matrix.
    """
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    units = x.numel() // rotation.group
    if rotation.kind == "matrix" and rotation.group not in FUSED_MATRIX_GROUPS:
        rows, cols = 32, min(64, max(16, triton.next_power_of_2(rotation.group)))
        grid = (triton.cdiv(units, rows), triton.cdiv(rotation.group, cols))
        config = {"INVERSE": inverse, "ROWS": rows, "COLS": cols, **OPTIONS}
        launch(rotate_by_any_matrix_kernel, grid, (x, y, rotation.matrix, units, rotation.group), config)
        return y
    signs, matrix = given(rotation.signs, x), given(rotation.matrix, x)
    config = rotate_config(rotation, inverse, by_nibble, launches_overlap(x.device))
    units = x.numel() // config["UNIT"]
    launch(rotate_kernel, (triton.cdiv(units, config["ROWS"]),), (x, y, signs, matrix, units), config)
    return y


def rotate_round(x: Tensor, rotation: Rotation, front_end: FrontEnd = NONE, by_nibble: bool = False) -> Tensor:
    """bfloat16 x · R after its front end: the bytes of ``reference.rotate_round``, as far as :func:`rotate`'s are."""
    if by_nibble and (front_end is not NONE or rotation.kind == "matrix"):
        x, rotation, front_end = rotate_round(x, rotation, front_end), Rotation("none"), NONE
    if front_end is NONE:
        return rotate(x, rotation, False, torch.bfloat16, by_nibble)
    if rotation.kind == "matrix" and rotation.group not in FUSED_MATRIX_GROUPS:
        return rotate(front(x, front_end), rotation, False, torch.bfloat16)
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _launch_front(as_rows(x), y, x.new_empty(1, dtype=torch.int32), rotation, front_end, True)
    return y


def front(x: Tensor, front_end: FrontEnd) -> Tensor:
    """float32 front end of x, contiguous: the bytes of ``reference.front``, but for exp."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _launch_front(as_rows(x), y, x.new_empty(1, dtype=torch.int32), Rotation("none"), front_end, True)
    return y


def amax(x: Tensor, rotation: Rotation, front_end: FrontEnd = NONE) -> Tensor:
    """float32 scalar on x's device: largest finite magnitude of the rotated x; 0 if there is none."""
    if rotation.kind == "matrix" and rotation.group not in FUSED_MATRIX_GROUPS:
        x, front_end = (x if front_end is NONE else front(x, front_end)), NONE
        x, rotation = rotate(x, rotation, False), Rotation("none")
    found = torch.zeros((), dtype=torch.int32, device=x.device)
    if front_end is not NONE:
        rows = as_rows(x)
        _launch_front(rows, rows, found, rotation, front_end, False)
        return found.view(torch.float32)
    x = x.contiguous()
    signs, matrix = given(rotation.signs, x), given(rotation.matrix, x)
    config = unit_config(rotation) | OPTIONS
    units = x.numel() // rotation.group
    launch(amax_kernel, (triton.cdiv(units, config["ROWS"]),), (x, found, signs, matrix, units), config)
    return found.view(torch.float32)


def _launch_front(x: Tensor, y: Tensor, found: Tensor, rotation: Rotation, front_end: FrontEnd, write: bool) -> None:
    m, k = x.shape
    config = walk_config(rotation, front_end, k) | {"WRITE": write, **OPTIONS}
    arguments = (x, y, found, given(rotation.signs, x), given(rotation.matrix, x), m, k, *row_arguments(x, front_end))
    launch(front_kernel, (triton.cdiv(m, config["ROWS"]),), arguments, config)
