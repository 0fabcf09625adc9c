"""Codes of FP4 blocks in few instructions, for NVIDIA: the same bytes as ``numerics.encode`` where they hold.

* Quotients by the reciprocal in two terms, taken once a block: 1/d = hi + lo to 48 bits, and y·hi + (y·lo) rounds
  to the code of the true quotient (tests/kernels/test_quotients.py tries every mantissa of d).
* E2M1 in three instructions: an addend whose exponent follows the quotient's rounds it at the right bit.
* Two codes leave their sums by one multiply and one shift-and-add, and signs by one shift each.

They do not hold for NaN, Inf, elements above ten times their divisor, or a global scale outside 2^±60: the largest
quotient tells.
"""

import triton
import triton.language as tl

from hadaquant.kernels.numerics import FP32_INF_BITS, bits, choose, decode_e4m3, encode_e4m3, from_bits
from hadaquant.kernels.units import largest_magnitude

#: 1/6 in two terms.
SIXTH = tl.constexpr(0.16666667163372039794921875)
SIXTH_REST = tl.constexpr(-4.967053879312289e-09)
#: Global scales for which no intermediate number is subnormal or infinite.
LEAST_GLOBAL = tl.constexpr(2.0**-60)
LARGEST_GLOBAL = tl.constexpr(2.0**60)
#: Quotients are taken times 2^-21: an addend of 2 then has its last bit at the step of E2M1 below 2, and the
#: exponent of 2 leaves no trace in the codes.
SCALE = tl.constexpr(2.0**-21)
#: It makes scaled quotients below 2 subnormal, those below 4 of biased exponent 1, below 8 of 2, below 16 of 3.
SEGMENT = tl.constexpr(2.0**-106)
#: Bits of 10 · SCALE: codes of quotients up to 10 saturate by the carry into their fourth bit.
LARGEST_BITS = tl.constexpr(((127 + 3 - 21) << 23) + (1 << 21))


@triton.jit
def reciprocal(d):
    """1/d = hi + lo to about 48 bits, for d and 1/d far from the ends of float32. hi is the rounded one."""
    a = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)
    hi = tl.fma(tl.fma(-d, a, 1.0), a, a)
    rest = tl.fma(-d, hi, 1.0)
    lo = rest * hi
    return hi, tl.fma(lo, rest, lo)


@triton.jit
def quotient(y, hi, lo):
    """y / d. Adding +0 makes an exact -0 positive, as a code's sign bit says y < 0."""
    return tl.fma(y, hi, tl.fma(y, lo, 0.0))


