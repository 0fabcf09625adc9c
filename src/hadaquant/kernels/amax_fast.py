"""Largest finite magnitude of a rotated tensor at memory speed, for NVIDIA; twin of ``amax_kernel``.

A thread owns units as in ``quantize_blocks_fast``; 2 bytes an element from bfloat16 are read once, and the roof is
device memory. The norm is applied to the maximum: rounding is monotone. A program that met NaN or Inf looks at its
units again, one by one.

From the maximum to the global scale is a kernel of one thread, in place of seven of torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.kernels.hadamard import constants
from hadaquant.kernels.numerics import FP32_INF_BITS, bits, from_bits, global_scale_of, magnitude_bits
from hadaquant.kernels.runtime import OPTIONS, Launch, addresses, given, launch, multiprocessors, on
from hadaquant.kernels.units import largest_magnitude, load_words, rotate_unit, widen_words
from hadaquant.rotation import Rotation

#: Channels of a thread's unit at least: 32 bytes of 16-bit floats.
LEAST_UNIT = 16


@triton.jit
def _words_of(x_ptr, step, units, UNIT: tl.constexpr, N: tl.constexpr):
    WORDS: tl.constexpr = UNIT * x_ptr.dtype.element_ty.primitive_bitwidth // 64
    # beyond the last unit it is looked at again
    unit = tl.minimum(step.to(tl.int64) * N + tl.arange(0, N), units - 1)
    return load_words(x_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + unit * WORDS, WORDS)


@triton.jit
def _finite(x_ptr, signs_ptr, first, stride, steps, units, N: tl.constexpr, EACH: tl.constexpr, UNIT: tl.constexpr,
            ROTATION: tl.constexpr):  # fmt: skip
    """int32 bits of the largest finite magnitude of a program's units."""
    largest = tl.zeros((N,), tl.int32)
    for start in range(first, steps, stride):
        for i in range(EACH):
            words = _words_of(x_ptr, tl.minimum(start + i, steps - 1), units, UNIT, N)
            v = rotate_unit(widen_words(words, x_ptr.dtype.element_ty), signs_ptr, ROTATION, False)
            for j in tl.static_range(UNIT):
                b = magnitude_bits(v[j])
                largest = tl.maximum(largest, tl.where(b < FP32_INF_BITS, b, 0))
    return tl.max(largest)


@triton.jit(do_not_specialize=["steps", "units"], do_not_specialize_on_alignment=["signs_ptr"])
def amax_fast_kernel(
    x_ptr,
    amax_ptr,
    signs_ptr,
    steps,
    units,
    N: tl.constexpr,
    EACH: tl.constexpr,
    UNIT: tl.constexpr,
    ROTATION: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = UNIT * DTYPE.primitive_bitwidth // 64
    first = tl.program_id(0) * EACH
    stride = tl.num_programs(0) * EACH
    words = ()
    for i in tl.static_range(EACH):
        words = words + _words_of(x_ptr, tl.minimum(first + i, steps - 1), units, UNIT, N)
    largest = tl.zeros((N,), tl.float32)
    for start in range(first, steps, stride):
        following = ()
        for i in tl.static_range(EACH):
            v = widen_words(words[i * WORDS : (i + 1) * WORDS], DTYPE)
            following = following + _words_of(x_ptr, tl.minimum(start + stride + i, steps - 1), units, UNIT, N)
            m = largest_magnitude(rotate_unit(v, signs_ptr, ROTATION, False), 0, UNIT)
            largest = tl.maximum(largest, m, propagate_nan=tl.PropagateNan.ALL)
        words = following
    found = tl.max(bits(largest))
    if found >= FP32_INF_BITS:
        found = _finite(x_ptr, signs_ptr, first, stride, steps, units, N, EACH, UNIT, ROTATION)
    tl.atomic_max(amax_ptr, bits(from_bits(found) * ROTATION[3]), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["amax_ptr"])
def global_scale_kernel(amax_ptr, global_ptr):
    tl.store(global_ptr, global_scale_of(tl.load(amax_ptr)))


WARPS, EACH = 4, 2


def config(rotation: Rotation) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`amax_fast_kernel`."""
    unit = max(LEAST_UNIT, rotation.group)
    return {
        "N": 32 * WARPS,
        "EACH": max(1, EACH * LEAST_UNIT // unit),
        "UNIT": unit,
        "ROTATION": constants(rotation),
        "num_warps": WARPS,
        **OPTIONS,
    }


def programs_of(launch: Launch, steps: int, config: dict[str, Any]) -> int:
    """How many programs share the steps: as many as the device holds at once, if there are as many."""
    return min(multiprocessors(launch.device) * launch.occupancy, triton.cdiv(steps, config["EACH"]))


def amax(x: Tensor, rotation: Rotation) -> Tensor:
    """float32 scalar: largest finite magnitude of the rotated x, contiguous; 0 if there is none."""
    if x.data_ptr() % 16:
        x = x.clone()  # a view from the middle of a storage
    found = torch.zeros((), dtype=torch.int32, device=x.device)
    compiled = config(rotation)
    units = x.numel() // compiled["UNIT"]
    steps = triton.cdiv(units, compiled["N"])
    arguments = (x, found, given(rotation.signs, x), steps, units)
    key = (x.device.index, x.dtype, rotation.kind, rotation.group, rotation.signs is not None)
    with on(x.device):
        prepared = _launches.get(key)
        if prepared is None:
            prepared = _launches[key] = Launch(amax_fast_kernel, arguments, compiled, x.device)
        prepared((programs_of(prepared, steps, compiled), 1, 1), *addresses(arguments))
    return found.view(torch.float32)


def global_scale(amax: Tensor) -> Tensor:
    """NVFP4's global multiplier (amax / 6) / 448 of a float32 scalar; 1.0 where that is 0."""
    g = torch.empty_like(amax)
    launch(global_scale_kernel, (1,), (amax, g), {"num_warps": 1, **OPTIONS})
    return g


_launches: dict[tuple[object, ...], Launch] = {}
