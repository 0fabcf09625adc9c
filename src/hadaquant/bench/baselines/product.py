# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""A product of int8 matrices as anyone writes it first: tiles by pointers, ``tl.dot``, scales in the epilogue."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.bench.timing import do_bench


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
