# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""Rotate and quantize as one writes it first: by three kernels, or by one where a block is as large as the group.

The rotation is a product with a dense matrix; scales are cast by the hardware; codes are found by comparing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.formats import Format


@triton.jit
def _choose(amax, global_ptr, RULE: tl.constexpr):
    """What is stored as a scale."""
    if RULE == "absmax":
        return tl.maximum(amax, 1e-12) / 127.0
    elif RULE == "e4m3_global":
        return tl.minimum(amax / 6.0 / tl.load(global_ptr), 448.0).to(tl.float8e4nv)
    else:  # the exponent of amax, two below
        return tl.maximum(((amax.to(tl.int32, bitcast=True) >> 23) & 255) - 2, 0).to(tl.uint8)


@triton.jit
def _pack(y, stored, global_ptr, ROWS: tl.constexpr, W: tl.constexpr, RULE: tl.constexpr):
    """E2M1 codes of y [ROWS, W], two a byte, under stored scales [ROWS]."""
    if RULE == "e4m3_global":
        scale = stored.to(tl.float32) * tl.load(global_ptr)
        scale = tl.where(scale == 0, 1.0, scale)
    else:
        scale = (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    q = tl.abs(y / scale[:, None])
    code = (q > 0.25).to(tl.uint8) + (q > 0.75).to(tl.uint8) + (q > 1.25).to(tl.uint8) + (q > 1.75).to(tl.uint8)
    code += (q > 2.5).to(tl.uint8) + (q > 3.5).to(tl.uint8) + (q > 5.0).to(tl.uint8)
    code = tl.where(y < 0, code + 8, code)
    low, high = tl.split(tl.reshape(code, (ROWS, W // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def rotate_kernel(
    x_ptr, matrix_ptr, y_ptr, groups, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, G, BK):
        ks = k + tl.arange(0, BK)
        x = tl.load(x_ptr + rows[:, None] * G + ks[None, :], mask=(rows < groups)[:, None], other=0.0)
        acc += tl.dot(x, tl.load(matrix_ptr + ks[:, None] * G + columns[None, :]))
    where = rows[:, None] * G + columns[None, :]
    tl.store(y_ptr + where, acc.to(y_ptr.dtype.element_ty), mask=(rows < groups)[:, None])


@triton.jit
def reduce_kernel(
    y_ptr, scales_ptr, global_ptr, blocks, BLOCK, RULE: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    amax = tl.zeros((ROWS,), tl.float32)
    for start in range(0, BLOCK, W):
        columns = start + tl.arange(0, W)
        inside = (rows < blocks)[:, None] & (columns < BLOCK)[None, :]
        y = tl.load(y_ptr + rows[:, None] * BLOCK + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.max(tl.abs(y), axis=1))
    tl.store(scales_ptr + rows, _choose(amax, global_ptr, RULE), mask=rows < blocks)


@triton.jit
def quantize_kernel(
    y_ptr, scales_ptr, global_ptr, codes_ptr, blocks, BLOCK, RULE: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * W + tl.arange(0, W)
    inside = (rows < blocks)[:, None] & (columns < BLOCK)[None, :]
    y = tl.load(y_ptr + rows[:, None] * BLOCK + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    stored = tl.load(scales_ptr + rows, mask=rows < blocks, other=0.0)
    if RULE == "absmax":
        q = y / stored[:, None]
        q = tl.where(q < 0, q - 0.5, q + 0.5).to(tl.int8)  # to the nearest, ties away from zero
        tl.store(codes_ptr + rows[:, None] * BLOCK + columns[None, :], q, mask=inside)
    else:
        byte = tl.program_id(1) * (W // 2) + tl.arange(0, W // 2)
        inside = (rows < blocks)[:, None] & (byte < BLOCK // 2)[None, :]
        packed = _pack(y, stored, global_ptr, ROWS, W, RULE)
        tl.store(codes_ptr + rows[:, None] * (BLOCK // 2) + byte[None, :], packed, mask=inside)


@triton.jit
def fused_kernel(
    x_ptr, matrix_ptr, scales_ptr, global_ptr, codes_ptr, blocks,
    BLOCK: tl.constexpr, RULE: tl.constexpr, ROWS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < blocks)[:, None]
    x = tl.load(x_ptr + rows[:, None] * BLOCK + columns[None, :], mask=inside, other=0.0)
    if ROTATED:
        y = tl.dot(x, tl.load(matrix_ptr + columns[:, None] * BLOCK + columns[None, :]))
    else:
        y = x.to(tl.float32)
    stored = _choose(tl.max(tl.abs(y), axis=1), global_ptr, RULE)
    tl.store(scales_ptr + rows, stored, mask=rows < blocks)
    byte = tl.arange(0, BLOCK // 2)
    packed = _pack(y, stored, global_ptr, ROWS, BLOCK, RULE)
    tl.store(codes_ptr + rows[:, None] * (BLOCK // 2) + byte[None, :], packed, mask=inside)


def _outputs(x: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the scales as a kernel stores them."""
    shape = tuple(x.shape)
    codes = torch.empty(format.codes_shape(shape), dtype=format.element.codes_dtype, device=x.device)
    scales = torch.empty(format.scales_shape(shape), dtype=format.scale.dtype, device=x.device)
    return codes, scales, scales.view(torch.float8_e4m3fn) if format.has_global_scale else scales


def three_kernels(
    x: Tensor, matrix: Tensor | None, format: Format, global_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [M, K]: rotate, reduce, quantize. ``matrix`` is [g, g] in x's dtype, g at least 16."""
    y = x
    if matrix is not None:
        g = matrix.shape[0]
        y = torch.empty_like(x)
        side = min(g, 128)
        grid = (triton.cdiv(x.numel() // g, 64), g // side)
        rotate_kernel[grid](x, matrix, y, x.numel() // g, G=g, BM=64, BN=side, BK=min(g, 64))
    block = format.block or x.shape[1]
    blocks = x.numel() // block
    codes, scales, stored = _outputs(x, format)
    rows, width = (1, 1024) if format.block is None else (128, block)
    g = x if global_scale is None else global_scale
    rule = {"RULE": format.scale.name, "ROWS": rows, "W": width}
    grid = (triton.cdiv(blocks, rows),)
    reduce_kernel[grid](y, stored, g, blocks, block, **rule)
    quantize_kernel[(*grid, triton.cdiv(block, width))](y, stored, g, codes, blocks, block, **rule)
    return codes, scales


def fused(
    x: Tensor, matrix: Tensor | None, format: Format, global_scale: Tensor | None, rows: int = 64
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [M, K] in a format of blocks, by one kernel; ``matrix`` [block, block], or None."""
    block = format.block or 0
    blocks = x.numel() // block
    codes, scales, stored = _outputs(x, format)
    g = x if global_scale is None else global_scale
    rotated, m = matrix is not None, x if matrix is None else matrix
    rule = {"BLOCK": block, "RULE": format.scale.name, "ROWS": rows, "ROTATED": rotated}
    fused_kernel[(triton.cdiv(blocks, rows),)](x, m, stored, g, codes, blocks, **rule)
    return codes, scales
