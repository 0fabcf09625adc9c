"""E2M1, INT8, E4M3 and E8M0 against ml_dtypes, every code and every decision boundary."""

import ml_dtypes
import numpy as np
import pytest
import torch

from hadaquant.formats.elements import (
    E2M1,
    INT8,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_int8,
    encode_e2m1,
    encode_e4m3,
    encode_int8,
)

BYTES = torch.arange(256, dtype=torch.uint8)
INF = np.float32(np.inf)


def bits(t: torch.Tensor) -> list[int]:
    return t.view(torch.int32).tolist()


def ml(values: torch.Tensor, dtype) -> torch.Tensor:
    return torch.from_numpy(values.numpy().astype(dtype).view(np.uint8))


def with_neighbours(values) -> torch.Tensor:
    """Each number with the two float32 numbers below and above it."""
    v = np.asarray(values, np.float32)
    below, above = np.nextafter(v, -INF), np.nextafter(v, INF)
    return torch.from_numpy(np.concatenate((np.nextafter(below, -INF), below, v, above, np.nextafter(above, INF))))


# ---- scales -------------------------------------------------------------------------------------


def test_all_e4m3_bytes():
    ours, theirs = decode_e4m3(BYTES), torch.from_numpy(BYTES.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    number = ~theirs.isnan()
    assert bits(ours[number]) == bits(theirs[number])
    assert ours.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_all_e8m0_bytes():
    ours, theirs = decode_e8m0(BYTES), torch.from_numpy(BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert bits(ours[:255]) == bits(theirs[:255])
    assert bits(ours[255:]) == [0x7FC00000] and theirs[255].isnan()


def test_e4m3_round_trip():
    numbers = BYTES[:0x7F]  # scales have no sign
    assert torch.equal(encode_e4m3(decode_e4m3(numbers)), numbers)


def test_n1_what_a_cast_of_the_interpreter_gets_wrong():
    s = torch.tensor([126.2386, 31.6051, 1.0625, 464.0, 1000.0, float("nan"), 7.9839, 31.8698, 7.0, 3.9])
    assert decode_e4m3(encode_e4m3(s))[:5].tolist() == [128, 32, 1.0, 448, 448]
    assert encode_e4m3(s)[5] == 0x7F
    assert decode_e4m3(encode_e4m3(s))[6:].tolist() == [8, 32, 7, 4]


def test_n2_rounded_once():
    s = torch.tensor([400.199585, 272.156555, 136.002075])
    assert decode_e4m3(encode_e4m3(s)).tolist() == [416, 288, 144]


def test_n2_four_million_samples():
    gen = torch.Generator().manual_seed(2)
    s = (torch.rand(1 << 21, generator=gen) * 448, torch.exp2(torch.rand(1 << 21, generator=gen) * 26 - 17))
    for samples in s:
        samples = samples.clamp(max=448)
        assert torch.equal(encode_e4m3(samples), ml(samples, ml_dtypes.float8_e4m3fn))


def test_e4m3_every_decision_boundary():
    values = decode_e4m3(BYTES[:0x7F])
    s = with_neighbours((values[:-1] + values[1:]).numpy() / 2)
    assert torch.equal(encode_e4m3(s), ml(s, ml_dtypes.float8_e4m3fn))
    s = with_neighbours(values.numpy()).clamp(0, 448)
    assert torch.equal(encode_e4m3(s), ml(s, ml_dtypes.float8_e4m3fn))


def test_n3_e4m3_saturates():
    s = torch.tensor([448.0, 463.9, 464.0, 465.0, 480.0, 1000.0, 3.4e38, float("inf")])
    assert encode_e4m3(s).tolist() == [0x7E] * 8


# ---- elements -----------------------------------------------------------------------------------


def test_e2m1_values_are_the_codes():
    codes = torch.arange(16, dtype=torch.uint8)
    theirs = torch.from_numpy(codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    assert bits(decode_e2m1(codes)) == bits(theirs) == bits(torch.tensor(E2M1.values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_n9_ties_to_even(dtype):
    q = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=dtype).to(torch.float32)
    assert decode_e2m1(encode_e2m1(q, q)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert decode_e2m1(encode_e2m1(-q, -q)).tolist() == [0, -1, -1, -2, -2, -4, -4]


def test_n10_no_narrower_step_before_the_code():
    q = torch.tensor([6, 2.500004, 0.7499999, 1.2500001, 5.000001, 3.4999998])
    assert decode_e2m1(encode_e2m1(q, q)).tolist() == [6, 3, 0.5, 1.5, 6, 3]


def test_e2m1_every_boundary_and_many_samples():
    gen = torch.Generator().manual_seed(4)
    exponents = torch.rand(1 << 18, generator=gen) * 280 - 150
    q = torch.cat(
        (
            with_neighbours([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 1e30]),
            torch.rand(1 << 18, generator=gen) * 8,
            torch.exp2(exponents),
        )
    ).abs()
    for x in (q, -q):
        ours, theirs = encode_e2m1(x, x), ml(x, ml_dtypes.float4_e2m1fn)
        assert torch.equal(torch.where(x == 0, ours & 7, ours), torch.where(x == 0, theirs & 7, theirs))


def test_e2m1_sign_is_that_of_the_numerator():
    zero = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0])
    y = torch.tensor([0.0, -0.0, -1e-40, 1e-40, float("nan")])
    assert encode_e2m1(zero, y).tolist() == [0, 0, 8, 0, 0]
    nan = torch.full((2,), float("nan"))
    assert encode_e2m1(nan, torch.tensor([-1.0, 1.0])).tolist() == [0, 0]


def test_n16_int8_ties():
    q = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 126.5, 127])
    assert encode_int8(q, q).tolist() == [0, 2, 2, 0, -2, -2, 0, 126, 127]


def test_int8_every_boundary():
    halves = np.arange(-260, 261, dtype=np.float32) / 2
    q = with_neighbours(halves)
    expected = q.to(torch.float64).round().clamp(-127, 127).to(torch.int8)
    assert torch.equal(encode_int8(q, q), expected)
    assert encode_int8(torch.tensor([float("nan"), 1e30, -1e30]), q[:3]).tolist() == [0, 127, -127]


def test_int8_values_are_the_codes():
    codes = torch.arange(-127, 128, dtype=torch.int8)
    assert decode_int8(codes).tolist() == list(INT8.values)


def test_widths():
    assert (E2M1.bits, E2M1.packed, E2M1.max) == (4, True, 6.0)
    assert (INT8.bits, INT8.packed, INT8.max) == (8, False, 127.0)
