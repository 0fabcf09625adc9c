"""From a block's largest magnitude to its stored scale and to the number its codes are times.

``block amax -> stored scale -> multiplier`` is one rule, an instance of :class:`ScaleRule`.
The largest magnitude travels as integer bits, because an integer maximum keeps NaN and Inf and
has no order. Divisions are by tensors: on CUDA, torch divides by a Python scalar through the
reciprocal, which is not the correctly rounded quotient. Those tensors are filled on the device, since
a copy from the host could not be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hadaquant.formats.elements import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_NAN,
    E8M0_NAN,
    FP32_INF_BITS,
    FP32_NAN_BITS,
    INT8_MAX,
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    magnitude_bits,
)

#: The smallest row maximum that an INT8 scale is made of.
INT8_AMAX_FLOOR = 1e-12


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """How a block's scale is chosen, stored and read back.

    ``choose(amax_bits, global_scale)``: int32 magnitude bits of each block's maximum -> stored
    scale of ``dtype``. ``multiplier(stored, global_scale)``: stored scale -> float32 number that a
    decoded element is multiplied by.
    """

    name: str
    dtype: torch.dtype
    choose: Callable[[Tensor, Tensor | None], Tensor]
    multiplier: Callable[[Tensor, Tensor | None], Tensor]


def block_amax_bits(blocks: Tensor) -> Tensor:
    """int32 bits of the largest magnitude along the last dimension; Inf or NaN win."""
    return magnitude_bits(blocks).amax(-1)


def finite_amax(x: Tensor) -> Tensor:
    """Largest finite magnitude of float32 ``x``, a float32 scalar; 0 if there is none."""
    if x.numel() == 0:
        return x.new_zeros(())
    bits = magnitude_bits(x)
    return torch.where(bits < FP32_INF_BITS, bits, 0).amax().view(torch.float32)


def global_scale_of(amax: Tensor) -> Tensor:
    """NVFP4 global multiplier g = (amax / 6) / 448 in float32; 1.0 where that is 0.

    >>> global_scale_of(torch.tensor(2688.0)).item()
    1.0
    """
    g = amax / amax.new_full((), E2M1_MAX) / amax.new_full((), E4M3_MAX)
    return torch.where(g == 0, torch.ones_like(g), g)


def _choose_e4m3(amax_bits: Tensor, global_scale: Tensor | None) -> Tensor:
    amax, g = amax_bits.view(torch.float32), _given(global_scale)
    s = (amax / amax.new_full((), E2M1_MAX)) / g
    bad = (amax_bits >= FP32_INF_BITS) | ~((g > 0) & (g < float("inf")))
    return encode_e4m3(s).masked_fill_(bad, E4M3_NAN)


def _multiplier_e4m3(stored: Tensor, global_scale: Tensor | None) -> Tensor:
    return decode_e4m3(stored) * _given(global_scale)


def _given(global_scale: Tensor | None) -> Tensor:
    if global_scale is None:
        raise TypeError("this scale rule needs a global scale")
    return global_scale


def _e8m0(exponent: Tensor, amax_bits: Tensor) -> Tensor:
    # exponent: the biased one, before clamping; 2**-127 is the smallest E8M0 number
    byte = exponent.clamp(min=0)
    return torch.where(amax_bits >= FP32_INF_BITS, E8M0_NAN, byte).to(torch.uint8)


def _choose_e8m0_floor(amax_bits: Tensor, _: Tensor | None) -> Tensor:
    return _e8m0((amax_bits >> 23) - 2, amax_bits)


def _choose_e8m0_ceil(amax_bits: Tensor, _: Tensor | None) -> Tensor:
    # 6 * 2**e = 1.5 * 2**(e + 2): one more where the mantissa is above 1.5
    above = ((amax_bits & 0x7FFFFF) > 0x400000).to(torch.int32)
    return _e8m0((amax_bits >> 23) - 2 + above, amax_bits)


def _choose_e8m0_even(amax_bits: Tensor, _: Tensor | None) -> Tensor:
    # E2M1 has one mantissa bit: rounding amax to it carries into the exponent from 1.75 on
    return _e8m0(((amax_bits + 0x200000) >> 23) - 2, amax_bits)


def _multiplier_e8m0(stored: Tensor, _: Tensor | None) -> Tensor:
    return decode_e8m0(stored)


def _choose_absmax(amax_bits: Tensor, _: Tensor | None) -> Tensor:
    amax = amax_bits.view(torch.float32)
    s = torch.maximum(amax, amax.new_full((), INT8_AMAX_FLOOR)) / amax.new_full((), float(INT8_MAX))
    return torch.where(amax_bits >= FP32_INF_BITS, FP32_NAN_BITS, s.view(torch.int32)).view(torch.float32)


def _multiplier_absmax(stored: Tensor, _: Tensor | None) -> Tensor:
    return stored


E4M3_GLOBAL = ScaleRule(name="e4m3_global", dtype=torch.uint8, choose=_choose_e4m3, multiplier=_multiplier_e4m3)
E8M0_FLOOR = ScaleRule(name="e8m0_floor", dtype=torch.uint8, choose=_choose_e8m0_floor, multiplier=_multiplier_e8m0)
E8M0_CEIL = ScaleRule(name="e8m0_ceil", dtype=torch.uint8, choose=_choose_e8m0_ceil, multiplier=_multiplier_e8m0)
E8M0_EVEN = ScaleRule(name="e8m0_even", dtype=torch.uint8, choose=_choose_e8m0_even, multiplier=_multiplier_e8m0)
ABSMAX = ScaleRule(name="absmax", dtype=torch.float32, choose=_choose_absmax, multiplier=_multiplier_absmax)
