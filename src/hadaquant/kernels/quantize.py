"""Rotate -> scale -> encode -> pack in one kernel; steps and names as in reference.py.

Two kernels, by where a scale comes from. Formats with a block (nvfp4, mxfp4) see the tensor as one
run of units, a unit being a block or a group, whichever is larger: no row structure, any M, offsets
in 64 bits. Formats with one scale a row (int8) hold a row in registers, or walk a long row twice,
the second time from the L2 cache.

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
from hadaquant.kernels.hadamard import constants, load_rotated
from hadaquant.kernels.numerics import choose, encode, magnitude_bits, multiplier
from hadaquant.kernels.runtime import OPTIONS, given, on
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
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDES: tl.constexpr,
    ODD: tl.constexpr,
    NORM: tl.constexpr,
    SIGNED: tl.constexpr,
):
    BLOCKS: tl.constexpr = ROWS * (UNIT // BLOCK)
    PER_BYTE: tl.constexpr = 2 if ELEMENT == "e2m1" else 1
    first = tl.program_id(0).to(tl.int64) * ROWS
    unit = first + tl.arange(0, ROWS)
    valid = (unit < units)[:, None] & (tl.arange(0, UNIT) < UNIT)[None, :]
    g = 1.0
    if HAS_GLOBAL:
        g = tl.load(global_ptr)

    y = load_rotated(
        x_ptr, unit * UNIT, valid, signs_ptr, matrix_ptr,
        ROWS, KIND, GROUP, STRIDES, ODD, NORM, SIGNED, False, UNIT,
    )  # fmt: skip
    y = tl.reshape(y, (BLOCKS, BLOCK))
    stored = choose(tl.max(magnitude_bits(y), axis=1), g, RULE)  # [BLOCKS]
    codes = encode(y, _divisor(stored, g, RULE)[:, None], ELEMENT)
    packed = _pack(codes, BLOCKS, BLOCK, ELEMENT)

    block = first * (UNIT // BLOCK) + tl.arange(0, BLOCKS)
    inside = block < units * (UNIT // BLOCK)
    byte = tl.arange(0, BLOCK // PER_BYTE)
    tl.store(codes_ptr + block[:, None] * (BLOCK // PER_BYTE) + byte[None, :], packed, mask=inside[:, None])
    where = block
    if TILED:
        where = _tiled_offset(block, blocks_in_row, TILE_ROWS, TILE_COLS)
    tl.store(scales_ptr + where, stored.to(scales_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quantize_rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    signs_ptr,
    matrix_ptr,
    M,
    K,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ONE_PASS: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDES: tl.constexpr,
    ODD: tl.constexpr,
    NORM: tl.constexpr,
    SIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < M)[:, None]

    amax = tl.zeros((ROWS,), tl.int32)
    if ONE_PASS:
        valid = inside & (column < K)[None, :]
        y = load_rotated(
            x_ptr, row * K, valid, signs_ptr, matrix_ptr,
            ROWS, KIND, GROUP, STRIDES, ODD, NORM, SIGNED, False, WIDTH,
        )  # fmt: skip
        stored = choose(tl.max(magnitude_bits(y), axis=1), 1.0, RULE)
        codes = encode(y, _divisor(stored, 1.0, RULE)[:, None], ELEMENT)
        packed = _pack(codes, ROWS, WIDTH, ELEMENT)
        tl.store(codes_ptr + row[:, None] * K + column[None, :], packed, mask=valid)
    else:
        for k in range(0, K, WIDTH):
            valid = inside & (k + column < K)[None, :]
            y = load_rotated(
                x_ptr, row * K + k, valid, signs_ptr, matrix_ptr,
                ROWS, KIND, GROUP, STRIDES, ODD, NORM, SIGNED, False, WIDTH,
            )  # fmt: skip
            amax = tl.maximum(amax, tl.max(magnitude_bits(y), axis=1))
        stored = choose(amax, 1.0, RULE)
        divisor = _divisor(stored, 1.0, RULE)[:, None]
        for k in range(0, K, WIDTH):
            valid = inside & (k + column < K)[None, :]
            y = load_rotated(
                x_ptr, row * K + k, valid, signs_ptr, matrix_ptr,
                ROWS, KIND, GROUP, STRIDES, ODD, NORM, SIGNED, False, WIDTH,
            )  # fmt: skip
            packed = _pack(encode(y, divisor, ELEMENT), ROWS, WIDTH, ELEMENT)
            tl.store(codes_ptr + row[:, None] * K + (k + column)[None, :], packed, mask=valid)
    tl.store(scales_ptr + row, stored, mask=row < M)


#: Elements of a program's tile: 32 registers a thread with four warps.
TILE = 4096
#: A matrix tile is smaller: it holds the input, the accumulator and a slice of the matrix at once.
MATRIX_TILE = 2048


def block_config(format: Format, rotation: Rotation, rows: int | None = None) -> dict[str, Any]:
    """Compile-time arguments of :func:`quantize_blocks_kernel` besides the scale layout."""
    block = format.block or 1
    unit = max(block, rotation.group)
    tile = MATRIX_TILE if rotation.kind == "matrix" else TILE
    return {
        "ROWS": rows or max(tile // unit, 16 * rotation.group // unit if rotation.kind == "matrix" else 1),
        "UNIT": unit,
        "BLOCK": block,
        "ELEMENT": format.element.name,
        "RULE": format.scale.name,
        "HAS_GLOBAL": format.has_global_scale,
        "TILE_ROWS": TILE_ROWS,
        "TILE_COLS": TILE_COLS,
        **constants(rotation),
    }


def row_config(format: Format, rotation: Rotation, k: int, rows: int | None = None) -> dict[str, Any]:
    """Compile-time arguments of :func:`quantize_rows_kernel`."""
    matrix = rotation.kind == "matrix"
    tile = MATRIX_TILE if matrix else TILE
    width = max(min(triton.next_power_of_2(k), tile), rotation.group)
    rows = rows or max(1, tile // width)
    if matrix:  # a matrix product has at least 16 rows
        rows = max(rows, 16 * rotation.group // width)
    return {
        "ROWS": rows,
        "WIDTH": width,
        "ONE_PASS": width >= k,
        "ELEMENT": format.element.name,
        "RULE": format.scale.name,
        # of butterflies with four warps, and of products with eight, ptxas spills a few bytes on some targets
        "num_warps": 4 if matrix else 8,
        **constants(rotation),
    }


def quantize(
    x: Tensor,
    format: Format,
    rotation: Rotation,
    global_scale: Tensor | None,
    scale_layout: str = "linear",
    *,
    kernel: str = "",
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [..., K]: the bytes of ``reference.quantize``.

    ``kernel``: the plan's; ``quantize_rows_gluon`` names the faster twin. ``rows`` overrides the tile.
    """
    x = x.contiguous()
    shape, k = tuple(x.shape), x.shape[-1]
    m = x.numel() // k
    codes = torch.empty(format.codes_shape(shape), dtype=format.element.codes_dtype, device=x.device)
    scales_shape = format.scales_shape(shape, scale_layout)
    tiled = scale_layout == "tiled"
    padded = tiled and scales_shape != (m, format.blocks(k))
    new = torch.zeros if padded else torch.empty
    scales = new(scales_shape, dtype=format.scale.dtype, device=x.device)
    if kernel == "quantize_rows_gluon":
        from hadaquant.kernels.quantize_rows_gluon import quantize_rows

        quantize_rows(x, codes, scales, format, rotation)
        return codes, scales
    signs, matrix = given(rotation.signs, x), given(rotation.matrix, x)
    with on(x.device):
        if format.block:
            config = block_config(format, rotation, rows)
            units = x.numel() // int(config["UNIT"])
            grid = (triton.cdiv(units, config["ROWS"]),)
            g = given(global_scale, x)
            quantize_blocks_kernel[grid](
                x, codes, scales, g, signs, matrix, units, format.blocks(k), TILED=tiled, **config, **OPTIONS
            )
        else:
            config = row_config(format, rotation, k, rows)
            grid = (triton.cdiv(m, config["ROWS"]),)
            quantize_rows_kernel[grid](x, codes, scales, signs, matrix, m, k, **config, **OPTIONS)
    return codes, scales
