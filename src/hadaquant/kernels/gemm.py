"""Products of two quantized matrices: x [M, K] · w [N, K]ᵀ, scales and bias in the epilogue.

``int8_mm`` is exact: int32 sums, then ((acc · sx) · sw) + bias in float32, each step rounded.
``fp4_mm`` decodes code · block scale to bfloat16, which holds it exactly, and multiplies on the
bfloat16 units into float32, for hardware without FP4 units. Both take any M, N, K.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.kernels.numerics import decode_e2m1, decode_e4m3, decode_e8m0, narrow, widen
from hadaquant.kernels.runtime import (
    OPTIONS,
    addresses,
    aligned,
    by_address,
    given,
    launch,
    launches_overlap,
    multiprocessors,
    on,
    shared_bytes,
)


@triton.jit
def _tile_of(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr):
    """Rows and columns of this program's tile; GROUP_M tile rows at a time, for reuse in the L2 cache."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    width = GROUP_M * tiles_n
    first = (pid // width) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    m = first + (pid % width) % height
    n = (pid % width) // height
    return m.to(tl.int64) * BM + tl.arange(0, BM), n.to(tl.int64) * BN + tl.arange(0, BN)


@triton.jit
def int8_mm_kernel(
    x_ptr, sx_ptr, w_ptr, sw_ptr, bias_ptr, y_ptr, M, N, K,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    RAGGED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """RAGGED: the last tiles reach beyond M or N."""
    row, column = _tile_of(M, N, BM, BN, GROUP_M)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    k = tl.arange(0, BK)
    x_tile = x_ptr + row[:, None] * K + k[None, :]
    w_tile = w_ptr + column[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.int32)
    for start in range(0, K, BK):
        in_x, in_w = (k < K - start)[None, :], (k < K - start)[:, None]
        if RAGGED:
            in_x, in_w = in_x & (row < M)[:, None], in_w & (column < N)[None, :]
        x = tl.load(x_tile, mask=in_x, other=0)
        w = tl.load(w_tile, mask=in_w, other=0)
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
        x_tile += BK
        w_tile += BK
    sx = tl.load(sx_ptr + row, mask=row < M, other=0.0)
    sw = tl.load(sw_ptr + column, mask=column < N, other=0.0)
    y = (acc.to(tl.float32) * sx[:, None]) * sw[None, :]
    if HAS_BIAS:
        y = y + widen(tl.load(bias_ptr + column, mask=column < N, other=0.0))[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    tl.store(y_ptr + row[:, None] * N + column[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _decode_tile(
    codes_ptr, scales_ptr, row, rows, start, K,
    BR: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """[BR, BK] of code · block scale, in the dtype of the product."""
    byte = start // 2 + tl.arange(0, BK // 2)
    mask = (row < rows)[:, None] & (byte < K // 2)[None, :]
    packed = tl.load(codes_ptr + row[:, None] * (K // 2) + byte[None, :], mask=mask, other=0).to(tl.int32)
    values = tl.reshape(tl.join(decode_e2m1(packed & 15), decode_e2m1(packed >> 4)), (BR, BK // BLOCK, BLOCK))
    block = start // BLOCK + tl.arange(0, BK // BLOCK)
    mask = (row < rows)[:, None] & (block < K // BLOCK)[None, :]
    stored = tl.load(scales_ptr + row[:, None] * (K // BLOCK) + block[None, :], mask=mask, other=0).to(tl.int32)
    if RULE == "e4m3_global":
        scale = decode_e4m3(stored)
    else:
        scale = decode_e8m0(stored)
    return tl.reshape(values * scale[:, :, None], (BR, BK)).to(DOT)


@triton.jit
def fp4_mm_kernel(
    x_ptr, sx_ptr, gx_ptr, w_ptr, sw_ptr, gw_ptr, bias_ptr, y_ptr, M, N, K,
    BLOCK: tl.constexpr, RULE: tl.constexpr, HAS_GLOBAL: tl.constexpr, HAS_BIAS: tl.constexpr, DOT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    row, column = _tile_of(M, N, BM, BN, GROUP_M)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        x = _decode_tile(x_ptr, sx_ptr, row, M, start, K, BM, BK, BLOCK, RULE, DOT)
        w = _decode_tile(w_ptr, sw_ptr, column, N, start, K, BN, BK, BLOCK, RULE, DOT)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if HAS_GLOBAL:
        acc = acc * (tl.load(gx_ptr) * tl.load(gw_ptr))
    if HAS_BIAS:
        acc = acc + widen(tl.load(bias_ptr + column, mask=column < N, other=0.0))[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    tl.store(y_ptr + row[:, None] * N + column[None, :], narrow(acc, y_ptr.dtype.element_ty), mask=mask)


#: Depth and launch options of each tile of :func:`int8_mm_kernel`, within 99 KiB of shared memory.
_INT8_TILES: dict[tuple[int, int], dict[str, int]] = {
    (16, 32): {"BK": 256, "num_warps": 4, "num_stages": 4},
    (64, 32): {"BK": 256, "num_warps": 4, "num_stages": 4},
    (64, 64): {"BK": 128, "num_warps": 4, "num_stages": 5},
    (64, 128): {"BK": 128, "num_warps": 4, "num_stages": 4},
    (128, 128): {"BK": 64, "num_warps": 8, "num_stages": 4},
}


#: The same where a program has a multiprocessor for itself, which takes more shared memory than consumer cards have.
_ALONE_TILES, _ALONE_BYTES = {(64, 32): {"num_stages": 6}, (64, 64): {"BK": 256, "num_stages": 5}}, 160 * 1024


def int8_config(tile: tuple[int, int], ragged: bool, overlap: bool, alone: bool = False) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`int8_mm_kernel`. ``alone``: as :func:`runs_alone` says."""
    options = _INT8_TILES[tile] | (_ALONE_TILES.get(tile, {}) if alone else {})
    return {"BM": tile[0], "BN": tile[1], "GROUP_M": 8, "RAGGED": ragged, "OVERLAP": overlap, **options, **OPTIONS}


def runs_alone(programs: int, device: torch.device) -> bool:
    """Whether each program has a multiprocessor for itself, with room for more stages."""
    return programs <= multiprocessors(device) and shared_bytes(device) >= _ALONE_BYTES


def int8_programs(m: int, n: int, tile: tuple[int, int] | None, device: torch.device) -> tuple[int, dict[str, Any]]:
    """How many programs of :func:`int8_mm_kernel` make [M, N] on a device, and their compile-time arguments."""
    tile = tile or (128, 128)
    programs = triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1])
    ragged = bool(m % tile[0] or n % tile[1])
    return programs, int8_config(tile, ragged, launches_overlap(device), runs_alone(programs, device))


def fp4_config(m: int, format: Format) -> dict[str, Any]:
    """Tile and compile-time arguments of :func:`fp4_mm_kernel`."""
    rows = 16 if m <= 32 else 64
    return {
        "BLOCK": format.block,
        "RULE": format.scale.name,
        "HAS_GLOBAL": format.has_global_scale,
        "BM": rows,
        "BN": 64,
        "BK": 64,
        "GROUP_M": 8,
        "num_warps": 4,
        "num_stages": 2,
    }


def scaled_mm(
    x_codes: Tensor,
    x_scales: Tensor,
    x_global: Tensor | None,
    w_codes: Tensor,
    w_scales: Tensor,
    w_global: Tensor | None,
    format: Format,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    kernel: str,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """[M, N] as ``reference.scaled_mm``: int8 the same bits, FP4 but for the order of sums.

    ``kernel`` and ``tile`` are the plan's.
    """
    m, n, k = x_codes.shape[0], w_codes.shape[0], format.k_of(x_codes.shape[1])
    y = torch.empty(m, n, dtype=out_dtype, device=x_codes.device)
    x, sx, w, sw = (t.contiguous() for t in (x_codes, x_scales, w_codes, w_scales))
    bias = bias.contiguous() if bias is not None else None
    if format.block is None:
        from hadaquant.kernels.products_int8 import prepared

        product = prepared(kernel, (m, n, k), out_dtype, None if bias is None else bias.dtype, x.device, tile)
        operands = *(None if t is None else aligned(t) for t in (x, sx, w, sw, bias)), y
        with on(x.device):
            product(*(addresses(operands) if by_address(x.device) else operands))
    elif kernel != "fp4_mm":
        from hadaquant.kernels.gemm_fp4 import through_bfloat16
        from hadaquant.kernels.gemm_fp4_hopper import fp4_mm
        from hadaquant.kernels.gemm_fp4_small import gemv
        from hadaquant.kernels.gemm_fp4_values import value_rows

        x, sx, w, sw = (aligned(t) for t in (x, sx, w, sw))
        both = (x, sx, x_global, w, sw, w_global, bias, y, format)
        if kernel in ("fp4_gemv", "fp4_unpacked"):
            (gemv if kernel == "fp4_gemv" else through_bfloat16)(*both)
        else:
            of_tiles = {"fp4_value_rows": value_rows, "fp4_mm_hopper": fp4_mm}
            of_tiles[kernel](*both, tile or (256, 128))
    else:
        config = fp4_config(m, format)
        grid = (triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"]),)
        scales = given(x_global, x), w, sw, given(w_global, x), given(bias, x)
        # the interpreter's bfloat16 is not the hardware's; the values are exact in either
        dot = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
        config |= {"HAS_BIAS": bias is not None, "DOT": dot, **OPTIONS}
        launch(fp4_mm_kernel, grid, (x, sx, *scales, y, m, n, k), config)
    return y
