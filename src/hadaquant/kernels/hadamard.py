"""Rotated loads: the device twin of ``reference.rotate``.

A tile is a run of whole groups of contiguous elements. The Hadamard kinds are butterflies in
registers, in the order of ``rotation.stages``; a matrix is multiplied in float32, never TF32.
"""

import triton
import triton.language as tl

from hadaquant.kernels.front import load_front, spread_rows
from hadaquant.rotation import Rotation, norm, stages


def constants(rotation: Rotation) -> tuple[object, ...]:
    """Compile-time description of a rotation: kind, group, strides of its stages, norm, whether it has signs.

    A stage has radix 4, or 2 where 4 strides are more than the group.
    """
    hadamard = rotation.kind in ("sylvester", "regular")
    strides = tuple(stride for _, stride in stages(rotation.group)) if hadamard else ()
    return rotation.kind, rotation.group, strides, norm(rotation.group) if hadamard else 1.0, rotation.signs is not None


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
def _radix2(v, ROWS: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr):
    y = tl.permute(tl.reshape(v, (ROWS * (GROUP // (2 * STRIDE)), 2, STRIDE)), (0, 2, 1))
    a, b = tl.split(y)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, GROUP))


@triton.jit
def rotate_registers(v, signs_ptr, ROWS: tl.constexpr, ROTATION: tl.constexpr, INVERSE: tl.constexpr):
    """float32 [ROWS, GROUP] -> the same, each row times R, or Rᵀ if INVERSE."""
    KIND: tl.constexpr = ROTATION[0]
    GROUP: tl.constexpr = ROTATION[1]
    SIGNED: tl.constexpr = ROTATION[4]
    if SIGNED and not INVERSE:
        v = v * tl.load(signs_ptr + tl.arange(0, GROUP))[None, :]
    for i in tl.static_range(len(ROTATION[2])):
        if 4 * ROTATION[2][i] <= GROUP:
            v = _radix4(v, ROWS, KIND, GROUP, ROTATION[2][i])
        else:
            v = _radix2(v, ROWS, GROUP, ROTATION[2][i])
    v = v * ROTATION[3]
    if SIGNED and INVERSE:
        v = v * tl.load(signs_ptr + tl.arange(0, GROUP))[None, :]
    return v


@triton.jit
def load_rotated(
    x_ptr,
    rows,
    first,
    valid,
    signs_ptr,
    matrix_ptr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATION: tl.constexpr,
    INVERSE: tl.constexpr,
    FRONT: tl.constexpr,
):
    """Rotated float32 [ROWS, WIDTH] from column ``first`` of the rows on; 0 where not ``valid``.

    rows: as :func:`load_front` takes them; valid: int1 [ROWS, WIDTH], constant within each group.
    """
    KIND: tl.constexpr = ROTATION[0]
    GROUP: tl.constexpr = ROTATION[1]
    GROUPS: tl.constexpr = ROWS * (WIDTH // GROUP)
    if KIND == "matrix":
        STEP: tl.constexpr = 16
        pieces = spread_rows(rows, ROWS, WIDTH // GROUP, GROUP, FRONT)
        inside = tl.max(tl.reshape(valid.to(tl.int32), (GROUPS, GROUP)), axis=1) > 0
        part = tl.arange(0, STEP)
        out = tl.arange(0, GROUP)
        acc = tl.zeros((GROUPS, GROUP), tl.float32)
        for k in range(0, GROUP, STEP):
            a = load_front(x_ptr, pieces, first + k + part, inside[:, None], FRONT)
            if INVERSE:
                b = tl.load(matrix_ptr + out[None, :] * GROUP + (k + part)[:, None])
            else:
                b = tl.load(matrix_ptr + (k + part)[:, None] * GROUP + out[None, :])
            acc = tl.dot(a, b, acc, input_precision="ieee")
        return tl.reshape(acc, (ROWS, WIDTH))
    else:
        v = load_front(x_ptr, rows, first + tl.arange(0, WIDTH), valid, FRONT)
        if KIND != "none":
            v = tl.reshape(v, (GROUPS, GROUP))
            v = rotate_registers(v, signs_ptr, GROUPS, ROTATION, INVERSE)
            v = tl.reshape(v, (ROWS, WIDTH))
        return v
