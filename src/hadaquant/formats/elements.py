"""Number types: E2M1 and INT8 for the elements, E4M3 and E8M0 for the scales.

Everything here is exact and made of integer operations on float32 bits or of correctly rounded
float32 steps, so that a kernel can repeat it. No cast to a float8 dtype is used: the casts of
interpreters, older libraries and some GPUs differ on ties, on overflow and on double rounding.

E2M1, E4M3 and E8M0 are defined in the OCP Microscaling Formats (MX) specification 1.0 and, for
E4M3, in Micikevicius et al., "FP8 formats for deep learning" (arXiv:2209.05433).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E8M0_NAN = 0xFF
INT8_MAX = 127

#: Magnitude bits of float32 infinity: magnitudes at or above it are Inf or NaN.
FP32_INF_BITS = 0x7F800000
#: The NaN that marks an INT8 row holding NaN or Inf.
FP32_NAN_BITS = 0x7FC00000


def fp32_bits(x: Tensor) -> Tensor:
    """Bits of float32 ``x`` as int32."""
    return x.contiguous().view(torch.int32)


def magnitude_bits(x: Tensor) -> Tensor:
    """Bits of ``|x|`` as int32. Ordered as the magnitudes are, Inf and NaN above all numbers."""
    return fp32_bits(x) & 0x7FFFFFFF


def encode_e2m1(q: Tensor, y: Tensor) -> Tensor:
    """Nearest E2M1 code of the float32 quotient ``q`` of ``y``, ties to the even code, saturating at 6. uint8 0..15.

    The three segments (steps 0.5, 1 and 2) are rounded one by one. The sign bit says whether the
    numerator ``y`` is below zero, even where its quotient underflows to -0.0. NaN gives code 0.

    >>> q = torch.tensor([0.25, 0.75, -2.5, 3.5, 5.0, 9.0])
    >>> encode_e2m1(q, q).tolist()
    [0, 2, 12, 6, 6, 7]
    """
    negative = (y < 0) & ~torch.isnan(q)
    a = q.nan_to_num(nan=0.0).abs_()
    code = a.clamp(max=2.0).mul_(2.0).round_()
    code += (a - 2.0).clamp_(0.0, 2.0).round_()
    code += (a - 4.0).clamp_(0.0, 2.0).mul_(0.5).round_()
    return code.to(torch.uint8) | (negative.to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 values of uint8 E2M1 codes 0..15. Code 8 is -0.0."""
    return torch.tensor(E2M1.values, dtype=torch.float32, device=codes.device)[codes.long()]


def encode_int8(q: Tensor, y: Tensor) -> Tensor:
    """Nearest integer of float32 ``q``, ties to even, clamped to -127..127. int8; NaN gives 0.

    The numerator ``y`` is not needed: an integer has one zero.

    >>> q = torch.tensor([0.5, 1.5, -2.5, 126.5, 400.0])
    >>> encode_int8(q, q).tolist()
    [0, 2, -2, 126, 127]
    """
    return q.nan_to_num(nan=0.0).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


def decode_int8(codes: Tensor) -> Tensor:
    """float32 values of int8 codes."""
    return codes.to(torch.float32)


def encode_e4m3(s: Tensor) -> Tensor:
    """E4M3 byte of float32 ``s >= 0``, nearest, ties to even, saturating at 448. NaN gives 0x7F.

    Above 2**-6 the float32 mantissa is rounded to three bits in place, so that a carry moves into
    the exponent by itself; below, the subnormal step is 2**-9.

    >>> [hex(b) for b in encode_e4m3(torch.tensor([448.0, 1.0, 7.9839, 0.0, 1e9])).tolist()]
    ['0x7e', '0x38', '0x50', '0x0', '0x7e']
    """
    nan = torch.isnan(s)
    s = s.nan_to_num(nan=0.0).clamp(max=E4M3_MAX)
    bits = fp32_bits(s)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (s * 512.0).round().to(torch.int32)
    byte = torch.where(s < 2.0**-6, subnormal, normal).to(torch.uint8)
    return byte.masked_fill_(nan, E4M3_NAN)


def decode_e4m3(byte: Tensor) -> Tensor:
    """float32 values of uint8 E4M3 bytes; 0x7F and 0xFF are NaN."""
    return torch.tensor(_e4m3_values(), dtype=torch.float32, device=byte.device)[byte.long()]


def _e4m3_values() -> list[float]:
    values = []
    for byte in range(256):
        sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        value = float("nan") if byte & 0x7F == E4M3_NAN else value
        values.append(-value if sign else value)
    return values


def decode_e8m0(byte: Tensor) -> Tensor:
    """float32 values 2**(byte - 127) of uint8 E8M0 bytes; 0xFF is NaN.

    Byte 0 is 2**-127, a float32 subnormal.
    """
    e = byte.to(torch.int32)
    bits = torch.where(e == 0, 0x00400000, e << 23)
    return torch.where(e == E8M0_NAN, FP32_NAN_BITS, bits).view(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Element:
    """A number type for the elements: its width, largest value and codec.

    ``encode(q, y)``: the code of the quotient q of a numerator y, whose sign survives where q underflows.
    """

    name: str
    bits: int
    max: float
    codes_dtype: torch.dtype
    values: tuple[float, ...]
    encode: Callable[[Tensor, Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.bits == 4


_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

E2M1 = Element(
    name="e2m1",
    bits=4,
    max=E2M1_MAX,
    codes_dtype=torch.uint8,
    values=_E2M1_MAGNITUDES + tuple(-v for v in _E2M1_MAGNITUDES),
    encode=encode_e2m1,
    decode=decode_e2m1,
)

INT8 = Element(
    name="int8",
    bits=8,
    max=float(INT8_MAX),
    codes_dtype=torch.int8,
    values=tuple(float(v) for v in range(-INT8_MAX, INT8_MAX + 1)),
    encode=encode_int8,
    decode=decode_int8,
)
