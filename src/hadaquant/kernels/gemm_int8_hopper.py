"""INT8 product for Hopper's warpgroup matrix units, in Gluon; twin of ``int8_mm_kernel``.

One CTA a multiprocessor, persistent, 128 x 256 tiles. A producer warp fills a ring of four stages
(x twice [64, 128], w [256, 128], int8) by TMA and sends each tile's scales along; two consumer
warpgroups own 64 rows each and do not wait for one another, so that one's epilogue hides behind the
other's products. The tiles of the last, partial wave are cut in CUT parts along N, so that all
multiprocessors end together. Epilogue: ((acc · sx) · sw) + bias in float32, each step rounded.

The roof is the tensor cores: 2·M·N·K operations at 1979 Tops/s (H200 datasheet, dense int8), in
practice the power limit. Needs K % 16 == 0, N % 8 == 0 and 16-byte aligned bases, which TMA wants;
ragged M and N are clipped by TMA, which also reads zeros beyond K.
"""

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from hadaquant.kernels.runtime import OPTIONS
from hadaquant.kernels.tma import Base, matrix

BM, BN, BK, STAGES = 128, 256, 128, 4
#: Rows of tiles that are walked together, for reuse in the L2 cache.
TILE_ROWS = 16


@gluon.jit
def tile_of(t, tiles_m, tiles_n, TILE_ROWS: gl.constexpr):
    """Row and column of tile t: TILE_ROWS rows at a time, column by column."""
    width = TILE_ROWS * tiles_n
    first = (t // width) * TILE_ROWS
    height = gl.minimum(tiles_m - first, TILE_ROWS)
    return first + (t % width) % height, (t % width) // height


@gluon.jit
def _produce(begin, end, stage, phase, scales_phase, x_desc, w_desc, sx_ptr, sw_ptr, buffers, tiles_m, tiles_n, steps,
             base, M, N, CUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
             TILE_ROWS: gl.constexpr):  # fmt: skip
    x_buf, w_buf, _, sx_buf, sw_buf, full, empty, scales_full, scales_empty = buffers
    COLS: gl.constexpr = BN // CUT
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for u in range(begin, end, gl.num_programs(0)):
        m, n = tile_of(base + u // CUT, tiles_m, tiles_n, TILE_ROWS)
        row = m * BM
        column = n * BN + (u % CUT) * COLS
        for k in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (BM + COLS) * BK)
            w = w_buf.index(stage)
            if CUT > 1:
                w = w.slice(0, COLS, 0)
            tma.async_copy_global_to_shared(x_desc, [row, k * BK], full.index(stage), x_buf.index(stage * 2))
            tma.async_copy_global_to_shared(w_desc, [column, k * BK], full.index(stage), w)
            tma.async_copy_global_to_shared(
                x_desc, [row + BM // 2, k * BK], full.index(stage), x_buf.index(stage * 2 + 1)
            )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        mbarrier.wait(scales_empty.index(0), scales_phase)
        sw = sw_buf
        if CUT > 1:
            sw = sw_buf.slice(0, COLS, 0)
        # by plain copies, since each descriptor costs the host some microseconds a launch
        x_row = row + gl.arange(0, BM, layout=lanes)
        w_row = column + gl.arange(0, COLS, layout=lanes)
        async_copy.async_copy_global_to_shared(sx_buf, sx_ptr + x_row, mask=x_row < M)
        async_copy.async_copy_global_to_shared(sw, sw_ptr + w_row, mask=w_row < N)
        async_copy.mbarrier_arrive(scales_full.index(0), increment_count=False)
        scales_phase ^= 1
    return stage, phase, scales_phase


@gluon.jit
def _producer(x_desc, w_desc, w_cut_desc, sx_ptr, sw_ptr, buffers, tiles_m, tiles_n, steps, whole, M, N,
              CUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
              TILE_ROWS: gl.constexpr):  # fmt: skip
    stage, phase, scales_phase = _produce(
        gl.program_id(0), whole, gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(1),
        x_desc, w_desc, sx_ptr, sw_ptr, buffers, tiles_m, tiles_n, steps, 0, M, N, 1, BM, BN, BK, STAGES, TILE_ROWS,
    )  # fmt: skip
    if CUT > 1:
        _produce(
            gl.program_id(0), (tiles_m * tiles_n - whole) * CUT, stage, phase, scales_phase,
            x_desc, w_cut_desc, sx_ptr, sw_ptr, buffers, tiles_m, tiles_n, steps, whole, M, N,
            CUT, BM, BN, BK, STAGES, TILE_ROWS,
        )  # fmt: skip


@gluon.jit
def _emit(acc, sx, sw, bias_ptr, y_desc, y_buf, row, column, N, HAS_BIAS: gl.constexpr):
    layout: gl.constexpr = acc.type.layout
    y = (acc.to(gl.float32) * gl.expand_dims(sx, 1)) * gl.expand_dims(sw, 0)
    if HAS_BIAS:
        n = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
        y = y + gl.expand_dims(gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32), 0)
    tma.store_wait(0)
    y_buf.store(y.to(y_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [row, column], y_buf)


@gluon.jit
def _consume(begin, end, stage, phase, scales_phase, buffers, bias_ptr, y_desc, tiles_m, tiles_n, steps, N, base,
             GROUP: gl.constexpr, CUT: gl.constexpr, HAS_BIAS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
             STAGES: gl.constexpr, TILE_ROWS: gl.constexpr):  # fmt: skip
    x_buf, w_buf, y_bufs, sx_buf, sw_buf, full, empty, scales_full, scales_empty = buffers
    ROWS: gl.constexpr = BM // 2
    COLS: gl.constexpr = BN // CUT
    HALF: gl.constexpr = BN // 2 if CUT == 1 else COLS
    # Triton takes int8 instructions of at most 128 columns
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(COLS, 128), 32])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    y_buf = y_bufs.index(GROUP)
    for u in range(begin, end, gl.num_programs(0)):
        m, n = tile_of(base + u // CUT, tiles_m, tiles_n, TILE_ROWS)
        row = m * BM + GROUP * ROWS
        column = n * BN + (u % CUT) * COLS
        acc = gl.zeros((ROWS, COLS), gl.int32, layout)
        for k in range(steps):
            mbarrier.wait(full.index(stage), phase)
            w = w_buf.index(stage)
            if CUT > 1:
                w = w.slice(0, COLS, 0)
            acc = warpgroup_mma(x_buf.index(stage * 2 + GROUP), w.permute((1, 0)), acc, use_acc=k > 0, is_async=True)
            # the other warpgroup keeps the matrix units busy, and the stage comes back one step sooner
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        mbarrier.wait(scales_full.index(0), scales_phase)
        scales_phase ^= 1
        sx = sx_buf.slice(GROUP * ROWS, ROWS, 0).load(gl.SliceLayout(1, half))
        if CUT == 1:
            left, right = gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, HALF)), (0, 2, 1)))
            sw = sw_buf.slice(0, HALF, 0).load(gl.SliceLayout(0, half))
            _emit(gl.convert_layout(left, half), sx, sw, bias_ptr, y_desc, y_buf, row, column, N, HAS_BIAS)
            sw = sw_buf.slice(HALF, HALF, 0).load(gl.SliceLayout(0, half))
            _emit(gl.convert_layout(right, half), sx, sw, bias_ptr, y_desc, y_buf, row, column + HALF, N, HAS_BIAS)
        else:
            sw = sw_buf.slice(0, COLS, 0).load(gl.SliceLayout(0, half))
            y = y_buf
            if COLS < BN // 2:
                y = y_buf.slice(0, COLS, 1)
            _emit(acc, sx, sw, bias_ptr, y_desc, y, row, column, N, HAS_BIAS)
        mbarrier.arrive(scales_empty.index(0), count=1)
    return stage, phase, scales_phase


