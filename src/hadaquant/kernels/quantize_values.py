"""FP4 rotate -> scale -> encode, and back to code · scale in bfloat16, which holds it exactly, for NVIDIA.

What ``quantize_blocks_fast`` followed by ``unpack`` gives, without the codes ever touching memory: the x that
``fp4_value_rows`` or ``fp4_mm_hopper`` multiplies, its columns in the order in which those want them. 4 bytes an
element move from bfloat16, and device memory is the roof. A thread owns units as in ``quantize_blocks_fast``.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.kernels.hadamard import constants
from hadaquant.kernels.numerics import (
    bits,
    choose,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode,
    magnitude_bits,
    multiplier,
)
from hadaquant.kernels.quantize_blocks_fast import converts_to_e4m3, opened, store_words
from hadaquant.kernels.quotients import (
    LARGEST_BITS,
    SCALE,
    bytes_of,
    mxfp4_quotients,
    nvfp4_quotients,
    prepared,
    rounded_value,
)
from hadaquant.kernels.runtime import OPTIONS, given, launch, launches_overlap
from hadaquant.kernels.units import load_words, rotate_unit, widen_words
from hadaquant.rotation import Rotation

#: Channels of a thread where there are many.
CHANNELS = 64
#: Warps of a program, since a multiprocessor takes 0.17 us to start each, measured on an H200; and how many programs
#: are enough for threads to take more than a unit.
WARPS, PROGRAMS = 2, 1000


@triton.jit
def _store(y_ptr, unit, v, UNIT: tl.constexpr, BY_NIBBLE: tl.constexpr):
    """A unit's channels as bfloat16, whose bits are the upper ones of a float32."""
    if BY_NIBBLE:
        for j in tl.static_range(UNIT // 16):
            sixteen = unit * (UNIT // 16) + j
            where = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + sixteen // 8 * 64 + sixteen % 8
            for i in tl.static_range(8):
                tl.store(where + 8 * i, bytes_of(bits(v[16 * j + i]), bits(v[16 * j + 8 + i]), "0x7632"))
    else:
        words = ()
        for i in tl.static_range(UNIT // 2):
            low, high = v[i // 4 * 8 + i % 4], v[i // 4 * 8 + i % 4 + 4]
            words = words + (bytes_of(bits(low), bits(high), "0x7632"),)
        store_words(y_ptr, unit, words)


@triton.jit
def _rounded(h, scale, FIRST: tl.constexpr):
    """code · scale of scaled quotients; their scale is undone first by FIRST, or by ``scale``."""
    v = ()
    for i in tl.static_range(len(h)):
        v = v + ((rounded_value(h[i]) * FIRST) * scale,)
    return v


@triton.jit
def _divided(v, g, FIRST: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr):
    """code · scale of a block of any numbers, by the steps of ``quantize_blocks``."""
    largest = magnitude_bits(v[FIRST])
    for i in tl.static_range(FIRST + 1, FIRST + BLOCK):
        largest = tl.maximum(largest, magnitude_bits(v[i]))
    stored = choose(largest, g, RULE)
    d = multiplier(stored, g, RULE)
    scale = decode_e4m3(stored) if RULE == "e4m3_global" else decode_e8m0(stored)
    out = ()
    for i in tl.static_range(FIRST, FIRST + BLOCK):
        out = out + (decode_e2m1(encode(v[i], tl.where(d == 0.0, 1.0, d), "e2m1")) * scale,)
    return out


@triton.jit
def _load(x_ptr, unit, UNIT: tl.constexpr):
    WORDS: tl.constexpr = UNIT * x_ptr.dtype.element_ty.primitive_bitwidth // 64
    return load_words(x_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + unit * WORDS, WORDS)


@triton.jit
def _again(x_ptr, y_ptr, g, signs_ptr, first, units, N: tl.constexpr, EACH: tl.constexpr, UNIT: tl.constexpr,
           BLOCK: tl.constexpr, RULE: tl.constexpr, ROTATION: tl.constexpr, BY_NIBBLE: tl.constexpr):  # fmt: skip
    """A program's units, each by divisions."""
    for i in range(EACH):
        unit = tl.minimum(first + i * N + tl.arange(0, N), units - 1)
        v = widen_words(_load(x_ptr, unit, UNIT), x_ptr.dtype.element_ty)
        v = rotate_unit(v, signs_ptr, ROTATION, True)
        out = ()
        for j in tl.static_range(UNIT // BLOCK):
            out = out + _divided(v, g, j * BLOCK, BLOCK, RULE)
        _store(y_ptr, unit, out, UNIT, BY_NIBBLE)


@triton.jit(do_not_specialize=["units"], do_not_specialize_on_alignment=["global_ptr", "signs_ptr"])
def quantize_values_kernel(
    x_ptr, y_ptr, global_ptr, signs_ptr, units,
    N: tl.constexpr, EACH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr,
    E4M3: tl.constexpr, DYNAMIC: tl.constexpr, BY_NIBBLE: tl.constexpr, ROTATION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes EACH steps of N units. It loads all of them before it works on the first.

    DYNAMIC: as ``opened`` says.
    """
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
    # the last program steps back to be whole; threads beyond all units do the last again
    first = tl.maximum(tl.minimum(tl.program_id(0) * (EACH * N), units - EACH * N), 0).to(tl.int64)
    words = ()
    for i in tl.static_range(EACH):
        unit = tl.minimum(first + i * N + tl.arange(0, N), units - 1)
        words = words + _load(x_ptr, unit, UNIT)
    g = 1.0
    scale = ()
    worst = tl.zeros((N,), tl.int32)
    if SCALED:
        g = opened(global_ptr, DYNAMIC)
        scale, unfit = prepared(g, NORM)
        worst += unfit
    for i in tl.static_range(EACH):
        v = rotate_unit(widen_words(words[i * WORDS : (i + 1) * WORDS], DTYPE), signs_ptr, ROTATION, not WAITS)
        out = ()
        for j in tl.static_range(UNIT // BLOCK):
            if SCALED:
                h, _, wide, largest = nvfp4_quotients(v, scale, j * BLOCK, NORM, E4M3)
                worst = tl.maximum(worst, bits(largest))
                out = out + _rounded(h, wide * (1.0 / SCALE), 1.0)
            else:
                h, stored = mxfp4_quotients(v, j * BLOCK, NORM, RULE)
                out = out + _rounded(h, decode_e8m0(stored), 1.0 / SCALE)  # whose product may be infinite
        _store(y_ptr, tl.minimum(first + i * N + tl.arange(0, N), units - 1), out, UNIT, BY_NIBBLE)
    if SCALED:  # noqa: SIM102 - known to the compiler, then to the program
        if tl.max(worst) > LARGEST_BITS:
            _again(x_ptr, y_ptr, g, signs_ptr, first, units, N, EACH, UNIT, BLOCK, RULE, ROTATION, BY_NIBBLE)


def config(
    format: Format, rotation: Rotation, m: int, k: int, native_e4m3: bool, dynamic: bool, by_nibble: bool, overlap: bool
) -> dict[str, Any]:
    """Compile-time arguments and launch options for x [M, K]; ``by_nibble`` as :func:`quantize_values` has it."""
    block = format.block or 1
    unit = max(block, rotation.group)
    each = max(1, CHANNELS // unit)
    while each > 1 and m * k // unit < PROGRAMS * 32 * WARPS * each:
        each //= 2
    return {
        "N": 32 * WARPS,
        "EACH": each,
        "UNIT": unit,
        "BLOCK": block,
        "RULE": format.scale.name,
        "E4M3": native_e4m3,
        "DYNAMIC": dynamic,
        "BY_NIBBLE": by_nibble,
        "ROTATION": constants(rotation),
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_warps": WARPS,
        **OPTIONS,
    }


def programs_of(config: dict[str, Any], m: int, k: int) -> int:
    """How many programs do x [M, K]."""
    return triton.cdiv(m * k, config["UNIT"] * config["N"] * config["EACH"])


def quantize_values(
    x: Tensor, format: Format, rotation: Rotation, global_scale: Tensor | None, by_nibble: bool, dynamic: bool = False
) -> Tensor:
    """bfloat16 [M, K] of contiguous x [M, K]: code · scale, in the order of ``gemm_fp4.interleaved``.

    ``by_nibble``: in that of ``layout.by_nibble``, K % 128 == 0. ``dynamic``: the global scale is as
    ``quantize_blocks_fast.opened`` says.
    """
    m, k = x.shape
    y = torch.empty(m, k, dtype=torch.bfloat16, device=x.device)
    overlap, native = launches_overlap(x.device), converts_to_e4m3(x.device)
    c = config(format, rotation, m, k, native, dynamic, by_nibble, overlap)
    arguments = x, y, given(global_scale, x), given(rotation.signs, x), m * k // c["UNIT"]
    launch(quantize_values_kernel, (programs_of(c, m, k),), arguments, c)
    return y
