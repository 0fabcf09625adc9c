"""FP4 product for Hopper's warpgroup matrix units, in Gluon; twin of ``fp4_mm_kernel``.

Weights stay packed until they are in registers: the matrix units take their left operand from there, so
the product is made transposed, weights on the left. x is unpacked to bfloat16 by a pass of its own, its
columns in the order in which the weights' words yield them. One CTA a multiprocessor, persistent, 128
weight rows by 256 (or 128) rows of x. A producer warp fills a ring of stages by TMA; two consumer
warpgroups own 64 weight rows each: one decodes while the other multiplies.

The roof is the bfloat16 matrix units: 2·M·N·K operations at 989 Tflop/s (H200 datasheet, dense), in
practice the power limit. Needs K % 32 == 0, N % 8 == 0 and 16-byte aligned bases.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
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

from hadaquant.formats import Format
from hadaquant.kernels.fp4_words import decode_nibble, paired_scales
from hadaquant.kernels.gemm_fp4 import SPAN, unpack
from hadaquant.kernels.gemm_int8_hopper import tile_of
from hadaquant.kernels.numerics import narrow, widen
from hadaquant.kernels.runtime import OPTIONS, given, launches_overlap, multiprocessors, on

BN, STAGES = 128, 4
#: Rows of tiles that are walked together, for reuse in the L2 cache.
TILE_ROWS = 8


@gluon.constexpr_function
def _load_asm():
    return "ld.global.nc.u8 $0, [$2]; mov.b32 $1, $0; // $3"


@gluon.jit
def _work(t, tiles_m, tiles_n, steps, SPLIT: gl.constexpr, TILE_ROWS: gl.constexpr):
    """Row and column of the tile of work item t, and the spans of K that the item takes."""
    m, n = tile_of(t // SPLIT, tiles_m, tiles_n, TILE_ROWS)
    each = gl.cdiv(steps, SPLIT)
    begin = gl.minimum(t % SPLIT * each, steps)
    return m, n, begin, gl.minimum(begin + each, steps)


@gluon.jit
def _producer(x_desc, w_desc, x_buf, w_buf, full, empty, tiles_m, tiles_n, steps, SPLIT: gl.constexpr,
              BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, TILE_ROWS: gl.constexpr,
              OVERLAP: gl.constexpr):  # fmt: skip
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for t in range(gl.program_id(0), tiles_m * tiles_n * SPLIT, gl.num_programs(0)):
        m, n, begin, end = _work(t, tiles_m, tiles_n, steps, SPLIT, TILE_ROWS)
        for s in range(begin, end):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BM * 128 + BN * 64)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    w_desc, [n * BN + half * 64, s * 16], full.index(stage), w_buf.index(stage + half)
                )
            tma.async_copy_global_to_shared(x_desc, [m * BM, s * 128], full.index(stage), x_buf.index(stage))
            mbarrier.wait(empty.index(stage + 1), phase)
            mbarrier.expect(full.index(stage + 1), BM * 128)
            tma.async_copy_global_to_shared(
                x_desc, [m * BM, s * 128 + 64], full.index(stage + 1), x_buf.index(stage + 1)
            )
            stage += 2
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _scale_bytes(rows, s, blocks, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Scale bytes of a span's 16 words, each word's own."""
    word = gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]
    block = gl.minimum(s * (128 // BLOCK) + word * 8 // BLOCK, blocks - 1)
    return gl.inline_asm_elementwise(_load_asm(), "=r,=r,l,l", [rows + block], dtype=gl.int32, is_pure=True, pack=2)


@gluon.jit
def _consumer(x_buf, w_buf, y_bufs, full, empty, sw_ptr, gx_ptr, gw_ptr, bias_ptr, y_desc, parts_ptr, tiles_m,
              tiles_n, steps, M, N, blocks, GROUP: gl.constexpr, SPLIT: gl.constexpr, BLOCK: gl.constexpr,
              RULE: gl.constexpr, HAS_GLOBAL: gl.constexpr, HAS_BIAS: gl.constexpr, BM: gl.constexpr,
              BN: gl.constexpr, STAGES: gl.constexpr, TILE_ROWS: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    words: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    y_buf = y_bufs.index(GROUP)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    REST: gl.constexpr = 128.0 if RULE == "e4m3_global" else 1.0
    for t in range(gl.program_id(0), tiles_m * tiles_n * SPLIT, gl.num_programs(0)):
        m, n, begin, end = _work(t, tiles_m, tiles_n, steps, SPLIT, TILE_ROWS)
        column = n * BN + GROUP * 64
        row = gl.minimum(column + gl.arange(0, 64, gl.SliceLayout(1, words)), N - 1)
        rows = (sw_ptr + row.to(gl.int64) * blocks)[:, None]
        stored = _scale_bytes(rows, begin, blocks, BLOCK, words)
        acc = gl.zeros((64, BM), gl.float32, layout)
        for s in range(begin, end):
            scales = paired_scales(stored, RULE)
            stored = _scale_bytes(rows, s + 1, blocks, BLOCK, words)
            mbarrier.wait(full.index(stage), phase)
            w = w_buf.index(stage + GROUP).load(words)
            for half in gl.static_range(2):
                if half:
                    mbarrier.wait(full.index(stage + half), phase)
                for i in gl.static_range(4):
                    a = decode_nibble(w, scales, RULE, half * 4 + i)
                    x = x_buf.index(stage + half).slice(i * 16, 16, 1).permute((1, 0))
                    acc = warpgroup_mma(a, x, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index(stage + half), count=1)
            stage += 2
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if SPLIT > 1:
            # parts [SPLIT, N, M]: as the sums lie in registers
            n_of = column + gl.arange(0, 64, gl.SliceLayout(1, layout))
            m_of = m * BM + gl.arange(0, BM, gl.SliceLayout(0, layout))
            at = ((t % SPLIT) * N + n_of).to(gl.int64)[:, None] * M + m_of[None, :]
            gl.store(parts_ptr + at, acc, mask=(n_of < N)[:, None] & (m_of < M)[None, :])
        else:
            g = gl.load(gx_ptr) * gl.load(gw_ptr) if HAS_GLOBAL else 1.0
            y = (acc * REST) * g
            if HAS_BIAS:
                n_of = column + gl.arange(0, 64, gl.SliceLayout(1, layout))
                y = y + gl.expand_dims(gl.load(bias_ptr + n_of, mask=n_of < N, other=0.0).to(gl.float32), 1)
            tma.store_wait(0)
            y_buf.store(gl.permute(y.to(y_desc.dtype), (1, 0)))
            fence_async_shared()
            tma.async_copy_shared_to_global(y_desc, [m * BM, column], y_buf)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def fp4_mm_hopper(
    x_desc, w_desc, y_desc, parts_ptr, sw_ptr, gx_ptr, gw_ptr, bias_ptr, M, N, K,
    SPLIT: gl.constexpr, BLOCK: gl.constexpr, RULE: gl.constexpr, HAS_GLOBAL: gl.constexpr, HAS_BIAS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, TILE_ROWS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    x_buf = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, 64], x_desc.layout)
    w_buf = gl.allocate_shared_memory(gl.int32, [STAGES, BN // 2, 16], w_desc.layout)
    y_buf = gl.allocate_shared_memory(y_desc.dtype, [2, BM, 64], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, 128)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize([
        (_consumer, (x_buf, w_buf, y_buf, full, empty, sw_ptr, gx_ptr, gw_ptr, bias_ptr, y_desc, parts_ptr,
                     tiles_m, tiles_n, steps, M, N, K // BLOCK, FIRST, SPLIT, BLOCK, RULE, HAS_GLOBAL, HAS_BIAS,
                     BM, BN, STAGES, TILE_ROWS, OVERLAP)),
        (_consumer, (x_buf, w_buf, y_buf, full, empty, sw_ptr, gx_ptr, gw_ptr, bias_ptr, y_desc, parts_ptr,
                     tiles_m, tiles_n, steps, M, N, K // BLOCK, SECOND, SPLIT, BLOCK, RULE, HAS_GLOBAL, HAS_BIAS,
                     BM, BN, STAGES, TILE_ROWS, OVERLAP)),
        (_producer, (x_desc, w_desc, x_buf, w_buf, full, empty, tiles_m, tiles_n, steps, SPLIT, BM, BN, STAGES,
                     TILE_ROWS, OVERLAP)),
    ], [4, 1], [232, 40])  # fmt: skip


@triton.jit
def add_parts_kernel(
    parts_ptr, gx_ptr, gw_ptr, bias_ptr, y_ptr, M, N,
    SPLIT: tl.constexpr, RULE: tl.constexpr, HAS_GLOBAL: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [M, N] of the sums of the slices of K, parts [SPLIT, N, M]."""
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = (column < N)[:, None] & (row < M)[None, :]
    at = column.to(tl.int64)[:, None] * M + row[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    acc = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLIT):
        acc += tl.load(parts_ptr + at + N.to(tl.int64) * M * split, mask=mask, other=0.0)
    y = acc * (128.0 if RULE == "e4m3_global" else 1.0)
    if HAS_GLOBAL:
        y = y * (tl.load(gx_ptr) * tl.load(gw_ptr))
    if HAS_BIAS:
        y = y + widen(tl.load(bias_ptr + column, mask=column < N, other=0.0))[:, None]
    y = tl.trans(narrow(y, y_ptr.dtype.element_ty))
    tl.store(y_ptr + row.to(tl.int64)[:, None] * N + column[None, :], y, mask=tl.trans(mask))


def config(format: Format, has_bias: bool, rows: int = 256, split: int = 1, overlap: bool = True) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`fp4_mm_hopper` for tiles of ``rows`` rows of x."""
    return {
        "SPLIT": split,
        "BLOCK": format.block,
        "RULE": format.scale.name,
        "HAS_GLOBAL": format.has_global_scale,
        "HAS_BIAS": has_bias,
        "BM": rows,
        "BN": BN,
        "STAGES": STAGES,
        "TILE_ROWS": TILE_ROWS,
        "OVERLAP": overlap,
        "num_warps": 4,
        **OPTIONS,
    }


def _matrix(t: Tensor, block: list[int], element: Any) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(t, block, gl.NVMMASharedLayout.get_default_for(block, element))


def split_of(tiles: int, programs: int, steps: int) -> int:
    """In how many slices of K the products are cut, so that few tiles keep all multiprocessors busy."""
    split = 1
    while split < 4 and tiles * split * 2 <= programs and steps >= 8 * split:
        split *= 2
    return split


def fp4_mm(
    x: Tensor, sx: Tensor, gx: Tensor | None, w: Tensor, sw: Tensor, gw: Tensor | None, bias: Tensor | None, y: Tensor,
    format: Format, tile: tuple[int, int], split: int = 0, programs: int = 0,
) -> None:  # fmt: skip
    """y [M, N] of contiguous packed x [M, K/2], w [N, K/2], K % 32 == 0, N % 8 == 0; ``tile`` is (16 … 256, 128).

    ``split`` overrides the slices of K, ``programs`` one a multiprocessor.
    """
    multiply(unpack(x, sx, format, by_nibble=True), gx, w, sw, gw, bias, y, format, tile[0], split, programs)


def multiply(
    x: Tensor, gx: Tensor | None, w: Tensor, sw: Tensor, gw: Tensor | None, bias: Tensor | None, y: Tensor,
    format: Format, rows: int = 256, split: int = 0, programs: int = 0,
) -> None:  # fmt: skip
    """y [M, N] of unpacked x and contiguous packed w [N, K/2]. ``programs`` overrides one a multiprocessor."""
    m, n, k = x.shape[0], w.shape[0], format.k_of(w.shape[1])
    tiles = triton.cdiv(m, rows) * triton.cdiv(n, BN)
    programs = programs or multiprocessors(x.device)
    split = split or split_of(tiles, programs, triton.cdiv(k, SPAN))
    out = gl.bfloat16 if y.dtype == torch.bfloat16 else gl.float16
    x_desc = _matrix(x, [rows, 64], gl.bfloat16)
    w_desc = _matrix(w.view(torch.int32), [BN // 2, SPAN // 8], gl.int32)
    y_desc = _matrix(y, [rows, BN // 2], out)
    parts = torch.empty(split, n, m, dtype=torch.float32, device=y.device) if split > 1 else y
    overlap = launches_overlap(y.device)
    has_bias, gx, gw, b = bias is not None, given(gx, sw), given(gw, sw), given(bias, y)
    with on(x.device):
        fp4_mm_hopper[(min(programs, tiles * split),)](
            x_desc, w_desc, y_desc, parts, sw, gx, gw, b, m, n, k, **config(format, has_bias, rows, split),
            launch_pdl=overlap,
        )  # fmt: skip
        if split > 1:
            bm = min(64, max(16, triton.next_power_of_2(m)))
            add_parts_kernel[(triton.cdiv(n, 32), triton.cdiv(m, bm))](
                parts, gx, gw, b, y, m, n, SPLIT=split, RULE=format.scale.name, HAS_GLOBAL=format.has_global_scale,
                HAS_BIAS=has_bias, BM=bm, BN=32, OVERLAP=overlap, num_warps=4, launch_pdl=overlap, **OPTIONS,
            )  # fmt: skip