@triton.jit
def _addend(h):
    """float32 that rounds a quotient h / SCALE up to 10 to E2M1 when it is added.

    It takes h's sign and has the exponent of 2, or of 4 where the step of E2M1 is twice as large, or of 8: the sum's
    last bit is at that step.
    """
    addend = tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0xFF800000, 0x40000000, 0xEA;",  # (a & b) | c, which ptxas else makes two of
        "=r,r",
        [bits(h * SEGMENT)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return from_bits(addend)


@triton.jit
def rounded_e2m1(h):
    """int32 whose last three bits and exponent hold the E2M1 code of a quotient h / SCALE up to 10, and its sign.

    The code is the last bits and twice what the exponent has grown.
    """
    return bits(h + _addend(h))


@triton.jit
def rounded_value(h):
    """SCALE times the E2M1 value of a quotient h / SCALE up to 10; +0 where the code is a negative zero."""
    a = _addend(h)
    return tl.minimum(tl.maximum((h + a) - a, -6.0 * SCALE), 6.0 * SCALE)


@triton.jit
def code_pair(a, b):
    """Two rounded elements -> the byte of their codes, in the low bits of an int32."""
    both = (b * 16 + a).to(tl.uint32, bitcast=True)
    return (both + (both >> 22)).to(tl.int32, bitcast=True)


@triton.jit
def bytes_of(a, b, SELECT: tl.constexpr):
    """int32 of the four bytes of two that SELECT names, those of b as 4 to 7."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, " + SELECT + ";", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _pack(h, FIRST: tl.constexpr, SATURATE: tl.constexpr):
    """int32 word of the codes of eight scaled quotients."""
    r = ()
    for i in tl.static_range(8):
        r = r + (rounded_e2m1(h[FIRST + i]),)
    low = bytes_of(code_pair(r[0], r[1]), code_pair(r[2], r[3]), "0x0040")
    high = bytes_of(code_pair(r[4], r[5]), code_pair(r[6], r[7]), "0x0040")
    codes = bytes_of(low, high, "0x5410")
    if SATURATE:  # 8 becomes 7
        codes = codes - ((codes >> 3) & 0x11111111)
    signs = r[7].to(tl.uint32, bitcast=True) >> 28
    for i in tl.static_range(7):
        signs = (signs << 4) | (r[6 - i].to(tl.uint32, bitcast=True) >> 28)
    return codes | (signs.to(tl.int32, bitcast=True) & -0x77777778)


@triton.jit
def prepared(g, NORM: tl.constexpr):
    """What blocks take of a global scale, and int32 that is above LARGEST_BITS where they do not hold for it."""
    unfit = tl.where((g >= LEAST_GLOBAL) & (g <= LARGEST_GLOBAL), 0, FP32_INF_BITS)
    hi, lo = reciprocal(g)
    return (g * (1.0 / (SCALE * NORM)), hi, lo), unfit


@triton.jit
def nvfp4_quotients(v, g, FIRST: tl.constexpr, NORM: tl.constexpr, E4M3: tl.constexpr):
    """16 channels -> scaled quotients, scale byte, its float32, largest scaled quotient. v still lacks NORM."""
    amax = largest_magnitude(v, FIRST, 16)
    s = quotient(tl.fma(amax, SIXTH * NORM, amax * (SIXTH_REST * NORM)), g[1], g[2])
    if E4M3:
        small = s.to(tl.float8e4nv)
        wide = small.to(tl.float32)
        stored = small.to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        stored = encode_e4m3(s)
        wide = decode_e4m3(stored)
    m = wide * g[0]
    hi, lo = reciprocal(tl.where(m == 0.0, 1.0 / (SCALE * NORM), m))
    h = ()
    for i in tl.static_range(16):
        h = h + (quotient(v[FIRST + i], hi, lo),)
    return h, stored, wide, amax * hi


@triton.jit
def nvfp4_block(v, g, FIRST: tl.constexpr, NORM: tl.constexpr, E4M3: tl.constexpr):
    """16 channels -> code words, scale byte, largest scaled quotient. v is still to be multiplied by NORM."""
    h, stored, _, largest = nvfp4_quotients(v, g, FIRST, NORM, E4M3)
    return (_pack(h, 0, True), _pack(h, 8, True)), stored, largest


@triton.jit
def mxfp4_quotients(v, FIRST: tl.constexpr, NORM: tl.constexpr, RULE: tl.constexpr):
    """32 channels -> scaled quotients, scale byte; for all values. v is still to be multiplied by NORM."""
    stored = choose(bits(largest_magnitude(v, FIRST, 32) * NORM), 1.0, RULE)
    # SCALE over the divisor 2^(stored - 127), subnormal at the end: products with it are exact, or so small that
    # their code is 0
    inverse = from_bits(tl.where(stored < 233, (233 - stored) << 23, 1 << (255 - stored))) * NORM
    h = ()
    for i in tl.static_range(32):
        h = h + (tl.fma(v[FIRST + i], inverse, 0.0),)
    return h, stored


@triton.jit
def mxfp4_block(v, FIRST: tl.constexpr, NORM: tl.constexpr, RULE: tl.constexpr):
    """32 channels -> code words, scale byte; for all values. v is still to be multiplied by NORM."""
    h, stored = mxfp4_quotients(v, FIRST, NORM, RULE)
    words = ()
    for i in tl.static_range(4):
        words = words + (tl.where(stored == 255, 0, _pack(h, 8 * i, RULE == "e8m0_floor")),)
    return words, stored


@triton.jit
def encoded(v, scale, worst, NORM: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr, E4M3: tl.constexpr):
    """A unit -> code words and scale bytes of its blocks, and worst, the bits of the largest scaled quotient so far.

    v is still to be multiplied by NORM; scale: of NVFP4, as :func:`prepared` gives it.
    """
    codes = ()
    stored = ()
    for j in tl.static_range(len(v) // BLOCK):
        if RULE == "e4m3_global":
            c, s, largest = nvfp4_block(v, scale, j * BLOCK, NORM, E4M3)
            worst = tl.maximum(worst, bits(largest))
        else:
            c, s = mxfp4_block(v, j * BLOCK, NORM, RULE)
        codes = codes + c
        stored = stored + (s,)
    return codes, stored, worst
