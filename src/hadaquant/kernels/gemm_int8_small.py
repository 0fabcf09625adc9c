"""INT8 products of few rows, where reading the weight once is all that costs; twins of ``int8_mm_kernel``.

``gemv`` multiplies on the integer cores, four products an instruction, a whole row of the weight in
flight at once: no shared memory, no split of K. ``few_rows`` uses the matrix units, its warps taking
slices of K as the batch of a batched product, added at the end: exact, since integers have no order.

N·K bytes move; the roof is device memory. ``gemv`` fetches a weight at rest before its input is there, where
launches may overlap (programmatic dependent launch, from sm_90).
"""

from typing import Any

import triton
import triton.language as tl

from hadaquant.kernels.numerics import narrow, widen
from hadaquant.kernels.runtime import OPTIONS


@triton.jit
def _dp4a(a, b, c):
    """c + the four int8 products of the words a and b."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def gemv_kernel(
    x_ptr, sx_ptr, w_ptr, sw_ptr, bias_ptr, y_ptr, N, K,
    M: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr, OVERLAP: tl.constexpr,
    AT_REST: tl.constexpr,
):  # fmt: skip
    # x [M, K/4], w [N, K/4]: words of four int8
    x_words = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    w_words = w_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    word = tl.arange(0, WORDS)
    rows = w_words + column.to(tl.int64)[:, None] * (K // 4) + word[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        if not AT_REST:
            tl.extra.cuda.gdc_wait()
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros((BN, WORDS), tl.int32),)
    for k in range(0, K // 4, WORDS):
        inside = k + word < K // 4
        w = tl.load(rows + k, mask=(column < N)[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
        if OVERLAP and AT_REST:
            tl.extra.cuda.gdc_wait()
        new = ()
        for m in tl.static_range(M):
            x = tl.load(x_words + m * (K // 4) + k + word, mask=inside, other=0)
            new = new + (_dp4a(w, tl.broadcast_to(x[None, :], (BN, WORDS)), sums[m]),)
        sums = new
    sw = tl.load(sw_ptr + column, mask=column < N, other=0.0)
    for m in tl.static_range(M):
        y = (tl.sum(sums[m], 1).to(tl.float32) * tl.load(sx_ptr + m)) * sw
        if HAS_BIAS:
            y = y + widen(tl.load(bias_ptr + column, mask=column < N, other=0.0))
        tl.store(y_ptr + m * N + column, narrow(y, y_ptr.dtype.element_ty), mask=column < N)


@triton.jit
def few_rows_kernel(
    x_ptr, sx_ptr, w_ptr, sw_ptr, bias_ptr, y_ptr, M, N, K,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.arange(0, BM)
    k = (tl.arange(0, SLICES) * BK)[:, None, None] + tl.arange(0, BK)[None, None, :]  # [SLICES, 1, BK]
    x_rows = x_ptr + row[None, :, None] * K + k
    w_rows = w_ptr + column.to(tl.int64)[None, :, None] * K + k
    acc = tl.zeros((SLICES, BM, BN), tl.int32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, SLICES * BK):
        inside = start + k < K
        x = tl.load(x_rows + start, mask=(row < M)[None, :, None] & inside, other=0)
        w = tl.load(w_rows + start, mask=(column < N)[None, :, None] & inside, other=0)
        acc = tl.dot(x, tl.permute(w, (0, 2, 1)), acc, out_dtype=tl.int32)
    sx = tl.load(sx_ptr + row, mask=row < M, other=0.0)
    sw = tl.load(sw_ptr + column, mask=column < N, other=0.0)
    y = (tl.sum(acc, 0).to(tl.float32) * sx[:, None]) * sw[None, :]
    if HAS_BIAS:
        y = y + widen(tl.load(bias_ptr + column, mask=column < N, other=0.0))[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    tl.store(y_ptr + row[:, None] * N + column[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)


def gemv_config(m: int, k: int, overlap: bool, at_rest: bool = False) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`gemv_kernel`; K % 4 == 0.

    ``at_rest``: the kernel ahead does not write the weight, and all before that one are done.
    """
    words = min(1024 if m == 1 else 512, triton.next_power_of_2(k // 4))
    return {"M": m, "BN": 4, "WORDS": words, "OVERLAP": overlap, "AT_REST": at_rest, "num_warps": 2, **OPTIONS}


def few_rows_config(overlap: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`few_rows_kernel`, for M up to 16."""
    tile = {"BM": 16, "BN": 16, "BK": 256, "SLICES": 4}
    return {**tile, "OVERLAP": overlap, "num_warps": tile["SLICES"], "num_stages": 4, **OPTIONS}
