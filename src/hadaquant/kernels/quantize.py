"""Front end -> rotate -> scale -> encode -> pack in one kernel; steps and names as in reference.py.

Three kernels, by where a scale comes from and whether there are rows. Formats with a block (nvfp4, mxfp4)
see the tensor as one run of units, a unit being a block or a group, whichever is larger: no row
structure, any M, offsets in 64 bits. With a front end, which knows rows, they walk each row once. Formats
with one scale a row (int8) hold a row in registers, or walk a long row twice, the second time from the
L2 cache. The sums of a norm are a walk of their own before.

Bytes moved an element from bfloat16: nvfp4 2 + 0.5625, mxfp4 2 + 0.53125, int8 2 + 1. The roof is
device memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.formats.spec import TILE_COLS, TILE_ROWS
from hadaquant.front import NONE, SUM_RUN, FrontEnd
from hadaquant.kernels.front import as_rows, open_rows, row_arguments
from hadaquant.kernels.front import constants as front_constants
from hadaquant.kernels.hadamard import constants, load_rotated
from hadaquant.kernels.numerics import choose, encode, magnitude_bits, multiplier
from hadaquant.kernels.runtime import OPTIONS, aligned, given, launch
from hadaquant.rotation import Rotation


@triton.jit
def _pack(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr, ELEMENT: tl.constexpr):
    """int32 codes -> bytes to store: two E2M1 codes a byte, the even one low, or one int8."""
    if ELEMENT == "e2m1":
        low, high = tl.split(tl.reshape(codes, (ROWS, WIDTH // 2, 2)))
        return (low | (high << 4)).to(tl.uint8)
    else:
        return codes.to(tl.int8)


@triton.jit
def _divisor(stored, g, RULE: tl.constexpr):
    m = multiplier(stored, g, RULE)
    return tl.where(m == 0.0, 1.0, m)


@triton.jit
def _tiled_offset(block, blocks_in_row, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr):
    """Where scale ``block`` of a row-major [M, C] lies in the tiled order."""
    r = block // blocks_in_row
    c = block % blocks_in_row
    tile = (r // TILE_ROWS) * tl.cdiv(blocks_in_row, TILE_COLS) + c // TILE_COLS
    return tile * (TILE_ROWS * TILE_COLS) + (r % 32) * 16 + ((r % TILE_ROWS) // 32) * 4 + c % TILE_COLS


@triton.jit
def _encode_blocks(y, g, ROWS: tl.constexpr, BLOCK: tl.constexpr, ELEMENT: tl.constexpr, RULE: tl.constexpr):
    """float32 [ROWS, BLOCK] -> bytes to store and int32 scales [ROWS]."""
    stored = choose(tl.max(magnitude_bits(y), axis=1), g, RULE)
    return _pack(encode(y, _divisor(stored, g, RULE)[:, None], ELEMENT), ROWS, BLOCK, ELEMENT), stored


@triton.jit
def quantize_units(
    x_ptr,
    rows,
    codes_ptr,
    scales_ptr,
    g,
    signs_ptr,
    matrix_ptr,
    unit,
    units,
    blocks_in_row,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    TILED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    ROTATION: tl.constexpr,
    FRONT: tl.constexpr,
):
    """Codes and scales of the units int64 [ROWS], as far as they are below ``units``.

    rows: as ``load_front`` takes them, each unit's channels being a row.
    """
    BLOCKS: tl.constexpr = ROWS * (UNIT // BLOCK)
    PER_BYTE: tl.constexpr = 2 if ELEMENT == "e2m1" else 1
    valid = (unit < units)[:, None] & (tl.arange(0, UNIT) < UNIT)[None, :]
    y = load_rotated(x_ptr, rows, 0, valid, signs_ptr, matrix_ptr, ROWS, UNIT, ROTATION, False, FRONT)
    packed, stored = _encode_blocks(tl.reshape(y, (BLOCKS, BLOCK)), g, BLOCKS, BLOCK, ELEMENT, RULE)

    block = unit[:, None] * (UNIT // BLOCK) + tl.arange(0, UNIT // BLOCK)[None, :]
    block = tl.reshape(block, (BLOCKS,))
    inside = block < units * (UNIT // BLOCK)
    byte = tl.arange(0, BLOCK // PER_BYTE)
    tl.store(codes_ptr + block[:, None] * (BLOCK // PER_BYTE) + byte[None, :], packed, mask=inside[:, None])
    where = block
    if TILED:
        where = _tiled_offset(block, blocks_in_row, TILE_ROWS, TILE_COLS)
    tl.store(scales_ptr + where, stored.to(scales_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quantize_blocks_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    global_ptr,
    signs_ptr,
    matrix_ptr,
    units,
    blocks_in_row,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    TILED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    ROTATION: tl.constexpr,
    FRONT: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    g = 1.0
    if HAS_GLOBAL:
        g = tl.load(global_ptr)
    quantize_units(
        x_ptr, (unit * UNIT,), codes_ptr, scales_ptr, g, signs_ptr, matrix_ptr, unit, units, blocks_in_row,
        ROWS, UNIT, BLOCK, ELEMENT, RULE, TILED, TILE_ROWS, TILE_COLS, ROTATION, FRONT,
    )  # fmt: skip


@triton.jit
def quantize_walk_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    global_ptr,
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
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    TILED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    ROTATION: tl.constexpr,
    FRONT: tl.constexpr,
):
    """Blocks of rows, which a front end knows."""
    BLOCKS: tl.constexpr = WIDTH // BLOCK
    BYTES: tl.constexpr = WIDTH // 2 if ELEMENT == "e2m1" else WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < M)[:, None]
    column = tl.arange(0, WIDTH)
    g = 1.0
    if HAS_GLOBAL:
        g = tl.load(global_ptr)

    factor = (factor_ptr, factor_stride, factor_rows)
    shift = (shift_ptr, shift_stride, shift_rows)
    rows = open_rows(x_ptr, x_stride, factor, shift, row, M, K, ROWS, WIDTH, TILES, FRONT)
    for k in range(0, K, WIDTH):
        valid = inside & (k + column < K)[None, :]
        y = load_rotated(x_ptr, rows, k, valid, signs_ptr, matrix_ptr, ROWS, WIDTH, ROTATION, False, FRONT)
        y = tl.reshape(y, (ROWS * BLOCKS, BLOCK))
        packed, stored = _encode_blocks(y, g, ROWS * BLOCKS, BLOCK, ELEMENT, RULE)
        byte = k // (WIDTH // BYTES) + tl.arange(0, BYTES)
        bytes_in_row = K // (WIDTH // BYTES)
        packed = tl.reshape(packed, (ROWS, BYTES))
        codes = codes_ptr + (row * bytes_in_row)[:, None] + byte[None, :]
        tl.store(codes, packed, mask=inside & (byte < bytes_in_row)[None, :])
        block = k // BLOCK + tl.arange(0, BLOCKS)
        where = (row * (K // BLOCK))[:, None] + block[None, :]
        if TILED:
            where = _tiled_offset(where, K // BLOCK, TILE_ROWS, TILE_COLS)
        stored = tl.reshape(stored, (ROWS, BLOCKS)).to(scales_ptr.dtype.element_ty)
        tl.store(scales_ptr + where, stored, mask=inside & (block < K // BLOCK)[None, :])


@triton.jit
def quantize_rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
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
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    ROTATION: tl.constexpr,
    FRONT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < M)[:, None]

    factor = (factor_ptr, factor_stride, factor_rows)
    shift = (shift_ptr, shift_stride, shift_rows)
    rows = open_rows(x_ptr, x_stride, factor, shift, row, M, K, ROWS, WIDTH, TILES, FRONT)
    if TILES == 1:
        valid = inside & (column < K)[None, :]
        y = load_rotated(x_ptr, rows, 0, valid, signs_ptr, matrix_ptr, ROWS, WIDTH, ROTATION, False, FRONT)
        stored = choose(tl.max(magnitude_bits(y), axis=1), 1.0, RULE)
        packed = _pack(encode(y, _divisor(stored, 1.0, RULE)[:, None], ELEMENT), ROWS, WIDTH, ELEMENT)
        tl.store(codes_ptr + row[:, None] * K + column[None, :], packed, mask=valid)
    else:
        amax = tl.zeros((ROWS,), tl.int32)
        for k in range(0, K, WIDTH):
            valid = inside & (k + column < K)[None, :]
            y = load_rotated(x_ptr, rows, k, valid, signs_ptr, matrix_ptr, ROWS, WIDTH, ROTATION, False, FRONT)
            amax = tl.maximum(amax, tl.max(magnitude_bits(y), axis=1))
        stored = choose(amax, 1.0, RULE)
        divisor = _divisor(stored, 1.0, RULE)[:, None]
        for k in range(0, K, WIDTH):
            valid = inside & (k + column < K)[None, :]
            y = load_rotated(x_ptr, rows, k, valid, signs_ptr, matrix_ptr, ROWS, WIDTH, ROTATION, False, FRONT)
            packed = _pack(encode(y, divisor, ELEMENT), ROWS, WIDTH, ELEMENT)
            tl.store(codes_ptr + row[:, None] * K + (k + column)[None, :], packed, mask=valid)
    tl.store(scales_ptr + row, stored, mask=row < M)


#: Kernels that write the padding of tiled scales, too.
PADDING = ("quantize_blocks_fast", "quantize_blocks_front")
#: Elements of a program's tile: 32 registers a thread with four warps.
TILE = 4096
#: A matrix tile is smaller: it holds the input, the accumulator and a slice of the matrix at once.
MATRIX_TILE = 2048


def _of_format(format: Format) -> dict[str, Any]:
    return {"ELEMENT": format.element.name, "RULE": format.scale.name}


def _of_blocks(format: Format) -> dict[str, Any]:
    block = {"BLOCK": format.block, "HAS_GLOBAL": format.has_global_scale}
    return {**block, "TILE_ROWS": TILE_ROWS, "TILE_COLS": TILE_COLS, **_of_format(format)}


def _tile_of(rotation: Rotation) -> int:
    return MATRIX_TILE if rotation.kind == "matrix" else TILE


def _rows_of(rotation: Rotation, width: int) -> int:
    """Rows of a tile; a matrix product has at least 16 groups."""
    least = 16 * rotation.group // width if rotation.kind == "matrix" else 1
    return max(_tile_of(rotation) // width, least, 1)


def block_config(format: Format, rotation: Rotation, rows: int | None = None) -> dict[str, Any]:
    """Compile-time arguments of :func:`quantize_blocks_kernel` besides the scale layout."""
    unit = max(format.block or 1, rotation.group)
    return {
        "ROWS": rows or _rows_of(rotation, unit),
        "UNIT": unit,
        **_of_blocks(format),
        "ROTATION": constants(rotation),
        "FRONT": front_constants(NONE),
    }


def walk_config(rotation: Rotation, front_end: FrontEnd, k: int, format: Format | None = None) -> dict[str, Any]:
    """Compile-time arguments of a kernel that walks rows of K elements in tiles, and makes blocks of a format."""
    least = max(rotation.group, SUM_RUN)  # no block is larger than a run
    # the largest power of two that divides K leaves nothing of a tile unused
    width = max(min(k & -k, _tile_of(rotation)), least)
    return {
        "ROWS": _rows_of(rotation, width),
        "num_warps": 8,
        **(_of_blocks(format) if format else {}),
        **_of_rows(rotation, front_end, k, width),
    }


def _of_rows(rotation: Rotation, front_end: FrontEnd, k: int, width: int) -> dict[str, Any]:
    tiles = triton.next_power_of_2(triton.cdiv(k, width))
    front = front_constants(front_end, width, tiles)
    return {"WIDTH": width, "TILES": tiles, "ROTATION": constants(rotation), "FRONT": front}


def row_config(
    format: Format, rotation: Rotation, k: int, rows: int | None = None, front_end: FrontEnd = NONE
) -> dict[str, Any]:
    """Compile-time arguments of :func:`quantize_rows_kernel`."""
    least = max(rotation.group, SUM_RUN if front_end.sums else 1)
    width = max(min(triton.next_power_of_2(k), _tile_of(rotation)), least)
    matrix = rotation.kind == "matrix"
    return {
        "ROWS": max(rows or 0, _rows_of(rotation, width)) if matrix else rows or _rows_of(rotation, width),
        **_of_format(format),
        **_of_rows(rotation, front_end, k, width),
        # of butterflies with four warps, and of products with eight, ptxas spills a few bytes on some targets
        "num_warps": 4 if matrix else 8,
    }


def quantize(
    x: Tensor,
    format: Format,
    rotation: Rotation,
    global_scale: Tensor | None,
    scale_layout: str = "linear",
    front_end: FrontEnd = NONE,
    *,
    kernel: str = "",
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [..., K]: the bytes of ``reference.quantize``, but for a front end's exp.

    ``kernel``: the plan's; ``quantize_rows_gluon``, ``quantize_front_gluon``, ``quantize_blocks_fast`` and
    ``quantize_blocks_front`` name the faster twins. ``rows`` overrides the tile.
    """
    shape, k = tuple(x.shape), x.shape[-1]
    m = x.numel() // k
    codes = torch.empty(format.codes_shape(shape), dtype=format.element.codes_dtype, device=x.device)
    scales_shape = format.scales_shape(shape, scale_layout)
    tiled = scale_layout == "tiled"
    padded = tiled and scales_shape != (m, format.blocks(k)) and kernel not in PADDING
    new = torch.zeros if padded else torch.empty
    scales = new(scales_shape, dtype=format.scale.dtype, device=x.device)
    if kernel == "quantize_rows_gluon":
        from hadaquant.kernels.quantize_rows_gluon import quantize_rows

        quantize_rows(aligned(x.contiguous()), codes, scales, format, rotation)
        return codes, scales
    if kernel == "quantize_front_gluon":
        from hadaquant.kernels.quantize_front_gluon import quantize_front

        quantize_front(as_rows(x), codes, scales, format, rotation, front_end)
        return codes, scales
    if kernel == "quantize_blocks_front":
        from hadaquant.kernels.quantize_blocks_front import quantize_blocks_front

        quantize_blocks_front(as_rows(x), codes, scales, format, rotation, front_end, global_scale, scale_layout)
        return codes, scales
    if kernel == "quantize_blocks_fast":
        from hadaquant.kernels.quantize_blocks_fast import quantize_blocks

        quantize_blocks(x.contiguous(), codes, scales, format, rotation, global_scale, scale_layout)
        return codes, scales
    signs, matrix, g = given(rotation.signs, x), given(rotation.matrix, x), given(global_scale, x)
    if format.block and front_end is NONE:
        x = x.contiguous()
        config = block_config(format, rotation, rows) | {"TILED": tiled, **OPTIONS}
        units = x.numel() // int(config["UNIT"])
        arguments = (x, codes, scales, g, signs, matrix, units, format.blocks(k))
        launch(quantize_blocks_kernel, (triton.cdiv(units, config["ROWS"]),), arguments, config)
        return codes, scales
    x = as_rows(x)
    arguments = (signs, matrix, m, k, *row_arguments(x, front_end))
    if format.block:
        config = walk_config(rotation, front_end, k, format) | {"TILED": tiled, **OPTIONS}
        launch(quantize_walk_kernel, (triton.cdiv(m, config["ROWS"]),), (x, codes, scales, g, *arguments), config)
    else:
        config = row_config(format, rotation, k, rows, front_end) | OPTIONS
        launch(quantize_rows_kernel, (triton.cdiv(m, config["ROWS"]),), (x, codes, scales, *arguments), config)
    return codes, scales
