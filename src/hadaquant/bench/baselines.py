# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""The Triton kernels that anyone would write first. They are here to be faster than.

``int8_mm``: tiles by pointers, ``tl.dot``, scales in the epilogue. ``rotate_quantize``: three kernels, one that
rotates by a product with a dense Hadamard matrix, one that reduces to scales, one that writes codes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.formats import Format


def do_bench(call: Any) -> float:
    """Median milliseconds of one call with a cold L2 cache."""
    from triton.testing import do_bench as bench

    return bench(call, warmup=4, rep=15, return_mode="median")  # pyright: ignore[reportReturnType]


# ---- product ------------------------------------------------------------------------------------


@triton.jit
def int8_mm_kernel(
    x_ptr, sx_ptr, w_ptr, sw_ptr, y_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    width = GROUP * tiles_n
    first = pid // width * GROUP
    height = min(tiles_m - first, GROUP)
    rows = (first + pid % width % height) * BM + tl.arange(0, BM)
    columns = pid % width // height * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    # rows beyond the end wrap around, so that loads along them need no mask
    x = x_ptr + (rows % M).to(tl.int64)[:, None] * K + ks[None, :]
    w = w_ptr + (columns % N).to(tl.int64)[None, :] * K + ks[:, None]
    acc = tl.zeros((BM, BN), tl.int32)
    for k in range(tl.cdiv(K, BK)):
        left = K - k * BK
        a = tl.load(x, mask=ks[None, :] < left, other=0)
        b = tl.load(w, mask=ks[:, None] < left, other=0)
        acc += tl.dot(a, b, out_dtype=tl.int32)
        x += BK
        w += BK
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    sx = tl.load(sx_ptr + rows, mask=rows < M, other=0.0)
    sw = tl.load(sw_ptr + columns, mask=columns < N, other=0.0)
    y = acc.to(tl.float32) * sx[:, None] * sw[None, :]
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


def _tile(bm: int, bn: int, bk: int, warps: int, stages: int) -> dict[str, int]:
    return {"BM": bm, "BN": bn, "BK": bk, "GROUP": 8, "num_warps": warps, "num_stages": stages}


#: Tiles of 128 × 128, the usual ones; what else a product of many rows is tuned over; and one of few.
USUAL_TILES = (
    _tile(128, 128, 64, 4, 4),
    _tile(128, 128, 64, 8, 4),
    _tile(128, 128, 128, 4, 3),
    _tile(128, 128, 128, 8, 4),
)
LARGE_TILES = (
    _tile(128, 256, 64, 8, 4),
    _tile(128, 256, 128, 8, 3),
    _tile(256, 128, 128, 8, 3),
)
SMALL_TILES = (
    _tile(16, 64, 256, 4, 4),
    _tile(32, 64, 128, 4, 4),
    _tile(64, 64, 128, 4, 4),
    _tile(64, 128, 128, 4, 4),
)


def int8_mm(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, dtype: torch.dtype, tile: dict[str, int]) -> Tensor:
    """[M, N] of int8 x [M, K], w [N, K] and float32 scales [M], [N]."""
    (m, k), n = x.shape, w.shape[0]
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    grid = (triton.cdiv(m, tile["BM"]) * triton.cdiv(n, tile["BN"]),)
    int8_mm_kernel[grid](x, sx, w, sw, y, m, n, k, **tile)
    return y


def fastest_tile(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, dtype: torch.dtype, any_tile: bool) -> dict[str, int]:
    """The tile that multiplies these in the least time, of the usual ones or of any."""
    tiles = USUAL_TILES
    if any_tile:
        tiles = (*SMALL_TILES, *USUAL_TILES) if x.shape[0] <= 512 else (*USUAL_TILES, *LARGE_TILES)
    return min(tiles, key=lambda tile: do_bench(functools.partial(int8_mm, x, sx, w, sw, dtype, tile)))


# ---- rotate, reduce, quantize ---------------------------------------------------------------------


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
    if RULE == "absmax":
        scale = tl.maximum(amax, 1e-12) / 127.0
    elif RULE == "e4m3_global":
        scale = tl.minimum(amax / 6.0 / tl.load(global_ptr), 448.0).to(tl.float8e4nv)
    else:
        # the exponent of amax, two below
        scale = tl.maximum(((amax.to(tl.int32, bitcast=True) >> 23) & 255) - 2, 0).to(tl.uint8)
    tl.store(scales_ptr + rows, scale, mask=rows < blocks)


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
        byte = tl.program_id(1) * (W // 2) + tl.arange(0, W // 2)
        inside = (rows < blocks)[:, None] & (byte < BLOCK // 2)[None, :]
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(codes_ptr + rows[:, None] * (BLOCK // 2) + byte[None, :], packed, mask=inside)


def rotate_quantize(
    x: Tensor, matrix: Tensor | None, format: Format, global_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [M, K] by three kernels; ``matrix`` [g, g] in x's dtype, g at least 16."""
    m, k = x.shape
    y = x
    if matrix is not None:
        g = matrix.shape[0]
        y = torch.empty_like(x)
        side = min(g, 128)
        grid = (triton.cdiv(x.numel() // g, 64), g // side)
        rotate_kernel[grid](x, matrix, y, x.numel() // g, G=g, BM=64, BN=side, BK=min(g, 64))
    block = format.block or k
    blocks = x.numel() // block
    codes = torch.empty(format.codes_shape((m, k)), dtype=format.element.codes_dtype, device=x.device)
    scales = torch.empty(format.scales_shape((m, k)), dtype=format.scale.dtype, device=x.device)
    stored = scales.view(torch.float8_e4m3fn) if format.has_global_scale else scales
    rows, width = (1, 1024) if format.block is None else (128, block)
    g = x if global_scale is None else global_scale
    rule = {"RULE": format.scale.name, "ROWS": rows, "W": width}
    grid = (triton.cdiv(blocks, rows),)
    reduce_kernel[grid](y, stored, g, blocks, block, **rule)
    quantize_kernel[(*grid, triton.cdiv(block, width))](y, stored, g, codes, blocks, block, **rule)
    return codes, scales
