"""Packed E2M1 words and their scale bytes in a thread's registers, as inline PTX for Gluon kernels.

Two ways to multiply codes. As integers: twice an element's value is one of 0, ±1, ±2, ±3, ±4, ±6, ±8, ±12,
so 16 products of codes sum exactly on the integer cores, four an instruction. As bfloat16: code · scale has at
most six significant bits and is exact.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hadaquant.kernels.numerics import E4M3_NAN, FP32_NAN_BITS, decode_e8m0

#: Bytes 140 + v and 140 - v, v being twice the element's value, of the eight magnitudes. All have their top
#: bit set: prmt turns a selector whose sign bit is set into 0xFF, so that an AND of both picks the right one.
_PLUS = "0x8F8E8D8C, 0x98949290"
_MINUS = "0x898A8B8C, 0x80848688"
#: The bits of 1.5 * 2**23: a small integer added to them is the same integer added to the float.
_ROUND_BITS = 0x4B400000


def _bytes_of(word: str, first: str, second: str) -> str:
    """PTX that makes bytes v = 140 + value of four codes of a word and does ``first``, then of the next four."""
    four = f"prmt.b32 p, {_PLUS}, {word}; prmt.b32 v, {_MINUS}, n; and.b32 v, v, p; "
    shift = f"shr.u32 {word}, {word}, 16; shr.u32 n, n, 16; "
    return f"xor.b32 n, {word}, 0x88888888; {four}{first} {shift}{four}{second} "


def _unpack_asm() -> str:
    """16 codes -> int8 values in four words, and the start of a sum that :func:`_dot_asm` wants."""
    signed = "sub.s32 v, v, 0x0C0C0C0C; xor.b32 {out}, v, 0x80808080; dp4a.s32.s32 s, {out}, 0x01010101, s;"
    text = "{ .reg .b32 lo, hi, n, p, v, s; mov.b64 {lo, hi}, $5; mov.b32 s, 0; "
    for i, word in enumerate(("lo", "hi")):
        first, second = (signed.format(out=f"${2 * i + half}") for half in range(2))
        text += _bytes_of(word, first, second)
    return text + f"mad.lo.s32 $4, s, -140, {_ROUND_BITS}; }}"


def _dot_asm() -> str:
    """Float 1.5 * 2**23 + the sum of 16 products of codes and unpacked values."""
    text = "{ .reg .b32 lo, hi, n, p, v, s; mov.b64 {lo, hi}, $1; mov.b32 s, $6; "
    for i, word in enumerate(("lo", "hi")):
        first, second = (f"dp4a.u32.s32 s, v, ${2 + 2 * i + half}, s;" for half in range(2))
        text += _bytes_of(word, first, second)
    return text + "mov.b32 $0, s; }"


_UNPACK, _DOT = gl.constexpr(_unpack_asm()), gl.constexpr(_dot_asm())


@gluon.jit
def unpack_codes(words):
    return gl.inline_asm_elementwise(
        _UNPACK, "=r,=r,=r,=r,=r,l", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def dot_codes(words, x0, x1, x2, x3, start):
    return gl.inline_asm_elementwise(
        _DOT, "=f,l,r,r,r,r,r", [words, x0, x1, x2, x3, start], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def wide_scale(stored, RULE: gl.constexpr):
    """float32 scale; an E4M3 byte is moved to a float's exponent and mantissa, which makes it 2**-120 too small."""
    byte = stored.to(gl.int32)
    if RULE == "e4m3_global":
        return gl.where(byte == E4M3_NAN, FP32_NAN_BITS, byte << 20).to(gl.float32, bitcast=True)
    else:
        return decode_e8m0(byte)