@gluon.jit
def _consumer(buffers, bias_ptr, y_desc, y_cut_desc, tiles_m, tiles_n, steps, whole, N, GROUP: gl.constexpr,
              CUT: gl.constexpr, HAS_BIAS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
              TILE_ROWS: gl.constexpr):  # fmt: skip
    stage, phase, scales_phase = _consume(
        gl.program_id(0), whole, gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0),
        buffers, bias_ptr, y_desc, tiles_m, tiles_n, steps, N, 0, GROUP, 1, HAS_BIAS, BM, BN, STAGES, TILE_ROWS,
    )  # fmt: skip
    if CUT > 1:
        _consume(
            gl.program_id(0), (tiles_m * tiles_n - whole) * CUT, stage, phase, scales_phase,
            buffers, bias_ptr, y_cut_desc, tiles_m, tiles_n, steps, N, whole,
            GROUP, CUT, HAS_BIAS, BM, BN, STAGES, TILE_ROWS,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def int8_mm_hopper(
    x_desc, w_desc, w_cut_desc, y_desc, y_cut_desc, sx_ptr, sw_ptr, bias_ptr, M, N, K,
    CUT: gl.constexpr, HAS_BIAS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, TILE_ROWS: gl.constexpr,
):  # fmt: skip
    # a descriptor costs the host some microseconds a launch: those that would be another's twins are not given
    if CUT == 1:
        w_cut_desc = w_desc
    if CUT <= 2:
        y_cut_desc = y_desc
    x_buf = gl.allocate_shared_memory(gl.int8, [STAGES * 2, BM // 2, BK], x_desc.layout)
    w_buf = gl.allocate_shared_memory(gl.int8, [STAGES, BN, BK], w_desc.layout)
    y_buf = gl.allocate_shared_memory(y_desc.dtype, [2, BM // 2, BN // 2], y_desc.layout)
    in_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sx_buf = gl.allocate_shared_memory(gl.float32, [BM], in_order)
    sw_buf = gl.allocate_shared_memory(gl.float32, [BN], in_order)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scales_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    scales_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(scales_full.index(0), count=32)  # every thread of the producer, as its copies are done
    mbarrier.init(scales_empty.index(0), count=2)
    fence_async_shared()
    # All above needs nothing of the kernel ahead. The next one may start as this one's programs end, no sooner: its
    # own would be placed where there happens to be room, unevenly.
    gdc_wait()
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    whole = tiles_m * tiles_n
    if CUT > 1:
        whole = whole // gl.num_programs(0) * gl.num_programs(0)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize([
        (_consumer, ((x_buf, w_buf, y_buf, sx_buf, sw_buf, full, empty, scales_full, scales_empty), bias_ptr, y_desc,
                     y_cut_desc, tiles_m, tiles_n, steps, whole, N, FIRST, CUT, HAS_BIAS, BM, BN, STAGES, TILE_ROWS)),
        (_consumer, ((x_buf, w_buf, y_buf, sx_buf, sw_buf, full, empty, scales_full, scales_empty), bias_ptr, y_desc,
                     y_cut_desc, tiles_m, tiles_n, steps, whole, N, SECOND, CUT, HAS_BIAS, BM, BN, STAGES, TILE_ROWS)),
        (_producer, (x_desc, w_desc, w_cut_desc, sx_ptr, sw_ptr,
                     (x_buf, w_buf, y_buf, sx_buf, sw_buf, full, empty, scales_full, scales_empty),
                     tiles_m, tiles_n, steps, whole, M, N, CUT, BM, BN, BK, STAGES, TILE_ROWS)),
    ], [4, 1], [232, 40])  # fmt: skip


def cut_of(tiles: int, programs: int) -> int:
    """In how many parts the tiles of the last wave are cut along N: 1, 2 or 4.

    Half tiles take 0.62 and quarter tiles 0.42 of a whole one's time, as measured on an H200.
    """
    rest = tiles % programs
    if rest == 0 or tiles < programs:
        return 1
    cost = {1: 1.0, 2: 0.62 * triton.cdiv(2 * rest, programs), 4: 0.42 * triton.cdiv(4 * rest, programs)}
    return min(cost, key=lambda cut: cost[cut])


def config(cut: int, has_bias: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options."""
    return {
        "CUT": cut,
        "HAS_BIAS": has_bias,
        "BM": BM,
        "BN": BN,
        "BK": BK,
        "STAGES": STAGES,
        "TILE_ROWS": TILE_ROWS,
        "launch_pdl": True,
        "num_warps": 4,
        **OPTIONS,
    }


def programs_of(m: int, n: int, multiprocessors: int) -> tuple[int, int]:
    """How many programs share the tiles, and in how many parts the last ones are cut."""
    tiles = triton.cdiv(m, BM) * triton.cdiv(n, BN)
    cut = cut_of(tiles, multiprocessors)
    return (min(multiprocessors, tiles) if cut == 1 else multiprocessors), cut


def descriptors(
    x: Base, w: Base, y: Base, shape: tuple[int, int, int], cut: int
) -> tuple[TensorDescriptor | None, ...]:
    """The kernel's descriptors in its order: of tensors, or of addresses that are set later."""
    m, n, k = shape
    out = gl.bfloat16 if y.dtype == torch.bfloat16 else gl.float16
    return (
        matrix(x, m, k, [BM // 2, BK], gl.int8),
        matrix(w, n, k, [BN, BK], gl.int8),
        matrix(w, n, k, [BN // cut, BK], gl.int8) if cut > 1 else None,
        matrix(y, m, n, [BM // 2, BN // 2], out),
        matrix(y, m, n, [BM // 2, BN // cut], out) if cut > 2 else None,
    )
