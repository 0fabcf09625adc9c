"""FP4 behind a front end, for NVIDIA: ``quantize_blocks_fast`` with an op on what it loads; twin of
``quantize_walk_kernel``.

A program walks a row, units in its threads: once or twice in registers for the sums, then unit by unit, which by now
come from the L1 cache, as do weights and modulations. Without sums a row may be of several programs. Norms and GELU
move 2.5625 bytes an element (nvfp4 from bfloat16), SiLU · up 4.5625; the roof of norms is their instructions.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.formats.spec import TILE_ROWS
from hadaquant.front import FrontEnd
from hadaquant.kernels import quantize_blocks_fast
from hadaquant.kernels.front import aligned_rows, operand, row_bytes
from hadaquant.kernels.front_units import constants as front_constants
from hadaquant.kernels.front_units import front_unit, load_unit, moments, units_of
from hadaquant.kernels.quantize import quantize_units
from hadaquant.kernels.quantize_blocks_fast import (
    TWIN_CHANNELS,
    config_of_units,
    converts_to_e4m3,
    store_scales,
    store_words,
)
from hadaquant.kernels.quotients import LARGEST_BITS, encoded, prepared
from hadaquant.kernels.runtime import Launch, addresses, given, launches_overlap, on
from hadaquant.kernels.units import rotate_unit, widen_words
from hadaquant.rotation import Rotation


@triton.jit
def _row_at(ptr, row, stride):
    """Where a row begins; its stride is in pieces of 16 bytes."""
    return ptr + row.to(tl.int64) * (stride * (128 // ptr.dtype.element_ty.primitive_bitwidth))


@triton.jit
def _load(x_row, factor_row, shift_row, unit, UNIT: tl.constexpr, FRONT: tl.constexpr):
    """Words of units of x, factor and shift, the latter as far as FRONT has them."""
    factor = ()
    shift = ()
    if FRONT[1]:
        factor = load_unit(factor_row, unit, UNIT)
    if FRONT[2]:
        shift = load_unit(shift_row, unit, UNIT)
    return load_unit(x_row, unit, UNIT), factor, shift


@triton.jit
def _place(row, unit, units_in_row, ACROSS: tl.constexpr, TILED: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Where a unit's scales lie, in units."""
    if TILED:
        tile = (row // TILE_ROWS).to(tl.int64) * tl.cdiv(units_in_row, ACROSS) + unit // ACROSS
        return (tile * TILE_ROWS + row % 32 * (TILE_ROWS // 32) + row % TILE_ROWS // 32) * ACROSS + unit % ACROSS
    else:
        return row.to(tl.int64) * units_in_row + unit


@triton.jit(
    do_not_specialize=["rows", "units_in_row", "x_stride", "factor_stride", "factor_rows", "shift_stride",
                       "shift_rows"],
    do_not_specialize_on_alignment=["global_ptr", "signs_ptr"],
)  # fmt: skip
def quantize_blocks_front_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    global_ptr,
    signs_ptr,
    factor_ptr,
    shift_ptr,
    rows,
    units_in_row,
    x_stride,
    factor_stride,
    factor_rows,
    shift_stride,
    shift_rows,
    N: tl.constexpr,
    EACH: tl.constexpr,
    ACROSS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    RULE: tl.constexpr,
    E4M3: tl.constexpr,
    TILED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    WHOLE: tl.constexpr,
    FEW: tl.constexpr,
    ROTATION: tl.constexpr,
    FRONT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes EACH steps of N units of its row, after one walk, or two, for the row's sums.

    Strides are in pieces of 16 bytes. In place of units beyond the row, or of rows of a tile beyond the last, others
    are done that another thread does too: to the same end, but for the scales, which are padding and 0.
    """
    if OVERLAP:
        # only then may the next kernel start, so that it finds all done that is ahead of this one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    SCALED: tl.constexpr = RULE == "e4m3_global"

    of_scales = tl.program_id(0)
    row = of_scales if WHOLE else tl.minimum(of_scales, rows - 1)
    first = tl.program_id(1) * (EACH * N)
    x_row = _row_at(x_ptr, row, x_stride)
    factor_row = _row_at(factor_ptr, row // factor_rows, factor_stride)
    shift_row = _row_at(shift_ptr, row // shift_rows, shift_stride)
    mean, inverse = moments(x_row, units_in_row, N, EACH, UNIT, WHOLE, FRONT)
    g = 1.0
    scale = ()
    worst = tl.zeros((N,), tl.int32)
    if SCALED:
        g = tl.load(global_ptr)
        scale, unfit = prepared(g, 1.0)
        worst += unfit
    words = _load(x_row, factor_row, shift_row, units_of(first, units_in_row, N, WHOLE), UNIT, FRONT)
    for i in range(EACH):
        unit = units_of(first + i * N, units_in_row, N, WHOLE)
        now = words
        words = _load(
            x_row, factor_row, shift_row, units_of(first + tl.minimum(i + 1, EACH - 1) * N, units_in_row, N, WHOLE),
            UNIT, FRONT,
        )  # fmt: skip
        v = widen_words(now[0], x_ptr.dtype.element_ty)
        factor = widen_words(now[1], factor_ptr.dtype.element_ty)
        shift = widen_words(now[2], shift_ptr.dtype.element_ty)
        v = front_unit(v, mean, inverse, factor, shift, FRONT)
        v = rotate_unit(v, signs_ptr, ROTATION, True)
        codes, stored, worst = encoded(v, scale, worst, 1.0, BLOCK, RULE, E4M3)
        store_words(codes_ptr, row.to(tl.int64) * units_in_row + unit, codes)
        place = first + i * N + tl.arange(0, N)
        if not WHOLE:
            place = tl.minimum(place, tl.cdiv(units_in_row, ACROSS) * ACROSS - 1 if TILED else units_in_row - 1)
        real = (of_scales < rows) & (place < units_in_row)
        place = _place(of_scales, place, units_in_row, ACROSS, TILED, TILE_ROWS)
        store_scales(scales_ptr, place, stored, real, WHOLE)
    if SCALED:  # noqa: SIM102 - known to the compiler, then to the program
        if tl.max(worst) > LARGEST_BITS:
            _again(x_row, factor_row, shift_row, mean, inverse, codes_ptr, scales_ptr, g, signs_ptr, row, first,
                   units_in_row, N, EACH, UNIT, BLOCK, RULE, TILED, TILE_ROWS, TILE_COLS, WHOLE, FEW, ROTATION,
                   FRONT)  # fmt: skip


@triton.jit
def _again(x_row, factor_row, shift_row, mean, inverse, codes_ptr, scales_ptr, g, signs_ptr, row, first, units_in_row,
           N: tl.constexpr, EACH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr,
           TILED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, WHOLE: tl.constexpr,
           FEW: tl.constexpr, ROTATION: tl.constexpr, FRONT: tl.constexpr):  # fmt: skip
    """A program's units by the twin, FEW at a time."""
    tl.debug_barrier()  # the twin's threads own other channels
    of_row = tl.zeros((FEW,), tl.float32)
    start = row.to(tl.int64) * units_in_row
    for part in range(EACH * N // FEW):
        unit = units_of(first + part * FEW, units_in_row, FEW, WHOLE)
        column = unit * UNIT
        pieces = column, factor_row, column, shift_row, column, mean + of_row, inverse + of_row
        quantize_units(
            x_row, pieces, codes_ptr, scales_ptr, g, signs_ptr, signs_ptr, start + unit, start + units_in_row,
            units_in_row * (UNIT // BLOCK),
            FEW, UNIT, BLOCK, "e2m1", RULE, TILED, TILE_ROWS, TILE_COLS, ROTATION, FRONT,
        )  # fmt: skip


#: Channels of a thread where a norm's rows are many, half as many in float32: all wait in registers for the sums.
CHANNELS = 128
#: Below as many rows a norm has more warps than each row needs, up to as many.
FEW_ROWS, MOST_WARPS = 512, 16


def tiling(
    format: Format, rotation: Rotation, front_end: FrontEnd, dtype: torch.dtype, m: int, k: int, tiled: bool
) -> dict[str, int | bool]:
    """Compile-time arguments that depend on the size of x [M, K]."""
    tiles = quantize_blocks_fast.tiling(format, rotation, m, k, tiled)
    unit, threads = int(tiles["UNIT"]), int(tiles["N"])
    in_row = k // unit
    each = min(int(tiles["EACH"]), triton.cdiv(in_row, threads))
    if front_end.sums:
        most = max(1, CHANNELS * 2 // dtype.itemsize // unit) if m >= FEW_ROWS else 1
        threads = min(max(32, triton.next_power_of_2(triton.cdiv(in_row, most))), 32 * MOST_WARPS)
        each = triton.cdiv(in_row, threads)
    whole = in_row % (threads * each) == 0 and not (tiled and (m % TILE_ROWS or in_row % tiles["ACROSS"]))
    return {**tiles, "N": threads, "EACH": each, "WHOLE": whole}


def config(
    format: Format,
    rotation: Rotation,
    front_end: FrontEnd,
    native_e4m3: bool,
    tiles: dict[str, int | bool],
    overlap: bool = False,
) -> dict[str, Any]:
    """Compile-time arguments and launch options, ``tiles`` from :func:`tiling`.

    ``overlap``: launches may start before the last one has ended.
    """
    return {
        **config_of_units(format, rotation, native_e4m3, tiles, overlap),
        "FEW": max(1, tiles["N"] // 32 * TWIN_CHANNELS // tiles["UNIT"]),
        "FRONT": front_constants(front_end, tiles["UNIT"], tiles["N"], tiles["EACH"]),
    }


def grid(tiles: dict[str, int | bool], m: int, k: int) -> tuple[int, int, int]:
    """Programs for all rows of x [M, K], with those that fill a tile."""
    rows = triton.cdiv(m, TILE_ROWS) * TILE_ROWS if tiles["TILED"] else m
    return rows, triton.cdiv(k // tiles["UNIT"], tiles["N"] * tiles["EACH"]), 1


#: Bytes of a piece in which strides are counted.
PIECE = 16


def arguments(
    x: Tensor, codes: Tensor, scales: Tensor, rotation: Rotation, global_scale: Tensor | None, front_end: FrontEnd,
    unit: int,
) -> tuple[Any, ...]:  # fmt: skip
    """The kernel's run-time arguments for x [M, K]."""
    m, k = x.shape
    x = aligned_rows(x, PIECE)
    tensors, sizes = [], []
    for t in front_end.tensors:
        rows, _, each = operand(t, x)
        rows = aligned_rows(rows, PIECE)
        tensors.append(rows)
        sizes += [row_bytes(rows) // PIECE, each]
    signs = given(rotation.signs, x)
    return x, codes, scales, given(global_scale, x), signs, *tensors, m, k // unit, row_bytes(x) // PIECE, *sizes


def quantize_blocks_front(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    format: Format,
    rotation: Rotation,
    front_end: FrontEnd,
    global_scale: Tensor | None,
    scale_layout: str,
) -> None:
    """Fill codes and scales, padding of tiled ones included, of x [M, K]."""
    m, k = x.shape
    tiles = tiling(format, rotation, front_end, x.dtype, m, k, scale_layout == "tiled")
    run_time = arguments(x, codes, scales, rotation, global_scale, front_end, int(tiles["UNIT"]))
    dtypes = tuple(t.dtype for t in (run_time[0], *run_time[5:7]))
    described = rotation.kind, rotation.group, rotation.signs is not None, front_end.spec, front_end.factor is None
    key = (x.device.index, *dtypes, format.name, *described, *tiles.values())
    with on(x.device):
        launch = _launches.get(key)
        if launch is None:
            overlap = launches_overlap(x.device)
            compiled = config(format, rotation, front_end, converts_to_e4m3(x.device), tiles, overlap)
            launch = _launches[key] = Launch(quantize_blocks_front_kernel, run_time, compiled, x.device)
        launch(grid(tiles, m, k), *addresses(run_time))


_launches: dict[tuple[object, ...], Launch] = {}
