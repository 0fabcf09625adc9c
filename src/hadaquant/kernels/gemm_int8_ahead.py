"""INT8 product of few to some hundred rows on Hopper, in Gluon; twin of ``int8_mm_kernel``.

Each program has a multiprocessor for itself, and fills two rings of stages in shared memory by TMA. Behind the kernel
that quantizes x (programmatic dependent launch) the first stages of the weight arrive while that one still runs, since
a weight at rest needs no waiting for. Few of them: x's copies queue behind them in the same engine.

The roof is device memory, N·K bytes, and for more rows the L2 cache, which each program asks for all its rows of x.
Needs K % 16 == 0 and 16-byte aligned bases, which TMA wants; it reads zeros beyond N and K.
"""

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hadaquant.kernels.runtime import OPTIONS
from hadaquant.kernels.tma import Base, matrix

#: Triton 3.7 renamed it.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _fetch_weight(w_desc, w_buf, arrived, column, step, stage):
    BN: gl.constexpr = w_buf.shape[1]
    BK: gl.constexpr = w_buf.shape[2]
    mbarrier.expect(arrived.index(stage), BN * BK)
    tma.async_copy_global_to_shared(w_desc, [column, step * BK], arrived.index(stage), w_buf.index(stage))


@gluon.jit
def _fetch_rows(x_desc, x_buf, arrived, row, last, step, stage, BOX: gl.constexpr):
    """All rows of the tile as one box, or two boxes that begin at ``row`` and at ``last``."""
    BM: gl.constexpr = x_buf.shape[1]
    BK: gl.constexpr = x_buf.shape[2]
    BOXES: gl.constexpr = 1 if BOX == BM else 2
    mbarrier.expect(arrived.index(stage), BOXES * BOX * BK)
    rows = x_buf.index(stage)
    tma.async_copy_global_to_shared(x_desc, [row, step * BK], arrived.index(stage), rows.slice(0, BOX, 0))
    if BOXES == 2:
        tma.async_copy_global_to_shared(x_desc, [last, step * BK], arrived.index(stage), rows.slice(BOX, BOX, 0))


