"""Rotation alone, and the largest finite magnitude of a rotated tensor.

``rotate`` moves 2 + 4 bytes an element from bfloat16, ``amax`` 2; the roof is device memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.kernels.hadamard import constants, load_rotated
from hadaquant.kernels.numerics import FP32_INF_BITS, magnitude_bits, widen
from hadaquant.kernels.quantize import MATRIX_TILE, TILE
from hadaquant.kernels.runtime import OPTIONS, given, on
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
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDES: tl.constexpr,
    ODD: tl.constexpr,
    NORM: tl.constexpr,
    SIGNED: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = (unit < units)[:, None] & (tl.arange(0, UNIT) < UNIT)[None, :]
    y = load_rotated(
        x_ptr, unit * UNIT, valid, signs_ptr, matrix_ptr,
        ROWS, KIND, GROUP, STRIDES, ODD, NORM, SIGNED, INVERSE, UNIT,
    )  # fmt: skip
    tl.store(y_ptr + (unit * UNIT)[:, None] + tl.arange(0, UNIT)[None, :], y, mask=valid)


@triton.jit
def amax_kernel(
    x_ptr,
    amax_ptr,
    signs_ptr,
    matrix_ptr,
    units,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDES: tl.constexpr,
    ODD: tl.constexpr,
    NORM: tl.constexpr,
    SIGNED: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = (unit < units)[:, None] & (tl.arange(0, UNIT) < UNIT)[None, :]
    y = load_rotated(
        x_ptr, unit * UNIT, valid, signs_ptr, matrix_ptr,
        ROWS, KIND, GROUP, STRIDES, ODD, NORM, SIGNED, False, UNIT,
    )  # fmt: skip
    b = magnitude_bits(y)
    b = tl.where(b < FP32_INF_BITS, b, 0)
    tl.atomic_max(amax_ptr, tl.max(tl.max(b, axis=1), axis=0), sem="relaxed")


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
    tl.store(y_ptr + row[:, None] * group + column[None, :], acc, mask=mask)


def unit_config(rotation: Rotation) -> dict[str, Any]:
    """Compile-time arguments of :func:`rotate_kernel` and :func:`amax_kernel`."""
    if rotation.kind == "matrix":
        return {"ROWS": max(16, MATRIX_TILE // rotation.group), "UNIT": rotation.group, **constants(rotation)}
    return {"ROWS": TILE // rotation.group, "UNIT": rotation.group, **constants(rotation)}


def rotate(x: Tensor, rotation: Rotation, inverse: bool) -> Tensor:
    """float32 x · R or x · Rᵀ: the bytes of ``reference.rotate``, but for a matrix's order of sums."""
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    units = x.numel() // rotation.group
    with on(x.device):
        if rotation.kind == "matrix" and rotation.group not in FUSED_MATRIX_GROUPS:
            rows, cols = 32, min(64, max(16, triton.next_power_of_2(rotation.group)))
            grid = (triton.cdiv(units, rows), triton.cdiv(rotation.group, cols))
            rotate_by_any_matrix_kernel[grid](
                x, y, rotation.matrix, units, rotation.group, INVERSE=inverse, ROWS=rows, COLS=cols, **OPTIONS
            )
            return y
        signs, matrix = given(rotation.signs, x), given(rotation.matrix, x)
        config = unit_config(rotation)
        grid = (triton.cdiv(units, config["ROWS"]),)
        rotate_kernel[grid](x, y, signs, matrix, units, INVERSE=inverse, **config, **OPTIONS)
    return y


def amax(x: Tensor, rotation: Rotation) -> Tensor:
    """float32 scalar on x's device: largest finite magnitude of the rotated x; 0 if there is none."""
    if rotation.kind == "matrix" and rotation.group not in FUSED_MATRIX_GROUPS:
        x, rotation = rotate(x, rotation, False), Rotation("none")
    x = x.contiguous()
    found = torch.zeros((), dtype=torch.int32, device=x.device)
    signs, matrix = given(rotation.signs, x), given(rotation.matrix, x)
    config = unit_config(rotation)
    units = x.numel() // rotation.group
    with on(x.device):
        amax_kernel[(triton.cdiv(units, config["ROWS"]),)](x, found, signs, matrix, units, **config, **OPTIONS)
    return found.view(torch.float32)
