"""A small interpreter of the PTX that kernels write inline: integer and bfloat16x2 instructions, one thread."""

from __future__ import annotations

import re
import struct
from fractions import Fraction

MASK = 0xFFFFFFFF


def run(text: str, inputs: dict[int, int], outputs: int, memory: bytes = b"") -> list[int]:
    """The 32-bit outputs $0 ... of an inline text, given its inputs by number as unsigned integers.

    Loads read ``memory`` at the address in their register.
    """
    registers: dict[str, int] = {f"${i}": v for i, v in inputs.items()}
    text = re.sub(r"//.*", "", text).strip()
    for statement in text.strip("{} \n").split(";"):
        words = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", statement)
        if words and words[0] != ".reg":
            _step(words[0], words[1:], registers, memory)
    return [registers[f"${i}"] & MASK for i in range(outputs)]


def _step(op: str, args: list[str], r: dict[str, int], memory: bytes) -> None:
    def value(a: str) -> int:
        return r[a] if a in r else int(a, 0)

    target, rest = args[0], args[1:]
    if op == "mov.b64":
        low, high = (name.strip() for name in target.strip("{}").split(","))
        r[low], r[high] = value(rest[0]) & MASK, value(rest[0]) >> 32
        return
    if op.startswith("ld.global."):
        at, size = value(rest[0].strip("[]")), {"u8": 1, "u16": 2}[op[10:]]
        r[target] = int.from_bytes(memory[at : at + size], "little")
        return
    v = [value(a) for a in rest]
    r[target] = _OPS[op](*v) & MASK


def _signed(x: int) -> int:
    x &= MASK
    return x - (1 << 32) if x >> 31 else x


def _prmt(a: int, b: int, selectors: int) -> int:
    source = ((b & MASK) << 32 | (a & MASK)).to_bytes(8, "little")
    out = 0
    for i in range(4):
        s = selectors >> (4 * i) & 15
        byte = source[s & 7]
        if s & 8:
            byte = 0xFF if byte >> 7 else 0
        out |= byte << (8 * i)
    return out


def _dp4a(a: int, b: int, c: int, signed_a: bool) -> int:
    def parts(x: int, signed: bool) -> list[int]:
        return [int.from_bytes([x >> (8 * i) & 255], "little", signed=signed) for i in range(4)]

    return _signed(c) + sum(p * q for p, q in zip(parts(a, signed_a), parts(b, True), strict=True))


def _bf16(x: int) -> float:
    return struct.unpack("<f", struct.pack("<I", x << 16))[0]


def _fma_bf16x2(a: int, b: int, c: int) -> int:
    """Only products, c being -0: exact ones, or it fails."""
    out = 0
    for shift in (0, 16):
        p, q, zero = (x >> shift & 0xFFFF for x in (a, b, c))
        if zero != 0x8000:
            raise ValueError("the third operand is not -0")
        p, q = _bf16(p), _bf16(q)
        if p != p or q != q:
            out |= 0x7FFF << shift
            continue
        exact = Fraction(p) * Fraction(q)
        bits = struct.unpack("<I", struct.pack("<f", float(exact)))[0]
        if exact == 0 and (struct.pack("<f", p)[3] ^ struct.pack("<f", q)[3]) & 0x80:
            bits = 0x80000000
        if bits & 0xFFFF or Fraction(_bf16(bits >> 16)) != exact:
            raise ValueError(f"{p} * {q} is not exact")
        out |= (bits >> 16) << shift
    return out


_OPS = {
    "mov.b32": lambda a: a,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: (a & MASK) >> n,
    "sub.s32": lambda a, b: a - b,
    "mad.lo.s32": lambda a, b, c: _signed(a) * _signed(b) + _signed(c),
    "prmt.b32": _prmt,
    "dp4a.u32.s32": lambda a, b, c: _dp4a(a, b, c, False),
    "dp4a.s32.s32": lambda a, b, c: _dp4a(a, b, c, True),
    "fma.rn.bf16x2": _fma_bf16x2,
    "setp.eq.u32": lambda a, b: int(a & MASK == b & MASK),
    "selp.b32": lambda a, b, p: a if p else b,
}
