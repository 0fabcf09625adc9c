"""Two-term quotients round to the codes of true quotients: every mantissa of the divisor beside every tie.

The exponents do not matter between the limits, so that this proves it. The interpreter tries a sample.
"""

import pytest
import torch
import triton
import triton.language as tl

from hadaquant.kernels import quotients
from hadaquant.kernels.numerics import bits, encode_e2m1, encode_e4m3, from_bits
from hadaquant.ops.plan import interpreting

MANTISSAS = 1 << 23
NEAR = tl.constexpr(4)
E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
#: Of a scale's mantissa, and of its subnormals.
E4M3_TIES = (*(m / 16 for m in range(17, 32, 2)), *((m + 0.5) * 2.0**-9 for m in range(8)))


@pytest.fixture(autouse=True)
def _emulated(device, monkeypatch):
    if interpreting():
        from .emulated import emulate

        emulate(monkeypatch)


@triton.jit
def _wrong_codes(count_ptr, tie, exponent, step, N: tl.constexpr, ELEMENT: tl.constexpr):
    """Count codes of y / d that are not those of the true quotient, for y within NEAR ulps of tie * d."""
    mantissa = (tl.program_id(0) * N + tl.arange(0, N)) * step + step - 1
    d = from_bits(mantissa | (exponent << 23))
    hi, lo = quotients.reciprocal(d)
    wrong = tl.zeros((N,), tl.int32)
    for k in tl.static_range(2 * NEAR + 1):
        y = from_bits(bits(d * tie) + (k - NEAR))
        ours = quotients.quotient(y, hi, lo)
        true = tl.div_rn(y, d)
        if ELEMENT == "e2m1":
            rounded = quotients.rounded_e2m1(ours * quotients.SCALE)
            code = quotients.code_pair(rounded, rounded) & 0xF
            wrong += (code != encode_e2m1(true, y < 0)).to(tl.int32)
        else:
            wrong += (encode_e4m3(ours) != encode_e4m3(true)).to(tl.int32)
    tl.atomic_add(count_ptr, tl.sum(wrong))


@triton.jit
def _wrong_sixths(count_ptr, exponent, step, N: tl.constexpr):
    mantissa = (tl.program_id(0) * N + tl.arange(0, N)) * step + step - 1
    amax = from_bits(mantissa | (exponent << 23))
    sixth = tl.fma(amax, quotients.SIXTH, amax * quotients.SIXTH_REST)
    tl.atomic_add(count_ptr, tl.sum((sixth != tl.div_rn(amax, 6.0)).to(tl.int32)))


def launch(kernel, device: str, *arguments, **constants) -> int:
    count = torch.zeros((), dtype=torch.int32, device=device)
    step = 4096 if interpreting() else 1  # the largest mantissa, all ones, is the hardest and always tried
    n = 1024 if interpreting() else 128
    kernel[(MANTISSAS // step // n,)](count, *arguments, step, N=n, enable_fp_fusion=False, **constants)
    return int(count)


@pytest.mark.parametrize("exponent", [110, 127, 150])
@pytest.mark.parametrize("tie", E2M1_TIES)
def test_codes_beside_ties(tie, exponent, device):
    assert launch(_wrong_codes, device, tie, exponent, ELEMENT="e2m1") == 0


@pytest.mark.parametrize("exponent", [110, 127, 150])
@pytest.mark.parametrize("tie", E4M3_TIES)
def test_scales_beside_ties(tie, exponent, device):
    assert launch(_wrong_codes, device, tie, exponent, ELEMENT="e4m3") == 0


@pytest.mark.parametrize("exponent", [60, 127, 200])
def test_sixths(exponent, device):
    assert launch(_wrong_sixths, device, exponent) == 0


@triton.jit
def _codes(q_ptr, codes_ptr, N: tl.constexpr):
    n = tl.program_id(0) * N + tl.arange(0, N)
    h = tl.load(q_ptr + n) * quotients.SCALE
    rounded = quotients.rounded_e2m1(h)
    code = quotients.code_pair(rounded, rounded) & 0xF
    tl.store(codes_ptr + n, tl.minimum(code, 7) | ((bits(rounded) < 0).to(tl.int32) << 3))


def test_rounding_of_quotients(device):
    from hadaquant.formats.elements import encode_e2m1 as encode

    gen = torch.Generator().manual_seed(0)
    near = torch.tensor([*E2M1_TIES, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    below, above = near, near
    values = [near, torch.rand(60000, generator=gen) * 10, 10 ** (torch.rand(5000, generator=gen) * 36 - 35)]
    for _ in range(8):
        below, above = below.nextafter(torch.tensor(0.0)), above.nextafter(torch.tensor(10.0))
        values += [below, above]
    q = torch.cat(values)
    q = torch.cat((q, -q))
    q = torch.nn.functional.pad(q, (0, -len(q) % 1024), value=1.0)
    codes = torch.empty(len(q), dtype=torch.int32, device=device)
    _codes[(len(q) // 1024,)](q.to(device), codes, N=1024, enable_fp_fusion=False)
    assert torch.equal(codes.cpu().to(torch.uint8), encode(q, q))
