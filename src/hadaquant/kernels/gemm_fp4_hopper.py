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
from hadaquant.kernels.gemm_fp4 import unpack_words
from hadaquant.kernels.gemm_fp4_parts import add_parts
from hadaquant.kernels.gemm_int8_hopper import tile_of
from hadaquant.kernels.runtime import OPTIONS, given, launch, launches_overlap, multiprocessors
from hadaquant.kernels.tma import Base, matrix
from hadaquant.layout import NIBBLE_SPAN

BN = 128
#: Stages of 64 columns for each number of x rows in a tile, as many as shared memory holds, and how many spans of
#: 128 columns ahead of their use block scales are read: few rows leave little work to hide memory's latency.
STAGES = {16: 32, 32: 24, 64: 16, 128: 8, 256: 4}
AHEAD = {16: 4, 32: 4, 64: 4, 128: 2, 256: 1}
#: Rows of tiles that are walked together, for reuse in the L2 cache.
TILE_ROWS = 8
#: Of a tile's time, what half of its rows take.
HALF_TILE = 0.6


@gluon.constexpr_function
def _load_asm():
    return "ld.global.nc.u8 $0, [$2]; mov.b32 $1, $0; // $3"


@gluon.jit
def _work(u, base, tiles_m, tiles_n, steps, SPLIT: gl.constexpr, CUT: gl.constexpr, BM: gl.constexpr,
          TILE_ROWS: gl.constexpr):  # fmt: skip
    """Of item u: first row of x, tile of w, slice of K, spans of the slice. Tiles are counted from ``base``."""
    m, n = tile_of(base + u // (SPLIT * CUT), tiles_m, tiles_n, TILE_ROWS)
    part = u % (SPLIT * CUT)
    each = gl.cdiv(steps, SPLIT)
    begin = gl.minimum(part // CUT * each, steps)
    return m * BM + part % CUT * (BM // CUT), n, part // CUT, begin, gl.minimum(begin + each, steps)


@gluon.jit
def _fetch_weights(w_desc, w_buf, full, stage, n, s, ROWS: gl.constexpr, BN: gl.constexpr):
    """A span's words to where the stage's two warpgroups look; the stage will hold 64 columns of x, too."""
    mbarrier.expect(full.index(stage), ROWS * 128 + BN * 64)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(
            w_desc, [n * BN + half * 64, s * 16], full.index(stage), w_buf.index(stage + half)
        )


@gluon.jit
def _produce(begin, end, base, stage, phase, x_desc, w_desc, x_buf, w_buf, full, empty, tiles_m, tiles_n, steps,
             SPLIT: gl.constexpr, CUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
             TILE_ROWS: gl.constexpr, AT_REST: gl.constexpr):  # fmt: skip
    ROWS: gl.constexpr = BM // CUT
    fetched = gl.to_tensor(0)
    if AT_REST:
        # the first item's weights fill the ring before x is there
        if begin < end:
            _, n, _, first, last = _work(begin, base, tiles_m, tiles_n, steps, SPLIT, CUT, BM, TILE_ROWS)
            fetched = gl.minimum(last - first, STAGES // 2)
            for s in range(fetched):
                _fetch_weights(w_desc, w_buf, full, s * 2, n, first + s, ROWS, BN)
        gdc_wait()
    for u in range(begin, end, gl.num_programs(0)):
        row, n, _, first, last = _work(u, base, tiles_m, tiles_n, steps, SPLIT, CUT, BM, TILE_ROWS)
        for s in range(first, last):
            if fetched > 0:
                fetched -= 1
            else:
                mbarrier.wait(empty.index(stage), phase)
                _fetch_weights(w_desc, w_buf, full, stage, n, s, ROWS, BN)
            for half in gl.static_range(2):
                if half:
                    mbarrier.wait(empty.index(stage + half), phase)
                    mbarrier.expect(full.index(stage + half), ROWS * 128)
                x = x_buf.index(stage + half)
                if CUT > 1:
                    x = x.slice(0, ROWS, 0)
                tma.async_copy_global_to_shared(x_desc, [row, s * 128 + half * 64], full.index(stage + half), x)
            stage += 2
            if stage == STAGES:
                stage = 0
                phase ^= 1
    return stage, phase


@gluon.jit
def _producer(x_desc, x_cut_desc, w_desc, x_buf, w_buf, full, empty, tiles_m, tiles_n, steps, whole,
              SPLIT: gl.constexpr, CUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
              TILE_ROWS: gl.constexpr, AT_REST: gl.constexpr):  # fmt: skip
    stage, phase = _produce(
        gl.program_id(0), whole * SPLIT, 0, gl.to_tensor(0), gl.to_tensor(1), x_desc, w_desc, x_buf, w_buf, full,
        empty, tiles_m, tiles_n, steps, SPLIT, 1, BM, BN, STAGES, TILE_ROWS, AT_REST,
    )  # fmt: skip
    if CUT > 1:
        _produce(
            gl.program_id(0), (tiles_m * tiles_n - whole) * CUT, whole, stage, phase, x_cut_desc, w_desc, x_buf,
            w_buf, full, empty, tiles_m, tiles_n, steps, 1, CUT, BM, BN, STAGES, TILE_ROWS, False,
        )  # fmt: skip


@gluon.jit
def _scale_bytes(rows, s, blocks, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Scale bytes of a span's 16 words, each word's own."""
    word = gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]
    block = gl.minimum(s * (128 // BLOCK) + word * 8 // BLOCK, blocks - 1)
    return gl.inline_asm_elementwise(_load_asm(), "=r,=r,l,l", [rows + block], dtype=gl.int32, is_pure=True, pack=2)


@gluon.jit
def _consume(begin, end, base, stage, phase, x_buf, w_buf, y_buf, full, empty, sw_ptr, gx_ptr, gw_ptr, bias_ptr,
             y_desc, parts_ptr, tiles_m, tiles_n, steps, M, N, blocks, GROUP: gl.constexpr, SPLIT: gl.constexpr,
             CUT: gl.constexpr, BLOCK: gl.constexpr, RULE: gl.constexpr, HAS_GLOBAL: gl.constexpr,
             HAS_BIAS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
             TILE_ROWS: gl.constexpr, AT_REST: gl.constexpr):  # fmt: skip
    ROWS: gl.constexpr = BM // CUT
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    words: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    REST: gl.constexpr = 128.0 if RULE == "e4m3_global" else 1.0
    for u in range(begin, end, gl.num_programs(0)):
        first_row, n, part, first, last = _work(u, base, tiles_m, tiles_n, steps, SPLIT, CUT, BM, TILE_ROWS)
        column = n * BN + GROUP * 64
        row = gl.minimum(column + gl.arange(0, 64, gl.SliceLayout(1, words)), N - 1)
        rows = (sw_ptr + row.to(gl.int64) * blocks)[:, None]
        stored = ()
        for i in gl.static_range(AHEAD):
            stored = stored + (_scale_bytes(rows, first + i, blocks, BLOCK, words),)
        acc = gl.zeros((64, ROWS), gl.float32, layout)
        for s in range(first, last):
            scales = paired_scales(stored[0], RULE)
            stored = stored[1:] + (_scale_bytes(rows, s + AHEAD, blocks, BLOCK, words),)
            mbarrier.wait(full.index(stage), phase)
            w = w_buf.index(stage + GROUP).load(words)
            for half in gl.static_range(2):
                if half:
                    mbarrier.wait(full.index(stage + half), phase)
                for i in gl.static_range(4):
                    a = decode_nibble(w, scales, RULE, half * 4 + i)
                    x = x_buf.index(stage + half)
                    if CUT > 1:
                        x = x.slice(0, ROWS, 0)
                    acc = warpgroup_mma(a, x.slice(i * 16, 16, 1).permute((1, 0)), acc, is_async=True)
                # with few rows of x a wait costs more than a stage that comes back late
                if BM > 64 or half:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    if BM <= 64:
                        mbarrier.arrive(empty.index(stage), count=1)
                    mbarrier.arrive(empty.index(stage + half), count=1)
            stage += 2
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if AT_REST:  # x was waited for by the producer only
            gdc_wait()
        n_of = column + gl.arange(0, 64, gl.SliceLayout(1, layout))
        if SPLIT > 1:
            # parts [SPLIT, N, M]: as the sums lie in registers
            m_of = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
            at = (part * N + n_of).to(gl.int64)[:, None] * M + m_of[None, :]
            gl.store(parts_ptr + at, acc, mask=(n_of < N)[:, None] & (m_of < M)[None, :])
        else:
            g = gl.load(gx_ptr) * gl.load(gw_ptr) if HAS_GLOBAL else 1.0
            y = (acc * REST) * g
            if HAS_BIAS:
                y = y + gl.expand_dims(gl.load(bias_ptr + n_of, mask=n_of < N, other=0.0).to(gl.float32), 1)
            tma.store_wait(0)
            staged = y_buf
            if CUT > 1:
                staged = y_buf.slice(0, ROWS, 0)
            staged.store(gl.permute(y.to(y_desc.dtype), (1, 0)))
            fence_async_shared()
            tma.async_copy_shared_to_global(y_desc, [first_row, column], staged)
    return stage, phase


@gluon.jit
def _consumer(x_buf, w_buf, y_bufs, full, empty, sw_ptr, gx_ptr, gw_ptr, bias_ptr, y_desc, y_cut_desc, parts_ptr,
              tiles_m, tiles_n, steps, whole, M, N, blocks, GROUP: gl.constexpr, SPLIT: gl.constexpr,
              CUT: gl.constexpr, BLOCK: gl.constexpr, RULE: gl.constexpr, HAS_GLOBAL: gl.constexpr,
              HAS_BIAS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
              TILE_ROWS: gl.constexpr, AT_REST: gl.constexpr):  # fmt: skip
    y_buf = y_bufs.index(GROUP)
    stage, phase = _consume(
        gl.program_id(0), whole * SPLIT, 0, gl.to_tensor(0), gl.to_tensor(0), x_buf, w_buf, y_buf, full, empty,
        sw_ptr, gx_ptr, gw_ptr, bias_ptr, y_desc, parts_ptr, tiles_m, tiles_n, steps, M, N, blocks, GROUP, SPLIT, 1,
        BLOCK, RULE, HAS_GLOBAL, HAS_BIAS, BM, BN, STAGES, AHEAD, TILE_ROWS, AT_REST,
    )  # fmt: skip
    if CUT > 1:
        _consume(
            gl.program_id(0), (tiles_m * tiles_n - whole) * CUT, whole, stage, phase, x_buf, w_buf, y_buf, full,
            empty, sw_ptr, gx_ptr, gw_ptr, bias_ptr, y_cut_desc, parts_ptr, tiles_m, tiles_n, steps, M, N, blocks,
            GROUP, 1, CUT, BLOCK, RULE, HAS_GLOBAL, HAS_BIAS, BM, BN, STAGES, AHEAD, TILE_ROWS, AT_REST,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def fp4_mm_hopper(
    x_desc, x_cut_desc, w_desc, y_desc, y_cut_desc, parts_ptr, sw_ptr, gx_ptr, gw_ptr, bias_ptr, M, N, K,
    SPLIT: gl.constexpr, CUT: gl.constexpr, BLOCK: gl.constexpr, RULE: gl.constexpr, HAS_GLOBAL: gl.constexpr,
    HAS_BIAS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    TILE_ROWS: gl.constexpr, OVERLAP: gl.constexpr, AT_REST: gl.constexpr,
):  # fmt: skip
    if CUT == 1:  # a descriptor costs the host some microseconds a launch: one that is not used is not given
        x_cut_desc = x_desc
        y_cut_desc = y_desc
    x_buf = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, 64], x_desc.layout)
    w_buf = gl.allocate_shared_memory(gl.int32, [STAGES, BN // 2, 16], w_desc.layout)
    y_buf = gl.allocate_shared_memory(y_desc.dtype, [2, BM, 64], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    if OVERLAP:
        # the adding of slices may start at once; any other kernel's programs would be placed unevenly
        if SPLIT > 1:
            gdc_launch_dependents()
        if not AT_REST:
            gdc_wait()
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, 128)
    whole = tiles_m * tiles_n
    if CUT > 1:
        whole = whole // gl.num_programs(0) * gl.num_programs(0)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize([
        (_consumer, (x_buf, w_buf, y_buf, full, empty, sw_ptr, gx_ptr, gw_ptr, bias_ptr, y_desc, y_cut_desc, parts_ptr,
                     tiles_m, tiles_n, steps, whole, M, N, K // BLOCK, FIRST, SPLIT, CUT, BLOCK, RULE, HAS_GLOBAL,
                     HAS_BIAS, BM, BN, STAGES, AHEAD, TILE_ROWS, AT_REST)),
        (_consumer, (x_buf, w_buf, y_buf, full, empty, sw_ptr, gx_ptr, gw_ptr, bias_ptr, y_desc, y_cut_desc, parts_ptr,
                     tiles_m, tiles_n, steps, whole, M, N, K // BLOCK, SECOND, SPLIT, CUT, BLOCK, RULE, HAS_GLOBAL,
                     HAS_BIAS, BM, BN, STAGES, AHEAD, TILE_ROWS, AT_REST)),
        (_producer, (x_desc, x_cut_desc, w_desc, x_buf, w_buf, full, empty, tiles_m, tiles_n, steps, whole, SPLIT, CUT,
                     BM, BN, STAGES, TILE_ROWS, AT_REST)),
    ], [4, 1], [232, 40])  # fmt: skip


def config(
    format: Format, has_bias: bool, shares: tuple[int, int, int], overlap: bool = True, at_rest: bool = False
) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`fp4_mm_hopper`.

    ``shares``: rows of x in a tile, slices of K, parts of the last tiles. ``at_rest``: the kernel ahead does not
    write the weights, and all before that one are done.
    """
    rows, split, cut = shares
    return {
        "SPLIT": split,
        "CUT": cut,
        "BLOCK": format.block,
        "RULE": format.scale.name,
        "HAS_GLOBAL": format.has_global_scale,
        "HAS_BIAS": has_bias,
        "BM": rows,
        "BN": BN,
        "STAGES": STAGES[rows],
        "AHEAD": AHEAD[rows],
        "TILE_ROWS": TILE_ROWS,
        "OVERLAP": overlap,
        "AT_REST": overlap and at_rest,
        "num_warps": 4,
        **OPTIONS,
    }


def descriptors(
    x: Base, w: Base, y: Base, shape: tuple[int, int, int], rows: int, cut: int
) -> tuple[TensorDescriptor | None, ...]:
    """The kernel's descriptors in its order: of tensors, or of addresses that are set later. w is of int32 words."""
    m, n, k = shape
    width = triton.cdiv(k, NIBBLE_SPAN) * NIBBLE_SPAN
    out = gl.bfloat16 if y.dtype == torch.bfloat16 else gl.float16
    return (
        matrix(x, m, width, [rows, 64], gl.bfloat16),
        matrix(x, m, width, [rows // cut, 64], gl.bfloat16) if cut > 1 else None,
        matrix(w, n, k // 8, [BN // 2, NIBBLE_SPAN // 8], gl.int32),
        matrix(y, m, n, [rows, BN // 2], out),
        matrix(y, m, n, [rows // cut, BN // 2], out) if cut > 1 else None,
    )


def shares_of(shape: tuple[int, int, int], rows: int, programs: int) -> tuple[int, int, int]:
    """Rows of x in a tile, in how many slices K is cut, in how many parts the tiles of the last wave are.

    Few tiles are sliced so that all multiprocessors have work, and of many the last ones cut so that all end together.
    """
    m, n, k = shape
    tiles, steps = triton.cdiv(m, rows) * triton.cdiv(n, BN), triton.cdiv(k, NIBBLE_SPAN)
    split = 1
    while split < 4 and tiles * split * 2 <= programs and steps >= 8 * split:
        split *= 2
    rest = tiles % programs
    cut = 2 if rows >= 128 and tiles > programs and rest and HALF_TILE * triton.cdiv(2 * rest, programs) < 1 else 1
    return rows, split, cut


def programs_of(shape: tuple[int, int, int], shares: tuple[int, int, int], programs: int) -> int:
    """How many programs share the tiles."""
    return min(programs, triton.cdiv(shape[0], shares[0]) * triton.cdiv(shape[1], BN) * shares[1])


def fp4_mm(
    x: Tensor, sx: Tensor, gx: Tensor | None, w: Tensor, sw: Tensor, gw: Tensor | None, bias: Tensor | None, y: Tensor,
    format: Format, tile: tuple[int, int],
) -> None:  # fmt: skip
    """y [M, N] of contiguous packed x [M, K/2], w [N, K/2], K % 32 == 0, N % 8 == 0; ``tile`` is (16 … 256, 128)."""
    multiply(unpack_words(x, sx, format, by_nibble=True), gx, w, sw, gw, bias, y, format, tile[0])


def multiply(
    x: Tensor, gx: Tensor | None, w: Tensor, sw: Tensor, gw: Tensor | None, bias: Tensor | None, y: Tensor,
    format: Format, rows: int = 256, shares: tuple[int, int, int] | None = None, programs: int = 0,
    at_rest: bool = False,
) -> None:  # fmt: skip
    """y [M, N] of unpacked x and contiguous packed w [N, K/2].

    ``shares`` overrides :func:`shares_of`, ``programs`` one a multiprocessor; ``at_rest`` as :func:`config` has it.
    """
    shape = m, n, _ = x.shape[0], w.shape[0], format.k_of(w.shape[1])
    programs = programs or multiprocessors(x.device)
    shares = shares or shares_of(shape, rows, programs)
    rows, split, cut = shares
    parts = torch.empty(split, n, m, dtype=torch.float32, device=y.device) if split > 1 else y
    overlap, has_bias = launches_overlap(y.device), bias is not None
    scales = given(gx, sw), given(gw, sw), given(bias, y)
    arguments = (*descriptors(x, w.view(torch.int32), y, shape, rows, cut), parts, sw, *scales, *shape)
    constants = config(format, has_bias, shares, overlap, at_rest) | {"launch_pdl": overlap}
    launch(fp4_mm_hopper, (programs_of(shape, shares, programs),), arguments, constants)
    if split > 1:
        add_parts(parts, *scales, y, format, has_bias)
