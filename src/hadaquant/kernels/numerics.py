"""Device twins of formats/elements.py and formats/scales.py: the same functions, the same bytes.

Kernels using these are compiled with ``enable_fp_fusion=False``: a fused multiply-add would round
once where the contract rounds twice. ``div_rn`` is the correctly rounded quotient; Triton's ``/`` is
not. Scale bytes are integers throughout, since not every target has float8 types.
"""

import triton
import triton.language as tl

from hadaquant.formats import elements, scales

E2M1_MAX = tl.constexpr(elements.E2M1_MAX)
E4M3_MAX = tl.constexpr(elements.E4M3_MAX)
E4M3_NAN = tl.constexpr(elements.E4M3_NAN)
E8M0_NAN = tl.constexpr(elements.E8M0_NAN)
INT8_MAX = tl.constexpr(float(elements.INT8_MAX))
INT8_AMAX_FLOOR = tl.constexpr(scales.INT8_AMAX_FLOOR)
FP32_INF_BITS = tl.constexpr(elements.FP32_INF_BITS)
FP32_NAN_BITS = tl.constexpr(elements.FP32_NAN_BITS)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

#: Adding it to |x| < 2**22 leaves RNE(x) in the low mantissa bits, also for negative x.
ROUND = tl.constexpr(1.5 * 2.0**23)
ROUND_BITS = tl.constexpr(0x4B400000)
#: The same for 0 <= x < 2**23, without the sign's headroom.
ROUND_POSITIVE = tl.constexpr(2.0**23)


@triton.jit
def bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(i):
    return i.to(tl.float32, bitcast=True)


@triton.jit
def widen(x):
    """A loaded float of any dtype as float32, exact. bfloat16 is the upper half of a float32: moving
    bits is one instruction, and right for subnormals, which the interpreter's own conversion is not."""
    if x.dtype == tl.bfloat16:
        return from_bits(x.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(y, DTYPE: tl.constexpr):
    """float32 rounded to DTYPE, ties to even. The interpreter's own conversion to bfloat16 truncates."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        b = bits(y)
        rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
        return tl.where(y == y, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return y.to(DTYPE)


@triton.jit
def magnitude_bits(x):
    return bits(x) & 0x7FFFFFFF


@triton.jit
def encode_e2m1(q, negative):
    # h = |q|/2 walks the segments [0, 2), [2, 4), [4, 6]: their steps 0.5, 1, 2 are 1/4, 1/2 and 1 of
    # their lengths, so three roundings into one integer give the code, each with ties to even
    h = tl.abs(q) * 0.5
    t = tl.minimum(h, 1.0) * 4.0 + ROUND_POSITIVE
    t = t + tl.minimum(tl.maximum(h - 1.0, 0.0), 1.0) * 2.0
    t = t + tl.minimum(tl.maximum(h - 2.0, 0.0), 1.0)
    code = (bits(t) & 7) | (negative.to(tl.int32) << 3)
    return tl.where(q == q, code, 0)


@triton.jit
def decode_e2m1(code):
    magnitude = code & 7
    normal = from_bits((((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22))
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return from_bits(bits(value) | ((code & 8) << 28))


@triton.jit
def encode_int8(q):
    q = tl.where(q == q, q, 0.0)
    q = tl.minimum(tl.maximum(q, -INT8_MAX), INT8_MAX)
    return bits(q + ROUND) - ROUND_BITS


@triton.jit
def encode_e4m3(s):
    s = tl.minimum(s, E4M3_MAX)
    b = bits(s)
    normal = ((b + 0x7FFFF + ((b >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = bits(s * 512.0 + ROUND_POSITIVE) & 0xF
    return tl.where(s < 0.015625, subnormal, normal)


@triton.jit
def decode_e4m3(byte):
    normal = from_bits((byte << 20) + (120 << 23))
    value = tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)
    return tl.where(byte == E4M3_NAN, from_bits(byte * 0 + FP32_NAN_BITS), value)


@triton.jit
def decode_e8m0(byte):
    b = tl.where(byte == 0, 0x00400000, byte << 23)
    return from_bits(tl.where(byte == E8M0_NAN, FP32_NAN_BITS, b))


@triton.jit
def global_scale_of(amax):
    """NVFP4's global multiplier (amax / 6) / 448; 1.0 where that is 0."""
    g = tl.div_rn(tl.div_rn(amax, E2M1_MAX), E4M3_MAX)
    return tl.where(g == 0.0, 1.0, g)


@triton.jit
def choose(amax_bits, g, RULE: tl.constexpr):
    """Stored scale of each block: int32 byte, or float32 for ``absmax``."""
    bad = amax_bits >= FP32_INF_BITS
    if RULE == "absmax":
        amax = tl.where(bad, 0.0, from_bits(amax_bits))
        s = tl.div_rn(tl.maximum(amax, INT8_AMAX_FLOOR), INT8_MAX)
        return from_bits(tl.where(bad, FP32_NAN_BITS, bits(s)))
    elif RULE == "e4m3_global":
        amax = tl.where(bad, 0.0, from_bits(amax_bits))
        sixth = tl.div_rn(amax, E2M1_MAX)
        good = (g > 0.0) & (g < float("inf"))
        byte = encode_e4m3(tl.div_rn(sixth, tl.where(good, g, 1.0)))
        return tl.where(bad, E4M3_NAN, tl.where(good, byte, E4M3_NAN))
    else:
        exponent = amax_bits >> 23
        if RULE == "e8m0_ceil":
            exponent += ((amax_bits & 0x7FFFFF) > 0x400000).to(tl.int32)
        elif RULE == "e8m0_even":
            exponent = (amax_bits + 0x200000) >> 23
        else:
            tl.static_assert(RULE == "e8m0_floor", "a scale rule without a device twin")
        return tl.where(bad, E8M0_NAN, tl.maximum(exponent - 2, 0))


@triton.jit
def multiplier(stored, g, RULE: tl.constexpr):
    """float32 number that a decoded element is multiplied by."""
    if RULE == "absmax":
        return stored
    elif RULE == "e4m3_global":
        return decode_e4m3(stored) * g
    else:
        return decode_e8m0(stored)


@triton.jit
def encode(y, divisor, ELEMENT: tl.constexpr):
    """int32 codes of y / divisor; 0 where the divisor is NaN."""
    q = tl.div_rn(y, divisor)
    if ELEMENT == "e2m1":
        return encode_e2m1(q, y < 0)
    else:
        tl.static_assert(ELEMENT == "int8", "an element without a device twin")
        return encode_int8(q)
