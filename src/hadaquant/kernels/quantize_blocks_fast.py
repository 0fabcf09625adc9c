"""FP4 rotate -> scale -> encode -> pack at memory speed, for NVIDIA; twin of ``quantize_blocks_kernel``.

One thread owns one unit, a block or a group of channels, whichever is larger, so nothing crosses threads: no
shared memory, no shuffles. 2.5625 bytes an element move (nvfp4 from bfloat16) and device memory is the roof,
if the instructions are few: at the speed of a copy an H200 has twenty for each element. Hence

* quotients by the reciprocal in two terms, 1/d = hi + lo to 48 bits, taken once a block: y·hi + (y·lo) rounds
  to the code of the true quotient (shown for every mantissa of d in test_quantize_blocks_fast.py);
* E2M1 in three instructions: an addend whose exponent follows the quotient's rounds it at the right bit;
* two codes leave their additions with one multiply and one shift-and-add.

What these do not hold for (NaN, Inf, elements above ten times their divisor, a global scale outside 2^±60) is
seen by the largest quotient, and the program then does all of its blocks again by true division.
"""

from typing import Any

import triton
import triton.language as tl

from hadaquant.formats import Format
from hadaquant.kernels.numerics import (
    bits,
    choose,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    from_bits,
    magnitude_bits,
    multiplier,
)
from hadaquant.kernels.runtime import OPTIONS
from hadaquant.rotation import Rotation, norm, stages

#: 1/6 in two terms.
SIXTH = tl.constexpr(0.16666667163372039794921875)
SIXTH_REST = tl.constexpr(-4.967053879312289e-09)
#: Global scales for which no intermediate number is subnormal or infinite.
LEAST_GLOBAL = tl.constexpr(2.0**-60)
LARGEST_GLOBAL = tl.constexpr(2.0**60)
#: Quotients are taken times 2^-21: an addend of 2 then has its last bit at the step of E2M1 below 2, and the
#: exponent of 2 leaves no trace in the codes.
SCALE = tl.constexpr(2.0**-21)
#: It makes quotients below 2 subnormal, those below 4 of biased exponent 1, below 8 of 2, below 16 of 3.
SEGMENT = tl.constexpr(2.0**-106)
#: Bits of the largest quotient whose code saturates by the carry into its fourth bit, 10 * SCALE.
LARGEST_BITS = tl.constexpr((127 + 3 - 21 << 23) + (1 << 21))


def constants(rotation: Rotation) -> tuple[object, ...]:
    """Compile-time description of a rotation: kind, group, strides of its stages, norm, whether it has signs."""
    if rotation.kind == "none":
        return "none", 1, (), 1.0, False
    strides = tuple(stride for _, stride in stages(rotation.group))
    return rotation.kind, rotation.group, strides, norm(rotation.group), rotation.signs is not None


@triton.jit
def _load(x_ptr, WORDS: tl.constexpr):
    """WORDS 64-bit words of each thread, 16 bytes a load."""
    words = ()
    two = tl.arange(0, 2)
    for i in tl.static_range(WORDS // 2):
        low, high = tl.split(tl.load(x_ptr[:, None] + (2 * i + two)[None, :]))
        words = words + (low, high)
    return words


@triton.jit
def _widen(words, DTYPE: tl.constexpr):
    """float32 values, exact."""
    v = ()
    for i in tl.static_range(len(words)):
        for half in tl.static_range(2):
            w = (words[i] >> (32 * half)).to(tl.int32)
            if tl.float32 == DTYPE:
                v = v + (from_bits(w),)
            elif tl.bfloat16 == DTYPE:
                v = v + (from_bits(w << 16), from_bits(w & -65536))
            else:
                low = w.to(tl.int16).to(tl.float16, bitcast=True)
                high = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True)
                v = v + (low.to(tl.float32), high.to(tl.float32))
    return v


