"""INT8 behind a front end for 16-bit rows at memory speed: ``quantize_rows_gluon`` with an op on what it loads.

Norms and GELU move 3 bytes an element, SiLU · up 5, up's row being fetched along with x's. What is the same
for many rows, weights and modulations, comes from the L1 cache.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hadaquant.formats import Format
from hadaquant.front import FrontEnd
from hadaquant.kernels import quantize_rows_gluon
from hadaquant.kernels.front import aligned_rows, constants, operand, row_bytes
from hadaquant.kernels.quantize_rows_gluon import FEWER_WARPS, MOST, WARPS, quantize_row, row_shape
from hadaquant.kernels.rows_gluon import load_row
from hadaquant.kernels.runtime import Launch, launches_overlap, on
from hadaquant.kernels.shared_gluon import PAIRS, UNKEPT, WIDE, keep, meeting_place, received_row, send_row, shared_row
from hadaquant.rotation import Rotation

#: Row strides are compiled as multiples of this many 32-bit words.
WORDS = 16
#: Most half tiles a thread may hold where the next row of x waits with one of up (measured on an H200).
MOST_OF_TWO = 5
#: Bytes of the next row, factor and shift that a program keeps in shared memory.
MOST_KEPT = 90 * 1024
#: Limits of registers that let more rows onto a multiprocessor without a spill (measured on an H200).
REGISTERS = {("silu_mul", (8, 1, 1)): 128, ("ada_norm", (2, 1, 1)): 128}
#: Rows of a program where neither memory nor operands bind it: later ones take over from those that come first.
ROWS_EACH = 4


@gluon.jit(do_not_specialize=["M", "factor_rows", "shift_rows"])
def quantize_front_gluon(
    x_ptr, q_ptr, s_ptr, signs_ptr, factor_ptr, shift_ptr, M, x_stride, factor_stride, factor_rows, shift_stride,
    shift_rows, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr, H: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, NORM: gl.constexpr, SIGNED: gl.constexpr, RULE: gl.constexpr, OVERLAP: gl.constexpr,
    FRONT: gl.constexpr, KEPT: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Strides are in 32-bit words.

    KEPT: how shared memory keeps factor and shift. RING: whether the next row waits there.
    """
    if OVERLAP:  # its programs fill all places, so that the next kernel's cannot come between them
        gdc_wait()
        gdc_launch_dependents()
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    UP: gl.constexpr = FRONT[0] == "silu_mul"
    first = gl.program_id(0)
    step = gl.num_programs(0)
    places = (meeting_place(gl.float32, W, T + H), meeting_place(gl.float32, W, T + H), meeting_place(gl.int32, W, 1))
    tiles, ring = (), ()
    if RING:
        ring = shared_row(True, W, T, H)
        send_row(ring, x_ptr, first, x_stride, W, T, H)
    else:
        tiles = load_row(x_ptr, first, x_stride, K, W, T, H)
    operands = ((factor_ptr, factor_stride, factor_rows), (shift_ptr, shift_stride, shift_rows))
    if UP:
        operands = load_row(factor_ptr, first, factor_stride, K, W, T, H)
    kept = (None, None)
    if KEPT[0] != UNKEPT:
        kept = (shared_row(KEPT[0] == PAIRS, W, T, H), None)
    if KEPT[1] != UNKEPT:
        kept = (kept[0], shared_row(KEPT[1] == PAIRS, W, T, H))
    change = first  # the row whose operands are not the kept ones
    for row in range(first, M, step):
        then = gl.minimum(row + step, M - 1)
        if RING:
            now = received_row(ring, W, T, H)
            send_row(ring, x_ptr, then, x_stride, W, T, H)
            following = tiles
        else:
            now = tiles
            following = load_row(x_ptr, then, x_stride, K, W, T, H)
        following_operands = operands
        if UP:
            following_operands = load_row(factor_ptr, then, factor_stride, K, W, T, H)
        if KEPT[0] != UNKEPT:  # noqa: SIM102, this one is of compile time
            if row >= change:
                change = keep(kept[0], operands[0], row, KEPT[0], FRONT[0] == "ada_norm", K, W, T, H)
                if KEPT[1] != UNKEPT:
                    change = gl.minimum(change, keep(kept[1], operands[1], row, KEPT[1], False, K, W, T, H))
        quantize_row(now, row, operands, kept, places, q_ptr, s_ptr, signs_ptr, DTYPE, FRONT, KEPT, KIND, GROUP, NORM,
                     SIGNED, RULE, K, W, T, H)  # fmt: skip
        tiles = following
        operands = following_operands
    if RING:
        received_row(ring, W, T, H)  # nothing is on its way when the program's memory becomes another's


