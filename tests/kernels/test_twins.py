"""The kernels give the reference's bytes: every format, rotation, dtype, tile, tail and nasty value."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hadaquant as hq
from hadaquant import layout, reference
from hadaquant.formats import FORMATS, get_format
from hadaquant.rotation import Rotation, parse

FORMAT_NAMES = sorted(FORMATS)
ROTATIONS = (
    "none",
    "sylvester:2",
    "sylvester:8",
    "sylvester:16",
    "sylvester:32",
    "sylvester:128",
    "sylvester:256",
    "regular:4",
    "regular:16",
    "regular:64",
    "regular:256",
    "regular:1024",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
G = 0.003


def as_bits(t: torch.Tensor) -> torch.Tensor:
    return t.cpu().view(torch.int32) if t.dtype == torch.float32 else t.cpu()


def assert_same(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    a, b = as_bits(a), as_bits(b)
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)} != {tuple(b.shape)}"
    wrong = (a != b).nonzero()
    assert not len(wrong), (
        f"{what}: {len(wrong)} differ, first at {wrong[0].tolist()}: {a[tuple(wrong[0])]} != {b[tuple(wrong[0])]}"
    )


def both(x: torch.Tensor, format: str, device: str, **how):
    """The kernel's and the reference's result, compared byte for byte."""
    if get_format(format).has_global_scale:
        how.setdefault("global_scale", G)
    rotation = how.pop("rotation", "none")
    ours = hq.quantize(x.to(device), format, rotation=rotation, backend="triton", **how)
    oracle = hq.quantize(x, format, rotation=rotation, backend="reference", **how)
    assert_same(ours.codes, oracle.codes, "codes")
    assert_same(ours.scales, oracle.scales, "scales")
    return oracle


def nasty(rows: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of many magnitudes: ordinary, zero, NaN, Inf, tiny, huge, one outlier, negative zero."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=gen) * torch.randn(rows, 1, generator=gen).mul(2).exp()
    big = 3e4 if dtype == torch.float16 else 1e30
    for row, change in enumerate(
        (
            lambda r: r.zero_(),
            lambda r: r[7].fill_(float("nan")),
            lambda r: r[-1].fill_(float("-inf")),
            lambda r: r.mul_(1e-38),
            lambda r: r.mul_(big / r.abs().max()),
            lambda r: r[3].fill_(100.0),
            lambda r: r.fill_(-0.0),
        )
    ):
        if row + 1 < rows:
            change(x[row + 1])
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_same_bytes(format, rotation, dtype, device):
    both(nasty(9, 1024, dtype), format, device, rotation=rotation)


@pytest.mark.parametrize("kind", ["sylvester", "regular"])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_same_bytes_with_signs(format, kind, device):
    signs = torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(1)) * 2 - 1
    x = nasty(9, 192, torch.bfloat16)
    ours = hq.quantize(
        x.to(device), format, rotation=Rotation(kind, 64, signs=signs), backend="triton", global_scale=g_of(format)
    )
    oracle = hq.quantize(x, format, rotation=Rotation(kind, 64, signs=signs), global_scale=g_of(format))
    assert_same(ours.codes, oracle.codes, "codes")
    assert_same(ours.scales, oracle.scales, "scales")


def g_of(format: str) -> float | None:
    return G if get_format(format).has_global_scale else None


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (17, 160), (2, 3, 64), (64,), (131, 224)], ids=str)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_tails_and_ranks(format, shape, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    both(x, format, device, rotation="sylvester:32")


@pytest.mark.parametrize("k", [1, 7, 1000, 3072, 5120, 13824])
def test_int8_any_width(k, device):
    both(nasty(8, max(k, 9), torch.bfloat16)[:, :k], "int8", device)


@pytest.mark.parametrize("k", [5120, 13824])
def test_int8_long_rows_rotated(k, device):
    both(nasty(8, k, torch.bfloat16), "int8", device, rotation="regular:256")


@pytest.mark.parametrize("rotation", ["none", "sylvester:16", "regular:64"])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_all_tiles_give_the_same(format, rotation, device):
    from hadaquant.kernels.quantize import quantize

    x = nasty(11, 192, torch.float32).to(device)
    f, r = get_format(format), parse(rotation)
    g = torch.tensor(G, device=device) if f.has_global_scale else None
    expected = reference.quantize(x.cpu(), f, r, None if g is None else g.cpu())
    for rows in (1, 16, 32, 64):
        for ours, oracle in zip(quantize(x, f, r, g, rows=rows), expected, strict=True):
            assert_same(ours, oracle, f"{rows} rows a program")


@pytest.mark.parametrize("shape", [(1, 64), (128, 64), (131, 96), (300, 1024)], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_tiled_scales(format, shape, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tiled = both(x, format, device, rotation="sylvester:32", scale_layout="tiled")
    linear = hq.quantize(x, format, rotation="sylvester:32", global_scale=g_of(format))
    assert torch.equal(tiled.scales, layout.tile_scales(linear.scales))


def all_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_every_bf16_value(format, device):
    # each value beside zeros, so that it is its block's largest; then beside a block full of others
    values = all_bf16()
    block = get_format(format).block or 64
    alone = torch.zeros(65536, block, dtype=torch.bfloat16)
    alone[:, 5] = values
    both(alone, format, device)
    both(values.view(-1, block), format, device)


@pytest.mark.parametrize("amax", [1.0, 2.796875, 5.5, 448.0, 1.7578125])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_every_bf16_value_under_a_fixed_largest(format, amax, device):
    values = all_bf16()
    values = torch.where(values.float().abs() <= amax, values, 0.0)
    block = get_format(format).block or 64
    x = torch.zeros(-(-65536 // (block - 1)) * (block - 1), dtype=torch.bfloat16)
    x[:65536] = values
    x = torch.cat((torch.full((len(x) // (block - 1), 1), amax, dtype=torch.bfloat16), x.view(-1, block - 1)), 1)
    both(x, format, device, rotation="none")


def neighbours(values: torch.Tensor) -> torch.Tensor:
    inf = torch.tensor(float("inf"))
    return torch.cat((values, values.nextafter(inf), values.nextafter(-inf)))


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_element_boundaries_and_their_neighbours(format, device):
    f = get_format(format)
    steps = sorted(set(f.element.values)) if f.element.packed else [v / 2 for v in range(-254, 255)]
    ties = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(steps)])
    block, top = f.block or 512, f.element.max
    for scale in (1.0, 0.9375, 1.125, 3.0):
        x = neighbours(ties * scale)
        x = torch.nn.functional.pad(x, (0, -len(x) % (block - 1))).view(-1, block - 1)
        x = torch.cat((torch.full((len(x), 1), top * scale), x), 1)
        how = {"global_scale": scale} if f.has_global_scale else {}
        both(x, format, device, **how)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp4-ceil", "mxfp4-even"])
def test_scale_boundaries_and_their_neighbours(format, device):
    f = get_format(format)
    if f.has_global_scale:
        stored = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        edges = torch.tensor(np.concatenate((stored, (stored[1:] + stored[:-1]) / 2, [464.0, 465.0, 480.0, 1000.0])))
        edges = edges.float() * 6
    else:
        powers = torch.tensor(2.0) ** torch.arange(-126, 126)
        edges = torch.cat([powers * m for m in (1.0, 1.5, 1.75)])
    amax = neighbours(edges)
    x = torch.zeros(len(amax), f.block)
    x[:, 3] = amax.clamp(min=0)
    both(x, format, device, **({"global_scale": 1.0} if f.has_global_scale else {}))


def test_n1_the_interpreters_cast_and_ours(device):
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16], x[0, 32] = 2688.0, 757.4316, 6.375
    q = both(x, "nvfp4", device, global_scale=1.0)
    assert bytes(q.scales[0].tolist()) == bytes.fromhex("7e7038")


def test_n14_division_is_correctly_rounded(device):
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 2688.0, 5.625, 4.6875
    q = both(x, "nvfp4", device, global_scale=1.0)
    assert int(layout.unpack_nibbles(q.codes)[0, 17]) == 6


def test_n15_n16_int8_ties(device):
    x = torch.zeros(3, 16)
    x[0, :9] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 126.5, 127.0])
    x[1, :2] = torch.tensor([2.796875, -1.3984375])
    x[2, :2] = torch.tensor([3.734375, -1.8671875])
    codes = both(x, "int8", device).codes
    assert codes[0, :9].tolist() == [0, 2, 2, 0, -2, -2, 0, 126, 127]
    assert [codes[1, 1].item(), codes[2, 1].item()] == [-63, -64]


def test_sign_survives_an_underflowing_quotient(device):
    # -1e-30 / 1e30 underflows to -0.0, yet the number is below zero
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2] = 1e31, -1e-30, -0.0
    codes = layout.unpack_nibbles(both(x, "mxfp4", device).codes)
    assert codes[0, 1:3].tolist() == [8, 0]


@pytest.mark.parametrize("g", [0.0, -1.0, float("nan"), float("inf")])
def test_n22_a_bad_device_scalar_gives_nan_scales(g, device):
    x = torch.randn(3, 64)
    q = hq.quantize(x.to(device), "nvfp4", global_scale=torch.tensor(g, device=device), backend="triton")
    assert (q.scales == 0x7F).all()
    assert (q.codes == 0).all()


@pytest.mark.parametrize("rotation", ["none", "sylvester:16", "regular:256", "sylvester:4096"])
def test_dynamic_global_scale(rotation, device):
    x = nasty(9, 4096, torch.bfloat16)
    ours = hq.quantize(x.to(device), "nvfp4", rotation=rotation, backend="triton")
    oracle = hq.quantize(x, "nvfp4", rotation=rotation, backend="reference")
    assert_same(ours.global_scale, oracle.global_scale, "global scale")
    assert_same(ours.codes, oracle.codes, "codes")
    assert_same(ours.scales, oracle.scales, "scales")


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_rotate(rotation, inverse, device):
    x = nasty(9, 1024, torch.bfloat16)
    ours = hq.rotate(x.to(device), rotation, inverse, backend="triton")
    oracle = hq.rotate(x, rotation, inverse, backend="reference")
    finite = oracle.isfinite()
    assert torch.equal(finite, ours.cpu().isfinite())
    assert_same(ours.cpu()[finite], oracle[finite], "rotated")


def orthonormal(g: int) -> Rotation:
    q, _ = torch.linalg.qr(torch.randn(g, g, dtype=torch.float64, generator=torch.Generator().manual_seed(g)))
    return Rotation("matrix", matrix=q)


@pytest.mark.parametrize("g", [3, 16, 24, 64, 128])
@pytest.mark.parametrize("inverse", [False, True])
def test_matrix_rotation_is_float32(g, inverse, device):
    rotation, x = orthonormal(g), torch.randn(7, 2 * g, generator=torch.Generator().manual_seed(0))
    ours = hq.rotate(x.to(device), rotation, inverse, backend="triton").cpu()
    m = rotation.dense().T if inverse else rotation.dense()
    exact = (x.double().view(-1, g) @ m).view(x.shape)
    # a sum of g rounded products: g · 2⁻²⁴ of the norms bounds any order of it
    bound = g * 2.0**-24 * x.double().view(-1, g).norm(dim=1).repeat_interleave(g).view(x.shape)
    assert ((ours.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("g", [16, 24, 32])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_matrix_codes_differ_on_near_ties_only(format, g, device):
    rotation, x = orthonormal(g), torch.randn(13, 96, generator=torch.Generator().manual_seed(0))
    f = get_format(format)
    ours = hq.quantize(x.to(device), format, rotation=rotation, backend="triton", global_scale=g_of(format))
    oracle = hq.quantize(x, format, rotation=rotation, backend="reference", global_scale=g_of(format))
    y = reference.rotate(x, rotation)
    unpack = layout.unpack_nibbles if f.element.packed else (lambda c: c)
    a, b = (f.element.decode(unpack(q.codes.cpu())) for q in (ours, oracle))
    same_scale = as_bits(ours.scales) == as_bits(oracle.scales)
    if not f.element.packed:  # float32 scales move with the last bit of the largest element
        assert (ours.scales.cpu() / oracle.scales - 1).abs().max() <= g * 2.0**-23
        same_scale = torch.ones_like(same_scale)
    else:
        assert same_scale.float().mean() == 1.0
    m = reference.divisor(oracle.scales, f, oracle.global_scale).view(13, -1, 1)
    q = (y.view(13, m.shape[1], -1) / m).view(13, 96)
    middle = (a + b) / 2
    slack = g * 2.0**-22 * q.abs().max()
    assert ((a == b) | ((q - middle).abs() <= slack)).all()


@pytest.mark.parametrize("make", ["columns", "slice", "transposed", "strided", "offset"])
@pytest.mark.parametrize("format", ["nvfp4", "int8"])
def test_l1_any_strides(format, make, device):
    base = torch.randn(64, 8 * 64, generator=torch.Generator().manual_seed(0))
    x = {
        "columns": base[:, :32],
        "slice": base.view(64, 8, 64)[:, 3:],
        "transposed": base.t(),
        "strided": base[..., ::2],
        "offset": base.flatten()[1 : 1 + 32 * 64].view(32, 64),
    }[make]
    both(x, format, device, rotation="sylvester:16")


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)], ids=str)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_s2_empty(format, shape, device):
    x = torch.empty(shape, device=device)
    q = hq.quantize(x, format, backend="triton")
    assert q.shape == shape
    assert q.dequantize().shape == shape


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(0, 40), rows=st.integers(1, 40))
def test_any_magnitudes(device, seed, spread, rows):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 64, generator=gen) * (torch.randn(rows, 64, generator=gen) * spread).exp()
    for format in FORMAT_NAMES:
        both(x, format, device, rotation="sylvester:32", **({"global_scale": 0.01} if format == "nvfp4" else {}))


SHAPES = [(1, 48, 64), (19, 33, 96), (5, 1, 32), (130, 70, 160), (64, 128, 512)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_product_is_bitwise_equal(shape, bias, dtype, device):
    m, n, k = shape
    gen = torch.Generator().manual_seed(0)
    x = hq.quantize(torch.randn(m, k, generator=gen), "int8")
    w = hq.quantize(torch.randn(n, k, generator=gen), "int8")
    b = torch.randn(n, generator=gen).to(dtype) if bias else None
    oracle = hq.scaled_mm(x, w, b, dtype, backend="reference")
    ours = hq.scaled_mm(x.to(device), w.to(device), None if b is None else b.to(device), dtype, backend="triton").cpu()
    assert torch.equal(ours.view(torch.uint8), oracle.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_fp4_product(format, shape, device):
    m, n, k = shape
    gen = torch.Generator().manual_seed(0)
    x = hq.quantize(torch.randn(m, k, generator=gen), format)
    w = hq.quantize(torch.randn(n, k, generator=gen), format)
    bias = torch.randn(n, generator=gen)
    exact = x.dequantize().double() @ w.dequantize().double().T + bias
    ours = hq.scaled_mm(x.to(device), w.to(device), bias.to(device), torch.float32, backend="triton").cpu()
    torchs = x.dequantize() @ w.dequantize().T + bias
    error, allowed = ((t.double() - exact).norm() for t in (ours, torchs))
    assert error <= 2 * allowed + 2.0**-22 * exact.norm()