@triton.jit
def _stage(v, ROTATION: tl.constexpr, S: tl.constexpr):
    """One butterfly stage over registers S apart."""
    KIND: tl.constexpr = ROTATION[0]
    RADIX: tl.constexpr = 4 if ROTATION[1] >= 4 * S else 2
    out = ()
    for base in tl.static_range(0, len(v), RADIX * S):
        y0 = ()
        y1 = ()
        y2 = ()
        y3 = ()
        for i in tl.static_range(base, base + S):
            if RADIX == 2:
                y0 = y0 + (v[i] + v[i + S],)
                y1 = y1 + (v[i] - v[i + S],)
            else:
                a = v[i] + v[i + S]
                b = v[i + 2 * S] + v[i + 3 * S]
                c = v[i] - v[i + S]
                d = v[i + 2 * S] - v[i + 3 * S]
                if KIND == "regular":
                    y0 = y0 + (a + d,)
                    y1 = y1 + (a - d,)
                    y2 = y2 + (b + c,)
                    y3 = y3 + (b - c,)
                else:
                    y0 = y0 + (a + b,)
                    y1 = y1 + (c + d,)
                    y2 = y2 + (a - b,)
                    y3 = y3 + (c - d,)
        out = out + y0 + y1 + y2 + y3
    return out


@triton.jit
def _scaled(v, factor):
    out = ()
    for i in tl.static_range(len(v)):
        out = out + (v[i] * factor,)
    return out


@triton.jit
def _rotate(v, signs_ptr, ROTATION: tl.constexpr, FOLD: tl.constexpr):
    """Rotated values, without the norm if that is to be folded into the divisors."""
    if ROTATION[4]:
        signed = ()
        for i in tl.static_range(len(v)):
            signed = signed + (v[i] * tl.load(signs_ptr + i % ROTATION[1]),)
        v = signed
    for i in tl.static_range(len(ROTATION[2])):
        v = _stage(v, ROTATION, ROTATION[2][i])
    if ROTATION[0] != "none" and not FOLD:
        v = _scaled(v, ROTATION[3])
    return v


@triton.jit
def _largest(v):
    """Largest magnitude; NaN if there is one."""
    m = tl.abs(v[0])
    for i in tl.static_range(1, len(v)):
        m = tl.maximum(m, tl.abs(v[i]), propagate_nan=tl.PropagateNan.ALL)
    return m


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
    """y / d. Adding +0 makes an exact -0 positive, as the sign bit of a code is y < 0."""
    return tl.fma(y, hi, tl.fma(y, lo, 0.0))


