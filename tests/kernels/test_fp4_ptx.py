"""The inline PTX of the FP4 products, interpreted: every code, every scale byte, sums of codes."""

import itertools
import random
import struct

import pytest

from hadaquant.formats.elements import E2M1, decode_e8m0
from hadaquant.ops.plan import interpreting

if interpreting():
    pytest.skip("Gluon does not run in the interpreter", allow_module_level=True)

import torch

from hadaquant.formats.elements import decode_e4m3
from hadaquant.kernels import fp4_words

from .ptx import run

NAN = 0x7FFF


def word(codes: list[int]) -> int:
    return sum(code << (4 * i) for i, code in enumerate(codes))


def text(asm) -> str:
    return asm.value if hasattr(asm, "value") else asm


def test_unpacked_codes_are_twice_the_elements():
    for first in (0, 8):
        codes = [first + i % 8 for i in range(16)]
        *words, start = run(text(fp4_words._UNPACK), {5: word(codes)}, 5)
        values = [v for w in words for v in struct.unpack("<4b", struct.pack("<I", w))]
        assert values == [int(2 * E2M1.values[c]) for c in codes]
        assert start == 0x4B400000 - 140 * sum(values)


def test_sums_of_sixteen_codes_are_exact():
    rng = random.Random(0)
    cases = [([7] * 16, [7] * 16), ([15] * 16, [7] * 16), ([0] * 16, [15] * 16), ([8] * 16, [3] * 16)]
    cases += [([rng.randrange(16) for _ in range(16)], [rng.randrange(16) for _ in range(16)]) for _ in range(300)]
    for x, w in cases:
        unpacked = run(text(fp4_words._UNPACK), {5: word(x)}, 5)
        (bits,) = run(text(fp4_words._DOT), {1: word(w), **{2 + i: v for i, v in enumerate(unpacked)}}, 1)
        found = struct.unpack("<f", struct.pack("<I", bits))[0] - 1.5 * 2**23
        assert found == 4 * sum(E2M1.values[a] * E2M1.values[b] for a, b in zip(x, w, strict=True))


def bf16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


@pytest.mark.parametrize(
    ("rule", "scale_of", "lift"), [("e4m3_global", decode_e4m3, -7), ("e8m0_floor", decode_e8m0, 0)]
)
@pytest.mark.parametrize("sliced", [False, True])
def test_every_code_times_every_scale(rule, scale_of, lift, sliced):
    """Exact, or the interpreted PTX fails; NaN where the scale is."""
    load, pair = fp4_words._load_scales_asm(rule), fp4_words._scales_asm(rule)
    nibbles = [fp4_words._decode_asm(rule, i, sliced) for i in range(8)]
    for first in range(0, 128 if rule == "e4m3_global" else 254, 2):
        stored = run(load, {4: 0}, 4, bytes([first, first + 1]))
        assert stored == ([first, first, first + 1, first + 1] if rule == "e4m3_global" else [first] * 4)
        codes = [[(3 * i + 5 * j + first) % 16 for i in range(8)] for j in range(4)]
        for j, i in itertools.product((0, 2), range(8)):
            scales = run(pair, {2: stored[j], 3: stored[j + 1]}, 2)
            words = {1 + n: word(codes[j + n]) for n in range(2)}
            (both,) = run(nibbles[i], words | {3: scales[0], 4: scales[1]}, 1)
            scale = float(scale_of(torch.tensor(stored[j], dtype=torch.uint8)))
            for n, found in enumerate((both & 0xFFFF, both >> 16)):
                if scale != scale:
                    assert found == NAN
                else:
                    code = codes[j + i // 4][i % 4 + 4 * n] if sliced else codes[j + n][i]
                    assert bf16(found) == E2M1.values[code] * scale * 2.0**lift
