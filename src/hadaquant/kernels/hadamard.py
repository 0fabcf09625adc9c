"""Rotated loads: the device twin of ``reference.rotate``.

A tile is a run of whole groups of contiguous elements. The Hadamard kinds are butterflies in
registers, in the order of ``rotation.stages``; a matrix is multiplied in float32, never TF32.
"""

from typing import Any

import triton
import triton.language as tl

from hadaquant.kernels.numerics import widen
from hadaquant.rotation import Rotation, norm, stages


def constants(rotation: Rotation) -> dict[str, Any]:
    """Compile-time arguments that describe a rotation to a kernel."""
    hadamard = rotation.kind in ("sylvester", "regular")
    steps = stages(rotation.group) if hadamard else ()
    return {
        "KIND": rotation.kind,
        "GROUP": rotation.group,
        "STRIDES": tuple(stride for radix, stride in steps if radix == 4),
        "ODD": any(radix == 2 for radix, _ in steps),
        "NORM": norm(rotation.group) if hadamard else 1.0,
        "SIGNED": rotation.signs is not None,
    }


@triton.jit
def _radix4(v, ROWS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr):
    y = tl.permute(tl.reshape(v, (ROWS * (GROUP // (4 * STRIDE)), 2, 2, STRIDE)), (0, 3, 1, 2))  # [.., hi, lo]
    even, odd = tl.split(y)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    a = x0 + x1
    b = x2 + x3
    c = x0 - x1
    d = x2 - x3
    if KIND == "regular":
        y = tl.join(tl.join(a + d, b + c), tl.join(a - d, b - c))
    else:
        y = tl.join(tl.join(a + b, a - b), tl.join(c + d, c - d))
    return tl.reshape(tl.permute(y, (0, 2, 3, 1)), (ROWS, GROUP))


@triton.jit
def _radix2(v, ROWS: tl.constexpr, GROUP: tl.constexpr):
    y = tl.permute(tl.reshape(v, (ROWS, 2, GROUP // 2)), (0, 2, 1))
    a, b = tl.split(y)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, GROUP))


@triton.jit
def rotate_registers(
    v,
    signs_ptr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDES: tl.constexpr,
    ODD: tl.constexpr,
    NORM: tl.constexpr,
    SIGNED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """float32 [ROWS, GROUP] -> the same, each row times R, or Rᵀ if INVERSE."""
    if SIGNED and not INVERSE:
        v = v * tl.load(signs_ptr + tl.arange(0, GROUP))[None, :]
    for i in tl.static_range(len(STRIDES)):
        v = _radix4(v, ROWS, KIND, GROUP, STRIDES[i])
    if ODD:
        v = _radix2(v, ROWS, GROUP)
    v = v * NORM
    if SIGNED and INVERSE:
        v = v * tl.load(signs_ptr + tl.arange(0, GROUP))[None, :]
    return v


@triton.jit
def load_rotated(
    x_ptr,
    start,
    valid,
    signs_ptr,
    matrix_ptr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDES: tl.constexpr,
    ODD: tl.constexpr,
    NORM: tl.constexpr,
    SIGNED: tl.constexpr,
    INVERSE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rotated float32 [ROWS, WIDTH] of the runs of WIDTH elements at ``start``; 0 where not ``valid``.

    start: int64 [ROWS]; valid: int1 [ROWS, WIDTH], constant within each group.
    """
    columns = tl.arange(0, WIDTH)
    if KIND == "matrix":
        GROUPS: tl.constexpr = ROWS * (WIDTH // GROUP)
        STEP: tl.constexpr = 16
        heads = tl.reshape(start[:, None] + tl.arange(0, WIDTH // GROUP)[None, :] * GROUP, (GROUPS,))
        inside = tl.max(tl.reshape(valid.to(tl.int32), (GROUPS, GROUP)), axis=1) > 0
        part = tl.arange(0, STEP)
        out = tl.arange(0, GROUP)
        acc = tl.zeros((GROUPS, GROUP), tl.float32)
        for k in range(0, GROUP, STEP):
            a = tl.load(x_ptr + heads[:, None] + (k + part)[None, :], mask=inside[:, None], other=0.0)
            if INVERSE:
                b = tl.load(matrix_ptr + out[None, :] * GROUP + (k + part)[:, None])
            else:
                b = tl.load(matrix_ptr + (k + part)[:, None] * GROUP + out[None, :])
            acc = tl.dot(widen(a), b, acc, input_precision="ieee")
        return tl.reshape(acc, (ROWS, WIDTH))
    else:
        v = widen(tl.load(x_ptr + start[:, None] + columns[None, :], mask=valid, other=0.0))
        if KIND != "none":
            GROUPS: tl.constexpr = ROWS * (WIDTH // GROUP)
            v = tl.reshape(v, (GROUPS, GROUP))
            v = rotate_registers(v, signs_ptr, GROUPS, KIND, GROUP, STRIDES, ODD, NORM, SIGNED, INVERSE)
            v = tl.reshape(v, (ROWS, WIDTH))
        return v
