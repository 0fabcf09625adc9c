"""FP4 rotate -> scale -> encode -> pack at memory speed, for NVIDIA; twin of ``quantize_blocks_kernel``.

A thread owns units, a unit being a block or a group of channels, whichever is larger: nothing crosses threads.
2.5625 bytes an element move (nvfp4 from bfloat16) and device memory is the roof, provided that instructions are
few: at the speed of a copy an H200 has twenty for each element. Hence ``quotients``.

What that does not hold for is done again by the twin's own steps.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.formats.spec import TILE_COLS, TILE_ROWS
from hadaquant.front import NONE
from hadaquant.kernels.front import constants as front_constants
from hadaquant.kernels.hadamard import constants
from hadaquant.kernels.numerics import global_scale_of
from hadaquant.kernels.quantize import quantize_units
from hadaquant.kernels.quotients import LARGEST_BITS, encoded, prepared
from hadaquant.kernels.runtime import OPTIONS, Launch, addresses, given, launches_overlap, on
from hadaquant.kernels.units import load_words, rotate_unit, widen_words
from hadaquant.rotation import Rotation


@triton.jit
def _wide(low, high):
    """Two 32-bit integers -> one of 64 bits."""
    return low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def store_words(codes_ptr, unit, words):
    """A unit's words, 16 bytes a store where it has as many."""
    where = codes_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + unit * (len(words) // 2)
    if len(words) == 2:
        tl.store(where, _wide(words[0], words[1]))
    else:
        two = tl.arange(0, 2)
        for i in tl.static_range(0, len(words), 4):
            both = tl.join(_wide(words[i], words[i + 1]), _wide(words[i + 2], words[i + 3]))
            tl.store(where[:, None] + (i // 2 + two)[None, :], both)


@triton.jit
def store_scales(scales_ptr, place, stored, real, WHOLE: tl.constexpr):
    """A unit's one, two or four scale bytes as one integer; zeros where the unit is padding of a tile."""
    BYTES: tl.constexpr = len(stored)
    DTYPE: tl.constexpr = tl.uint8 if BYTES == 1 else tl.uint16 if BYTES == 2 else tl.uint32
    word = stored[0]
    for i in tl.static_range(1, BYTES):
        word = word | (stored[i] << (8 * i))
    if not WHOLE:
        word = tl.where(real, word, 0)
    tl.store(scales_ptr.to(tl.pointer_type(DTYPE), bitcast=True) + place, word.to(DTYPE))


@triton.jit
def _owned(first, skip, units, rows, units_in_row, N: tl.constexpr, ACROSS: tl.constexpr, TILED: tl.constexpr,
           WHOLE: tl.constexpr):  # fmt: skip
    """int64 [N]: of a program's units those from ``skip`` on, the places of their scales, whether they exist.

    In place of padding units are done that another thread does too: to the same end.
    """
    n = skip + tl.arange(0, N)
    if TILED:  # programs walk along 128 rows, a tile after another, in the order of their scales
        tile = (first.to(tl.uint32) // (128 * ACROSS)).to(tl.int32)
        n += (first.to(tl.uint32) % (128 * ACROSS)).to(tl.int32)
        row = tl.program_id(1) * 128 + n // ACROSS % 4 * 32 + n // (4 * ACROSS)
        column = tile * ACROSS + n % ACROSS
        place = (tl.program_id(1) * tl.cdiv(units_in_row, ACROSS) + tile) * (128 * ACROSS) + n
        real = (row < rows) & (column < units_in_row)
        if not WHOLE:
            row = tl.minimum(row, rows - 1)
            column = tl.minimum(column, units_in_row - 1)
        return (row * units_in_row + column).to(tl.int64), place.to(tl.int64), real
    else:
        unit = first.to(tl.int64) + tl.arange(0, N) + skip  # in this order only the last sum is another for each skip
        if not WHOLE:
            unit = tl.minimum(unit, units - 1)
        return unit, unit, n >= 0


#: Floats between the largest magnitude and the global scale that is made of it.
CELL = tl.constexpr(4)


@triton.jit
def opened(global_ptr, DYNAMIC: tl.constexpr):
    """The global scale; if DYNAMIC, made of the largest magnitude that lies there, and left CELL floats further on."""
    g = tl.load(global_ptr)
    if DYNAMIC:
        g = global_scale_of(g)
        if tl.program_id(0) == 0:
            tl.store(global_ptr + CELL, g)
    return g


@triton.jit(
    do_not_specialize=["units", "rows", "units_in_row"],
    do_not_specialize_on_alignment=["global_ptr", "signs_ptr"],
)
def quantize_blocks_fast_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    global_ptr,
    signs_ptr,
    units,
    rows,
    units_in_row,
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
    DYNAMIC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes EACH steps of N units. It loads all of them before it works on the first."""
    if OVERLAP:
        # only then may the next kernel start, so that it finds all done that is ahead of this one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SCALED: tl.constexpr = RULE == "e4m3_global"
    WORDS: tl.constexpr = UNIT * DTYPE.primitive_bitwidth // 64
    # sums of 16-bit floats are multiples of 2^-133, so that a norm of 1/2 to 1/8 is exact and may wait
    WAITS: tl.constexpr = DTYPE.primitive_bitwidth == 16 and 8 % (1 / ROTATION[3]) == 0
    NORM: tl.constexpr = ROTATION[3] if WAITS else 1.0

    # the last units first: whoever read x before, for its largest magnitude, left its end in the cache
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * (EACH * N)
    if WHOLE and not TILED:
        first = tl.minimum(first, units - EACH * N)  # the last program steps back to be whole
    words = ()
    for i in tl.static_range(EACH):
        unit, _, _ = _owned(first, i * N, units, rows, units_in_row, N, ACROSS, TILED, WHOLE)
        where = x_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + unit * WORDS
        words = words + load_words(where, WORDS)

    g = 1.0
    scale = ()
    worst = tl.zeros((N,), tl.int32)
    if SCALED:
        g = opened(global_ptr, DYNAMIC)
        scale, unfit = prepared(g, NORM)
        worst += unfit
    for i in tl.static_range(EACH):
        v = widen_words(words[i * WORDS : (i + 1) * WORDS], DTYPE)
        v = rotate_unit(v, signs_ptr, ROTATION, not WAITS)
        codes, stored, worst = encoded(v, scale, worst, NORM, BLOCK, RULE, E4M3)
        unit, place, real = _owned(first, i * N, units, rows, units_in_row, N, ACROSS, TILED, WHOLE)
        store_words(codes_ptr, unit, codes)
        store_scales(scales_ptr, place, stored, real, WHOLE)
    if SCALED:  # noqa: SIM102 - known to the compiler, then to the program
        if tl.max(worst) > LARGEST_BITS:
            _again(x_ptr, codes_ptr, scales_ptr, g, signs_ptr, first, units, rows, units_in_row, N, EACH, ACROSS, UNIT,
                   BLOCK, RULE, TILED, TILE_ROWS, TILE_COLS, WHOLE, FEW, ROTATION, FRONT)  # fmt: skip


@triton.jit
def _again(x_ptr, codes_ptr, scales_ptr, g, signs_ptr, first, units, rows, units_in_row, N: tl.constexpr,
           EACH: tl.constexpr, ACROSS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr,
           TILED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, WHOLE: tl.constexpr,
           FEW: tl.constexpr, ROTATION: tl.constexpr, FRONT: tl.constexpr):  # fmt: skip
    """A program's units by the twin, FEW at a time."""
    tl.debug_barrier()  # the twin's threads own other channels
    for part in range(EACH * N // FEW):
        unit, _, _ = _owned(first, part * FEW, units, rows, units_in_row, FEW, ACROSS, TILED, WHOLE)
        blocks_in_row = units_in_row * (UNIT // BLOCK)
        quantize_units(
            x_ptr, (unit * UNIT,), codes_ptr, scales_ptr, g, signs_ptr, signs_ptr, unit, units, blocks_in_row,
            FEW, UNIT, BLOCK, "e2m1", RULE, TILED, TILE_ROWS, TILE_COLS, ROTATION, FRONT,
        )  # fmt: skip


#: Warps of a program, and channels of a thread: as much on its way to each thread as registers allow.
WARPS, CHANNELS = 1, 128
#: Below as many units a thread takes one, so that all multiprocessors have some.
FEW_UNITS = 1 << 19
#: From as many programs on, in which a thread has one unit, they are of more warps: it takes a multiprocessor 0.17 us
#: to start each, measured on an H200.
STARTED, FEW_WARPS = 1024, 4
#: Channels that the twin works on at a time: it is not to need more registers than all the rest.
TWIN_CHANNELS = 128


def tiling(format: Format, rotation: Rotation, m: int, k: int, tiled: bool) -> dict[str, int | bool]:
    """Compile-time arguments that depend on the size of x [M, K]."""
    block = format.block or 1
    unit = max(block, rotation.group)
    across = max(1, TILE_COLS * block // unit)
    units = m * (k // unit)
    threads = 32 * (WARPS if units >= FEW_UNITS or units < 32 * STARTED else FEW_WARPS)
    whole = (m % TILE_ROWS == 0 and k // unit % across == 0) if tiled else units >= threads
    each = max(1, CHANNELS // unit) if units >= FEW_UNITS else 1
    return {"N": threads, "EACH": each, "ACROSS": across, "UNIT": unit, "TILED": tiled, "WHOLE": whole}


def config(
    format: Format,
    rotation: Rotation,
    native_e4m3: bool,
    tiles: dict[str, int | bool],
    overlap: bool = False,
    dynamic: bool = False,
) -> dict[str, Any]:
    """Compile-time arguments and launch options, ``tiles`` from :func:`tiling`.

    ``overlap``: launches may start before the last one has ended. ``dynamic``: as ``opened`` says.
    """
    return {
        **config_of_units(format, rotation, native_e4m3, tiles, overlap),
        "FEW": max(1, TWIN_CHANNELS // tiles["UNIT"]),
        "FRONT": front_constants(NONE),
        "DYNAMIC": dynamic,
    }


def config_of_units(
    format: Format, rotation: Rotation, native_e4m3: bool, tiles: dict[str, int | bool], overlap: bool
) -> dict[str, Any]:
    """What :func:`config` has in common with that of a kernel behind a front end."""
    return {
        **tiles,
        "BLOCK": format.block,
        "RULE": format.scale.name,
        "E4M3": native_e4m3,
        "TILE_ROWS": TILE_ROWS,
        "TILE_COLS": TILE_COLS,
        "ROTATION": constants(rotation),
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_warps": tiles["N"] // 32,
        **OPTIONS,
    }


def grid(tiles: dict[str, int | bool], m: int, k: int) -> tuple[int, int, int]:
    """Programs for all of x [M, K], or for each 128 rows of it."""
    in_row = k // tiles["UNIT"]
    if tiles["TILED"]:
        units = TILE_ROWS * tiles["ACROSS"] * triton.cdiv(in_row, tiles["ACROSS"])
        return triton.cdiv(units, tiles["N"] * tiles["EACH"]), triton.cdiv(m, TILE_ROWS), 1
    return triton.cdiv(m * in_row, tiles["N"] * tiles["EACH"]), 1, 1


@functools.cache
def converts_to_e4m3(device: torch.device) -> bool:
    """Whether a GPU has the conversion: from sm_89."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def quantize_blocks(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    format: Format,
    rotation: Rotation,
    global_scale: Tensor | None,
    scale_layout: str,
) -> None:
    """Fill codes and scales, padding of tiled ones included, of contiguous x [..., K]."""
    if x.data_ptr() % 16:
        x = x.clone()  # a view from the middle of a storage
    k = x.shape[-1]
    m = x.numel() // k
    tiles = tiling(format, rotation, m, k, scale_layout == "tiled")
    in_row = k // tiles["UNIT"]
    arguments = (x, codes, scales, given(global_scale, x), given(rotation.signs, x), m * in_row, m, in_row)
    signed = rotation.signs is not None
    key = (x.device.index, x.dtype, format.name, rotation.kind, rotation.group, signed, *tiles.values())
    with on(x.device):
        launch = _launches.get(key)
        if launch is None:
            compiled = config(format, rotation, converts_to_e4m3(x.device), tiles, launches_overlap(x.device))
            launch = _launches[key] = Launch(quantize_blocks_fast_kernel, arguments, compiled, x.device)
        launch(grid(tiles, m, k), *addresses(arguments))


_launches: dict[tuple[object, ...], Launch] = {}