@gluon.constexpr_function
def _scales_asm(rule):
    """A scale byte -> a pair of bfloat16 for two words; an E4M3 scale times 2**119."""
    if rule == "e4m3_global":
        text = "{ .reg .b32 a, up, on, nz; .reg .pred p; mov.b32 up, 0x7B807B80; mov.b32 on, 0x7B007B00; "
        text += "mov.b32 nz, 0x80008000; prmt.b32 a, $2, 0, 0x4040; shl.b32 a, a, 4; setp.eq.u32 p, a, 0x07F007F0; "
        text += "fma.rn.bf16x2 a, a, up, nz; fma.rn.bf16x2 a, a, on, nz; selp.b32 a, 0x7FFF7FFF, a, p; "
    else:
        text = "{ .reg .b32 a; .reg .pred p; prmt.b32 a, $2, 0, 0x4040; shl.b32 a, a, 7; "
        text += (
            "setp.eq.u32 p, $2, 0; selp.b32 a, 0x00400040, a, p; setp.eq.u32 p, $2, 255; selp.b32 a, 0x7FFF7FFF, a, p; "
        )
    return text + "mov.b32 $0, a; mov.b32 $1, a; // $3\n}"


@gluon.constexpr_function
def _decode_asm(rule, i, sliced):
    """Two codes of two words, and the words' scales -> two bfloat16: code · scale, for E4M3 times 2**-7.

    Nibble i of each word; or, ``sliced``, nibbles i and i + 4 of the first, for i >= 4 nibbles i - 4 and i of the
    second: both halves of a register then come from one word by the same shifts.
    """
    q, half = i % 4, ("0x5410" if i < 4 else "0x7632")
    text = "{ .reg .b32 a, b, t, up, nz; mov.b32 up, 0x7E807E80; mov.b32 nz, 0x80008000; "
    text += f"mov.b32 t, {'$1' if i < 4 else '$2'}; " if sliced else f"prmt.b32 t, $1, $2, {half}; "
    text += f"shl.b32 a, t, {12 - 4 * q}; "
    text += f"shl.b32 b, t, {6 - 4 * q}; " if q < 2 else f"shr.u32 b, t, {4 * q - 6}; "
    text += "and.b32 a, a, 0x80008000; and.b32 b, b, 0x01C001C0; or.b32 a, a, b; "
    if rule != "e4m3_global":
        text += "fma.rn.bf16x2 a, a, up, nz; "
    return text + "fma.rn.bf16x2 $0, a, $3, nz; // $4\n}"


@gluon.jit
def paired_scales(byte, RULE: gl.constexpr):
    """Scale bytes, equal for both words of a pair -> bfloat16 pairs as int32; E4M3 scales times 2**119."""
    return gl.inline_asm_elementwise(_scales_asm(RULE), "=r,=r,r,r", [byte], dtype=gl.int32, is_pure=True, pack=2)


@gluon.jit
def decode_nibble(words, scales, RULE: gl.constexpr, i: gl.constexpr):
    """Nibble i of each word times its scale in bfloat16, exact; for E4M3 times 2**-7."""
    return gl.inline_asm_elementwise(
        _decode_asm(RULE, i, False), "=r,r,r,r,r", [words, scales], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def decode_slice(words, scales, RULE: gl.constexpr, i: gl.constexpr):
    """As :func:`decode_nibble`, of codes in the order of ``gemm_fp4.interleaved``: one instruction of six less."""
    return gl.inline_asm_elementwise(
        _decode_asm(RULE, i, True), "=r,r,r,r,r", [words, scales], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.constexpr_function
def _load_scales_asm(rule):
    """Scale bytes of 32 codes at an address -> one for each of their four words."""
    if rule == "e4m3_global":
        text = "{ .reg .b32 v; ld.global.u16 v, [$4]; and.b32 $0, v, 255; mov.b32 $1, $0; shr.u32 $2, v, 8; "
        return text + "mov.b32 $3, $2; // $5 $6 $7\n}"
    return "ld.global.u8 $0, [$4]; mov.b32 $1, $0; mov.b32 $2, $0; mov.b32 $3, $0; // $5 $6 $7"


@gluon.jit
def load_scales(addresses, RULE: gl.constexpr, PURE: gl.constexpr):
    """Scale bytes of 32 codes at each fourth address, one for each of their four words."""
    return gl.inline_asm_elementwise(
        _load_scales_asm(RULE), "=r,=r,=r,=r,l,l,l,l", [addresses], dtype=gl.int32, is_pure=PURE, pack=4
    )


@gluon.jit
def load_eight(addresses):
    """The four registers of eight bfloat16 at each address."""
    return gl.inline_asm_elementwise(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [addresses],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