@gluon.jit(do_not_specialize=["M"])
def int8_mm_ahead(
    x_desc, w_desc, sx_ptr, sw_ptr, bias_ptr, y_ptr, M, N, K,
    HAS_BIAS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BOX: gl.constexpr,
    X_STAGES: gl.constexpr, W_STAGES: gl.constexpr, AHEAD: gl.constexpr, AT_REST: gl.constexpr,
):  # fmt: skip
    """BOX: rows of x in a copy. AHEAD: stages of the weight that are asked for before x."""
    x_kept: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], gl.int8)
    x_buf = gl.allocate_shared_memory(gl.int8, [X_STAGES, BM, BK], x_kept)
    w_buf = gl.allocate_shared_memory(gl.int8, [W_STAGES, BN, BK], w_desc.layout)
    x_arrived = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    w_arrived = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_arrived.index(i), count=1)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(w_arrived.index(i), count=1)
    fence_async_shared()
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 32])
    tiles_m = gl.cdiv(M, BM)
    steps = gl.cdiv(K, BK)
    column0 = gl.program_id(0) // tiles_m * BN
    column = column0 + gl.arange(0, BN, layout=gl.SliceLayout(0, product))

    # A box that reaches beyond M takes far longer, so that the last rows are read with some before them. Of a row
    # that is read twice the first is stored.
    first = gl.program_id(0) % tiles_m * BM
    i = gl.arange(0, BM, layout=gl.SliceLayout(1, product))
    if BOX == BM:
        row0 = gl.minimum(first, M - BM)
        last = row0
        row = row0 + i
        stored = row >= first
    else:
        row0 = 0
        last = gl.maximum(M - BOX, 0)
        row = gl.where(i < BOX, i, last + i - BOX)
        stored = (row < M) & ((i < BOX) | ((row >= BOX) & (i < 2 * BOX)))

    gdc_launch_dependents()
    if not AT_REST:
        gdc_wait()
    for s in range(gl.minimum(AHEAD, steps)):
        _fetch_weight(w_desc, w_buf, w_arrived, column0, s, s)
    sw = gl.load(sw_ptr + column, mask=column < N, other=0.0)
    if AT_REST:
        gdc_wait()
    for s in range(gl.minimum(max(X_STAGES, W_STAGES - AHEAD), steps)):
        if s < X_STAGES:
            _fetch_rows(x_desc, x_buf, x_arrived, row0, last, s, s, BOX)
        if AHEAD + s < gl.minimum(W_STAGES, steps):
            _fetch_weight(w_desc, w_buf, w_arrived, column0, AHEAD + s, AHEAD + s)
    sx = gl.load(sx_ptr + row, mask=stored, other=0.0)

    acc = gl.zeros((BM, BN), gl.int32, product)
    x_stage, w_stage, x_phase, w_phase = 0, 0, 0, 0
    x_before, w_before = 0, 0
    for step in range(steps):
        mbarrier.wait(w_arrived.index(w_stage), w_phase)
        mbarrier.wait(x_arrived.index(x_stage), x_phase)
        acc = warpgroup_mma(
            x_buf.index(x_stage), w_buf.index(w_stage).permute((1, 0)), acc, use_acc=step > 0, is_async=True
        )
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if step > 0:
            # the step before is done in all warps: what it read makes room
            _barrier()
            if step - 1 + X_STAGES < steps:
                _fetch_rows(x_desc, x_buf, x_arrived, row0, last, step - 1 + X_STAGES, x_before, BOX)
            if step - 1 + W_STAGES < steps:
                _fetch_weight(w_desc, w_buf, w_arrived, column0, step - 1 + W_STAGES, w_before)
        x_before, w_before = x_stage, w_stage
        x_stage += 1
        if x_stage == X_STAGES:
            x_stage = 0
            x_phase ^= 1
        w_stage += 1
        if w_stage == W_STAGES:
            w_stage = 0
            w_phase ^= 1
    acc = warpgroup_mma_wait(0, deps=(acc,))

    y = (acc.to(gl.float32) * sx[:, None]) * sw[None, :]
    if HAS_BIAS:
        y = y + gl.load(bias_ptr + column, mask=column < N, other=0.0).to(gl.float32)[None, :]
    where = y_ptr + row.to(gl.int64)[:, None] * N + column[None, :]
    gl.store(where, y.to(y_ptr.dtype.element_ty), mask=stored[:, None] & (column < N)[None, :])


#: Channels a step, stages of x and of the weight, and how many of the weight's are asked for before x (raced on an
#: H200), of the tiles in the order in which they are tried.
TILES: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (64, 32): (256, 6, 8, 3),
    (64, 64): (256, 5, 8, 4),
    (64, 128): (256, 4, 4, 2),
    (128, 128): (128, 6, 6, 3),
}
#: Fewest rows of a box: a block of the layout in shared memory.
_LEAST_BOX = 8


def box_of(m: int, tile_rows: int) -> int:
    """Rows of x in a copy: all of the tile, or so many that two copies hold the m rows."""
    return tile_rows if m >= tile_rows else max(_LEAST_BOX, 1 << (m.bit_length() - 1))


def config(m: int, tile: tuple[int, int], has_bias: bool, at_rest: bool = False) -> dict[str, Any]:
    """Compile-time arguments and launch options.

    ``at_rest``: the kernel ahead does not write the weight, and all before that one are done.
    """
    channels, x_stages, w_stages, ahead = TILES[tile]
    return {
        "HAS_BIAS": has_bias,
        "BM": tile[0],
        "BN": tile[1],
        "BK": channels,
        "BOX": box_of(m, tile[0]),
        "X_STAGES": x_stages,
        "W_STAGES": w_stages,
        "AHEAD": ahead,
        "AT_REST": at_rest,
        "launch_pdl": True,
        "num_warps": tile[0] // 16,
        **OPTIONS,
    }


def programs_of(m: int, n: int, tile: tuple[int, int]) -> int:
    """One a tile."""
    return triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1])


def descriptors(
    x: Base, w: Base, shape: tuple[int, int, int], tile: tuple[int, int]
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of x and w: of tensors, or of addresses that are set later."""
    (m, n, k), channels = shape, TILES[tile][0]
    return (
        matrix(x, m, k, [box_of(m, tile[0]), channels], gl.int8),
        matrix(w, n, k, [tile[1], channels], gl.int8),
    )