@triton.jit
def rounded_e2m1(h):
    """int32 bits whose last three and whose exponent hold the E2M1 code of a quotient h / SCALE up to 10, and its sign.

    The addend takes h's sign and has the exponent of 2, or of 4 where the step of E2M1 is twice as large, or of
    8: adding it rounds h at that step. The code is the last bits and twice what the exponent has grown.
    """
    addend = tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0xFF800000, 0x40000000, 0xEA;",  # (a & b) | c
        "=r,r",
        [bits(h * SEGMENT)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return bits(h + from_bits(addend))


@triton.jit
def _gather_bytes(a, b, SELECT: tl.constexpr):
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, " + SELECT + ";", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _pair(a, b):
    """Two rounded elements -> the byte of their codes, in the low bits."""
    both = b * 16 + a
    return both + (both.to(tl.uint32, bitcast=True) >> 22).to(tl.int32, bitcast=True)


@triton.jit
def _pack(h, FIRST: tl.constexpr, SATURATE: tl.constexpr):
    """int32 word of the codes of eight quotients."""
    r = ()
    for i in tl.static_range(8):
        r = r + (rounded_e2m1(h[FIRST + i]),)
    low = _gather_bytes(_pair(r[0], r[1]), _pair(r[2], r[3]), "0x0040")
    high = _gather_bytes(_pair(r[4], r[5]), _pair(r[6], r[7]), "0x0040")
    codes = _gather_bytes(low, high, "0x5410")
    if SATURATE:  # 8 becomes 7
        codes = codes - ((codes >> 3) & 0x11111111)
    signs = r[7].to(tl.uint32, bitcast=True) >> 28
    for i in tl.static_range(7):
        signs = (signs << 4) | (r[6 - i].to(tl.uint32, bitcast=True) >> 28)
    return codes | (signs.to(tl.int32, bitcast=True) & -0x77777778)


@triton.jit
def _nvfp4(v, g, FIRST: tl.constexpr, NORM: tl.constexpr, E4M3: tl.constexpr):
    """16 values, still to be multiplied by NORM -> two code words, scale byte, largest quotient."""
    v = v[FIRST : FIRST + 16]
    amax = _largest(v)
    sixth = tl.fma(amax, SIXTH * NORM, amax * (SIXTH_REST * NORM))
    s = quotient(sixth, g[1], g[2])
    if E4M3:
        stored = s.to(tl.float8e4nv)
        m = stored.to(tl.float32) * g[0]
        stored = stored.to(tl.uint8, bitcast=True)
    else:
        stored = encode_e4m3(s)
        m = decode_e4m3(stored) * g[0]
        stored = stored.to(tl.uint8)
    d = tl.where(m == 0.0, 1.0 / (SCALE * NORM), m)
    hi, lo = reciprocal(d)
    h = ()
    for i in tl.static_range(16):
        h = h + (quotient(v[i], hi, lo),)
    return (_pack(h, 0, True), _pack(h, 8, True)), stored, amax * hi


@triton.jit
def _mxfp4(v, FIRST: tl.constexpr, NORM: tl.constexpr, RULE: tl.constexpr):
    """32 values, still to be multiplied by NORM -> four code words, scale byte."""
    v = v[FIRST : FIRST + 32]
    stored = choose(bits(_largest(v) * NORM), 1.0, RULE)
    # SCALE over the divisor 2^(stored - 127), subnormal at the end: products with it are exact, or so small that
    # their code is 0
    inverse = from_bits(tl.where(stored < 233, (233 - stored) << 23, 1 << (255 - stored))) * NORM
    h = ()
    for i in tl.static_range(32):
        h = h + (tl.fma(v[i], inverse, 0.0),)
    words = ()
    for i in tl.static_range(4):
        word = _pack(h, 8 * i, RULE == "e8m0_floor")
        words = words + (tl.where(stored == 255, 0, word),)
    return words, stored.to(tl.uint8)


@triton.jit
def _exactly(v, g, FIRST: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, RULE: tl.constexpr):
    """One block by the contract's own steps, for any values: code words and scale byte."""
    y = ()
    amax = magnitude_bits(v[FIRST] * NORM)
    for i in tl.static_range(BLOCK):
        y = y + (v[FIRST + i] * NORM,)
        amax = tl.maximum(amax, magnitude_bits(y[i]))
    stored = choose(amax, g, RULE)
    m = multiplier(stored, g, RULE)
    d = tl.where(m == 0.0, 1.0, m)
    words = ()
    for i in tl.static_range(BLOCK // 8):
        word = encode_e2m1(tl.div_rn(y[8 * i], d), y[8 * i] < 0)
        for j in tl.static_range(1, 8):
            word = word | (encode_e2m1(tl.div_rn(y[8 * i + j], d), y[8 * i + j] < 0) << (4 * j))
        words = words + (word,)
    return words, stored.to(tl.uint8)


@triton.jit
def _wide(low, high):
    """Two 32-bit integers -> one of 64 bits."""
    return low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def _store_codes(codes_ptr, words, mask, MASKED: tl.constexpr):
    """Code words to 64-bit places, 16 bytes a store where there are as many."""
    two = tl.arange(0, 2)
    for i in tl.static_range(len(words) // 4):
        both = tl.join(_wide(words[4 * i], words[4 * i + 1]), _wide(words[4 * i + 2], words[4 * i + 3]))
        where = codes_ptr[:, None] + (2 * i + two)[None, :]
        if MASKED:
            tl.store(where, both, mask=mask[:, None])
        else:
            tl.store(where, both)
    if len(words) == 2:
        if MASKED:
            tl.store(codes_ptr, _wide(words[0], words[1]), mask=mask)
        else:
            tl.store(codes_ptr, _wide(words[0], words[1]))


@triton.jit
def _again(xs, cs, ss, g, signs_ptr, n, N: tl.constexpr, B: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
           RULE: tl.constexpr, ROTATION: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, FOLD: tl.constexpr,
           LEFT: tl.constexpr):  # fmt: skip
    """All blocks of a program by the contract's own steps."""
    for i in range(B):
        v = _rotate(_widen(_load(xs + i * (N * WORDS), WORDS), DTYPE), signs_ptr, ROTATION, FOLD)
        words = ()
        for j in tl.static_range(UNIT // BLOCK):
            w, stored = _exactly(v, g, j * BLOCK, BLOCK, LEFT, RULE)
            words = words + w
            tl.store(ss + i * (N * (UNIT // BLOCK)) + j, stored)
        _store_codes(cs + i * (N * (UNIT // 16)), words, n < N, False)


@triton.jit
def quantize_blocks_fast_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    global_ptr,
    signs_ptr,
    units,
    N: tl.constexpr,
    B: tl.constexpr,
    AHEAD: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    RULE: tl.constexpr,
    E4M3: tl.constexpr,
    ROTATION: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = UNIT * DTYPE.primitive_bitwidth // 64
    NORM: tl.constexpr = ROTATION[3]
    FOLD: tl.constexpr = DTYPE.primitive_bitwidth == 16 and (NORM == 0.5 or NORM == 0.25 or NORM == 0.125)
    LEFT: tl.constexpr = NORM if FOLD else 1.0
    SCALED: tl.constexpr = RULE == "e4m3_global"
    n = tl.arange(0, N)
    # the last programs first: what a reader of x before this left in the L2 cache is its end
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    # the last program steps back to be whole
    first = tl.minimum(program.to(tl.int64) * (B * N), units - B * N)
    xs = x_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + first * WORDS + n * WORDS
    cs = codes_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + first * (UNIT // 16) + n * (UNIT // 16)
    ss = scales_ptr + first * (UNIT // BLOCK) + n * (UNIT // BLOCK)
    worst = tl.zeros((N,), tl.int32)
    g = 1.0
    scale = ()
    if SCALED:
        g = tl.load(global_ptr)
        good = (g >= LEAST_GLOBAL) & (g <= LARGEST_GLOBAL)
        worst += tl.where(good, 0, 0x7F800000)
        hi, lo = reciprocal(g)
        scale = (g * (1.0 / (SCALE * LEFT)), hi, lo)
    loaded = ()
    if AHEAD:
        for i in tl.static_range(B):
            loaded = loaded + _load(xs + i * (N * WORDS), WORDS)
    for i in tl.static_range(B):
        if AHEAD:
            raw = loaded[i * WORDS : (i + 1) * WORDS]
        else:
            raw = _load(xs + i * (N * WORDS), WORDS)
        v = _rotate(_widen(raw, DTYPE), signs_ptr, ROTATION, FOLD)
        words = ()
        for j in tl.static_range(UNIT // BLOCK):
            if SCALED:
                w, stored, largest = _nvfp4(v, scale, j * BLOCK, LEFT, E4M3)
                worst = tl.maximum(worst, bits(largest))
            else:
                w, stored = _mxfp4(v, j * BLOCK, LEFT, RULE)
            words = words + w
            tl.store(ss + i * (N * (UNIT // BLOCK)) + j, stored)
        _store_codes(cs + i * (N * (UNIT // 16)), words, n < N, False)
    if SCALED:  # noqa: SIM102 - compile-time, then run-time
        if tl.max(worst) > LARGEST_BITS:
            _again(xs, cs, ss, g, signs_ptr, n, N, B, UNIT, BLOCK, RULE, ROTATION, DTYPE, WORDS, FOLD, LEFT)


#: Channels of the largest unit that a thread's registers hold.
LARGEST_UNIT = 128


def config(format: Format, rotation: Rotation, native_e4m3: bool, warps: int = 2, each: int = 4) -> dict[str, Any]:
    """Compile-time arguments and launch options: ``each`` units for each thread of ``warps`` warps."""
    return {
        "N": 32 * warps,
        "B": each,
        "AHEAD": False,
        "UNIT": max(format.block or 1, rotation.group),
        "BLOCK": format.block,
        "RULE": format.scale.name,
        "E4M3": native_e4m3,
        "ROTATION": constants(rotation),
        "num_warps": warps,
        **OPTIONS,
    }