def _kept(front_end: tuple[object, ...], k: int, ring: bool, shift: torch.dtype) -> tuple[int, int]:
    """How shared memory keeps factor and shift: the factor in float32, and the shift as it is, where they fit."""
    left = MOST_KEPT // k - (2 if ring else 0) - 4
    if front_end[0] == "silu_mul" or not front_end[1] or left < 0:
        return UNKEPT.value, UNKEPT.value
    if not front_end[2] or left < shift.itemsize:
        return WIDE.value, UNKEPT.value
    return WIDE.value, (WIDE if shift == torch.float32 else PAIRS).value


def config(
    format: Format,
    kind: str,
    group: int,
    signed: bool,
    front_end: tuple[object, ...],
    k: int,
    overlap: bool,
    shift: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Compile-time arguments and launch options. ``overlap``: launches may start before the last one has ended."""
    config = quantize_rows_gluon.config(format, kind, group, signed, k, overlap)
    most = MOST_OF_TWO if front_end[0] == "silu_mul" else MOST
    fewer = front_end[0] in ("rms_norm", "gelu_tanh")
    warps, whole, half = shape = row_shape(k, group, most, FEWER_WARPS if fewer else WARPS)
    short = warps == 8 or (whole > 1 and front_end[0] != "silu_mul")  # of registers
    ring = short and (2 * whole + half) * warps * 512 == k
    config |= {"W": warps, "T": whole, "H": half, "num_warps": warps}
    limit = REGISTERS.get((front_end[0], shape))
    if limit:
        config["maxnreg"] = limit
    return {**config, "FRONT": front_end, "KEPT": _kept(front_end, k, ring, shift), "RING": ring}


#: Launches for x, the addresses of codes, scales and signs or None, and a front end of the kind prepared for.
Quantize = Callable[[Tensor, int, int, "int | None", FrontEnd], None]


@functools.lru_cache(maxsize=4096)
def prepared(
    format: Format,
    rotation: tuple[str, int, bool],
    front_end: tuple[object, ...],
    m: int,
    k: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    device: torch.device,
) -> Quantize:
    """Front end, rotation and codes of x [M, K], compiled. ``dtypes``: of x, factor and shift, x's for one it lacks."""
    launch = _launch_of(format, rotation, front_end, k, dtypes, device)
    grid = launch.grid_of(m)
    if front_end[0] == "gelu_tanh":
        grid = max(grid[0], -(-m // ROWS_EACH)), 1, 1

    def quantize(x: Tensor, codes: int, scales: int, signs: int | None, fe: FrontEnd) -> None:
        x = aligned_rows(x, 4 * WORDS)
        factor, *of_factor = _operand(fe.factor, x)
        shift, *of_shift = _operand(fe.shift, x)
        source = x.data_ptr()
        tensors = source, codes, scales, source if signs is None else signs, factor.data_ptr(), shift.data_ptr()
        launch(grid, *tensors, m, row_bytes(x) // 4, *of_factor, *of_shift)

    return quantize


@functools.cache
def _launch_of(
    format: Format,
    rotation: tuple[str, int, bool],
    front_end: tuple[object, ...],
    k: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    device: torch.device,
) -> Launch:
    arguments = (dtypes[0], torch.int8, torch.float32, torch.float32, *dtypes[1:], 1, *([WORDS, WORDS, 1, WORDS, 1]))
    constants = config(format, *rotation, front_end, k, launches_overlap(device), dtypes[2])
    return Launch(quantize_front_gluon, arguments, constants, device)


def _operand(t: Tensor | None, x: Tensor) -> tuple[Tensor, int, int]:
    """A factor or shift: tensor, row stride in words, rows of x for each of its own."""
    if t is None:
        return x, 0, 1
    rows, _, each = operand(t, x)
    rows = aligned_rows(rows, 4 * WORDS)
    return rows, row_bytes(rows) // 4, each


def quantize_front(
    x: Tensor, codes: Tensor, scales: Tensor, format: Format, rotation: Rotation, front_end: FrontEnd
) -> None:
    """Fill codes and scales of x [M, K]."""
    m, k = x.shape
    described = (rotation.kind, rotation.group, rotation.signs is not None)
    dtypes = (x.dtype, *(x.dtype if t is None else t.dtype for t in front_end.tensors))
    quantize = prepared(format, described, constants(front_end), m, k, dtypes, x.device)
    signs = None if rotation.signs is None else rotation.signs.data_ptr()
    with on(x.device):
        quantize(x, codes.data_ptr(), scales.data_ptr(), signs, front_end)
