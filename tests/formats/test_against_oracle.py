"""The whole quantize, without rotation, against the numpy oracle: every bf16 value, ties, extremes, NaN and Inf."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hadaquant as hq
import oracle
from hadaquant.formats import FORMATS

NAMES = sorted(FORMATS)
MAX = float(np.finfo(np.float32).max)


def check(x: torch.Tensor, name: str, g: float | None = None) -> hq.QuantizedTensor:
    """Codes, scales, global scale and decoded values equal the oracle's, bit for bit. g is for nvfp4; None: dynamic."""
    y = x.to(torch.float32).numpy()
    ours = hq.quantize(x, name, global_scale=g if name == "nvfp4" else None)
    expected = oracle.quantize(y, name, None if g is None else np.float32(g))
    if ours.global_scale is not None and g is None:
        assert ours.global_scale.numpy().view(np.uint32) == oracle.global_scale(y).view(np.uint32)
    codes = expected.codes if name == "int8" else oracle.pack(expected.codes)
    np.testing.assert_array_equal(ours.codes.numpy(), codes)
    np.testing.assert_array_equal(ours.scales.numpy().view(np.uint8), expected.scales.view(np.uint8))
    np.testing.assert_array_equal(ours.dequantize().numpy(), expected.values)
    return ours


# ---- every value of a dtype ---------------------------------------------------------------------


def every_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value(name, dtype):
    values = every_value(dtype)
    check(values.view(256, 256), name, 0.003)  # magnitudes of one block close together; NaN and Inf in blocks of NaN
    shuffled = values[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(7))]
    check(shuffled.view(512, 128), name, 0.003)
    finite = shuffled[shuffled.isfinite()]
    check(finite[: finite.numel() // 128 * 128].view(-1, 128), name)


@pytest.mark.parametrize("name", NAMES)
def test_every_bf16_value_beside_a_fixed_maximum(name):
    """Each value in a block whose scale is one and the same, so that every code is decided by that value."""
    values = every_value(torch.bfloat16)
    values = values[values.abs() <= 6]  # false for NaN
    values = values[: values.numel() // 8 * 8].view(-1, 8)
    x = torch.cat((torch.full((len(values), 1), 6.0, dtype=torch.bfloat16), values), 1)
    check(torch.nn.functional.pad(x, (0, 32 - 9)), name, 1.0)


# ---- NaN and Inf --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bad_values_stay_in_their_block(name, bad, dtype):
    f = FORMATS[name]
    x = torch.randn(6, 96).to(dtype)
    g = 0.001 if f.has_global_scale else None
    clean = hq.quantize(x, name, global_scale=g)
    x[2, 40] = bad
    q = hq.quantize(x, name, global_scale=g)
    block = f.block or 96
    hit = torch.zeros(6, 96, dtype=torch.bool)
    hit[2, 40 // block * block : (40 // block + 1) * block] = True
    packed_hit, scale_hit = hit[:, :: 96 // q.codes.shape[1]], hit[:, ::block]
    scale_hit = scale_hit if f.block else scale_hit[:, 0]
    assert torch.equal(q.codes[~packed_hit], clean.codes[~packed_hit])
    assert torch.equal(q.scales[~scale_hit], clean.scales[~scale_hit])
    assert not q.codes[packed_hit].any()
    mark = {torch.uint8: 0x7F if name == "nvfp4" else 0xFF, torch.float32: 0x7FC00000}[f.scale.dtype]
    stored = q.scales.view(torch.int32) if f.block is None else q.scales
    assert stored[scale_hit].eq(mark).all()
    restored = q.dequantize()
    assert restored[hit].isnan().all() and restored[~hit].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_every_nan_and_payload(name):
    patterns = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000]
    x = torch.randn(len(patterns), 32)
    x.view(torch.int32)[:, 7] = torch.tensor(patterns).to(torch.int32)
    check(x, name, 0.01)


@pytest.mark.parametrize("name", NAMES)
def test_minus_zero(name):
    x = torch.tensor([0.0, -0.0] * 16)[None]
    q = hq.quantize(x, name)
    assert not q.codes.any() and not torch.signbit(q.dequantize()).any()


# ---- drawn values -------------------------------------------------------------------------------

TIES = (*oracle.E2M1_TIES, *oracle.E2M1_VALUES)
magnitudes = st.one_of(
    st.floats(0, MAX, width=32),  # of any size, subnormals too
    st.floats(0, 8, width=32),
    st.sampled_from(TIES),
    st.sampled_from([0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1e-12, 127.0, 448.0, 2688.0, MAX]),
)


@st.composite
def matrices(draw):
    """[M, 64]: a few magnitudes scaled by a power of two, some of them moved to a neighbour, signs."""
    rows = draw(st.integers(1, 3))
    palette = np.array(draw(st.lists(magnitudes, min_size=1, max_size=8)), np.float32)
    which = draw(st.lists(st.integers(0, len(palette) - 1), min_size=rows * 64, max_size=rows * 64))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    with np.errstate(over="ignore", under="ignore"):
        x = np.ldexp(palette[which], draw(st.integers(-20, 20))).astype(np.float32)
        x = np.where(rng.random(x.size) < 0.2, np.nextafter(x, np.float32(rng.choice([0, np.inf]))), x)
    x = np.minimum(x, np.float32(MAX)) * rng.choice(np.array([1, -1], np.float32), x.size)
    return torch.from_numpy(x.reshape(rows, 64))


@pytest.mark.parametrize("name", NAMES)
@given(x=matrices())
def test_drawn(name, x):
    check(x, name)


@given(x=matrices(), mantissa=st.integers(0, 2**23 - 1), exponent=st.integers(1, 254))
def test_drawn_with_any_global_scale(x, mantissa, exponent):
    check(x, "nvfp4", float(np.uint32(exponent << 23 | mantissa).view(np.float32)))


@st.composite
def tied_blocks(draw):
    """A block [1, 16] whose quotients by its own multiplier are exact ties wherever float32 allows it."""
    scale = ml_dtypes.float8_e4m3fn(draw(st.sampled_from([0.9375, 1.0, 1.125, 1.75, 3.0, 13.0, 208.0, 448.0, 2.0**-9])))
    g = np.float32(draw(st.sampled_from([1.0, 2.0**-20, 1.1, 0.00314159, 3e-30, 7e20])))
    m = np.float32(np.float64(scale) * np.float64(g))
    rest = draw(st.lists(st.sampled_from(TIES), min_size=15, max_size=15))
    x = (np.array([6.0, *rest]) * np.float64(m)).astype(np.float32)
    step = draw(st.lists(st.sampled_from([0.0, 0.0, np.inf]), min_size=16, max_size=16))
    x = np.where(np.array(step) > 0, np.nextafter(x, np.float32(np.inf)), x)
    return torch.from_numpy(x)[None], float(g)


@given(block=tied_blocks())
def test_ties_of_scales_that_are_no_powers_of_two(block):
    check(block[0], "nvfp4", block[1])
