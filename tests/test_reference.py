"""The reference: exact integer products, the epilogue's order, FP4 products, and rotation with quantization."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import hadaquant as hq
import oracle
from hadaquant import reference
from hadaquant.errors import AccumulatorError
from hadaquant.formats import FORMATS
from hadaquant.formats.elements import decode_e2m1, decode_e4m3
from hadaquant.ops.checks import INT8_MAX_K

ROTATIONS = ("none", "sylvester:32", "regular:64", "signs")


def rotation(name: str) -> hq.Rotation | str:
    return hq.Rotation("regular", 16, torch.randint(0, 2, (16,)) * 2 - 1) if name == "signs" else name


def random_int8(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a · bᵀ in float64, which holds every sum below 2**53: int64."""
    return (a.double() @ b.double().T).to(torch.int64)


def check_product(a: torch.Tensor, b: torch.Tensor) -> None:
    acc = reference.int8_matmul(a, b)
    assert acc.dtype == torch.int32 and acc.shape == (a.shape[0], b.shape[0])
    assert torch.equal(acc.to(torch.int64), exact(a, b))


# ---- int8 products ------------------------------------------------------------------------------


def test_n18_all_127():
    full = torch.full((2, 2053), 127, dtype=torch.int8)
    assert reference.int8_matmul(full, full).eq(33_112_837).all()


@pytest.mark.parametrize("k", [1, 2, 15, 16, 63, 64, 2052, 4608])
@pytest.mark.parametrize("sign", [1, -1])
def test_n18_every_k_in_every_memory_layout(k, sign):
    for a, b in (
        (torch.full((5, k), 127, dtype=torch.int8), torch.full((7, k), 127 * sign, dtype=torch.int8)),
        (random_int8(5, k), random_int8(7, k)),
        (torch.full((5, k), 127 * sign, dtype=torch.int8), random_int8(7, k)),
    ):
        check_product(a, b)
        check_product(a[:1].expand(5, k), b)  # rows of stride 0
        check_product(a[:, :1].expand(5, k), b[:, :1].expand(7, k))  # columns of stride 0
        check_product(a.t().contiguous().t(), b.t().contiguous().t())
        wide = torch.nn.functional.pad(a, (3, 2), value=99)
        check_product(wide[:, 3 : 3 + k], b)


@pytest.mark.parametrize("m", [1, 2, 15, 16, 17, 31, 33])
def test_s1_few_rows(m):
    x, w = random_int8(m, 96), random_int8(40, 96)
    check_product(x, w)
    whole = reference.int8_matmul(random_int8(33, 96)[:m].copy_(x), w)
    assert torch.equal(whole, reference.int8_matmul(x, w))


@pytest.mark.parametrize(("n", "k"), [(22473, 5376), (33, 64), (17, 16), (1, 64), (4304, 4304)])
def test_s3_odd_sizes(n, k):
    a, b = random_int8(3, k), random_int8(n, k)
    acc = reference.int8_matmul(a, b)
    for rows in torch.arange(n).split(2048):
        assert torch.equal(acc[:, rows].to(torch.int64), exact(a, b[rows]))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 32), (4, 0, 32), (0, 0, 1)])
def test_s2_empty_products(m, n, k):
    check_product(random_int8(m, k), random_int8(n, k))


def test_n18_with_minus_128():
    full = torch.full((3, 2048), -128, dtype=torch.int8)
    check_product(full, full)
    check_product(full, -full.clamp(min=-127))


def test_n18_the_largest_k():
    assert INT8_MAX_K == 133_144
    a = torch.full((2, INT8_MAX_K), 127, dtype=torch.int8)
    check_product(a, a)
    check_product(a, -a)
    q = hq.quantize(torch.ones(2, INT8_MAX_K + 1), "int8")
    with pytest.raises(AccumulatorError, match=r"K=133145 exceeds 133144.*split K"):
        hq.scaled_mm(q, q)
    with pytest.raises(AccumulatorError):
        hq.RotatedLinear(INT8_MAX_K + 1, 1, "int8")
    with pytest.raises(AccumulatorError):
        hq.explain("int8", 1, 1, INT8_MAX_K + 1, "cpu")


def test_n18_when_int_mm_is_not_trusted(monkeypatch):
    cases = [(random_int8(5, k), random_int8(9, k)) for k in (1, 2, 1023, 1024, 1025, 4608)]
    trusted = [reference.int8_matmul(a, b) for a, b in cases]
    monkeypatch.setattr(reference, "int_mm_is_exact", lambda: False)
    for (a, b), acc in zip(cases, trusted, strict=True):
        check_product(a, b)
        assert torch.equal(reference.int8_matmul(a, b), acc)


def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What int8 products give without VNNI: a made unsigned, neighbouring products summed in int16."""
    pairs = (a.int() + 128)[:, :, None] * b.int()[None]
    pairs = torch.nn.functional.pad(pairs, (0, 0, 0, a.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
    return (pairs.clamp(-32768, 32767).sum(1) - 128 * b.int().sum(0)).int()


def refusing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not implemented here")


@pytest.mark.parametrize("wrong", [saturating, refusing])
def test_n18_the_self_test_sees_a_wrong_int_mm(monkeypatch, wrong):
    monkeypatch.setattr(torch, "_int_mm", wrong)
    reference.int_mm_is_exact.cache_clear()
    try:
        assert not reference.int_mm_is_exact()
        small = torch.ones(2, 16, dtype=torch.int8)
        assert wrong is refusing or torch.equal(wrong(small, small.t()), torch.full((2, 2), 16, dtype=torch.int32))
        full = torch.full((2, 128), -127, dtype=torch.int8)
        check_product(full, full)
        check_product(full, -full)
    finally:
        reference.int_mm_is_exact.cache_clear()


def test_n18_chunks_do_not_depend_on_torch_settings(monkeypatch):
    monkeypatch.setattr(reference, "int_mm_is_exact", lambda: False)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        a = torch.full((64, 4096), 127, dtype=torch.int8)
        check_product(a, a)
        check_product(random_int8(64, 4096), random_int8(64, 4096))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(os.environ.get("ONEDNN_MAX_CPU_ISA") is not None, reason="this is the inner run")
def test_n18_without_vnni():
    """All of this file again where oneDNN may use AVX2 at most."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__))],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout and "1 skipped" in run.stdout


# ---- int8 linear --------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16])
def test_order_of_the_epilogue(out_dtype, bias_dtype):
    """y = RN_out(((float(acc) · sx) · sw) + bias), each step rounded to float32."""
    x, w = hq.quantize(torch.randn(9, 300) * 3, "int8"), hq.quantize(torch.randn(11, 300), "int8")
    bias = None if bias_dtype is None else torch.randn(11).to(bias_dtype)
    acc = exact(x.codes, w.codes).numpy().astype(np.float32)
    y = oracle.multiply(oracle.multiply(acc, x.scales.numpy()[:, None]), w.scales.numpy()[None])
    if bias is not None:
        y = (y.astype(np.float64) + bias.double().numpy()).astype(np.float32)
    ours = hq.scaled_mm(x, w, bias, out_dtype)
    assert ours.dtype == out_dtype and torch.equal(ours, torch.from_numpy(y).to(out_dtype))


def test_n19_sums_beyond_float16():
    w = hq.QuantizedTensor(
        torch.full((4, 4096), 127, dtype=torch.int8),
        torch.full((4,), 1 / 127),
        None,
        FORMATS["int8"],
        hq.Rotation("none"),
    )
    y = hq.scaled_mm(hq.quantize(torch.ones(1, 4096, dtype=torch.float16), "int8"), w, out_dtype=torch.float16)
    assert y.isfinite().all() and y.sub(4096).abs().max() <= 4
    rotated = hq.quantize(torch.full((1, 4096), 2000.0, dtype=torch.float16), "int8", rotation="sylvester:4096")
    assert rotated.scales.isfinite().all() and rotated.codes[0, 0] == 127 and not rotated.codes[0, 1:].any()
    assert (rotated.dequantize() - 2000).abs().max() < 1e-2


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_row_with_nan_gives_nan_and_no_other_row_does(name):
    x = torch.randn(4, 64)
    x[2, 7] = float("nan")
    y = hq.scaled_mm(hq.quantize(x, name), hq.quantize(torch.randn(8, 64), name), out_dtype=torch.float32)
    assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()


# ---- FP4 linear ---------------------------------------------------------------------------------


def test_code_times_scale_is_exact_in_bf16():
    codes = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    products = codes[:, None] * decode_e4m3(torch.arange(0x7F, dtype=torch.uint8))
    assert torch.equal(products.to(torch.bfloat16).to(torch.float32), products)
    assert torch.equal(
        products.double(), codes.double()[:, None] * decode_e4m3(torch.arange(0x7F, dtype=torch.uint8)).double()
    )


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp4-ceil", "mxfp4-even"])
@pytest.mark.parametrize("shape", [(1, 16, 32), (17, 40, 96), (33, 64, 1024)])
def test_fp4_products_err_no_more_than_twice_torchs(name, shape):
    m, n, k = shape
    x, w = hq.quantize(torch.randn(m, k), name), hq.quantize(torch.randn(n, k) * 0.02, name)
    bias = torch.randn(n)
    xd, wd = x.dequantize(), w.dequantize()
    truth = xd.double() @ wd.double().T + bias.double()
    ours = (hq.scaled_mm(x, w, bias, torch.float32).double() - truth).norm()
    torchs = (torch.nn.functional.linear(xd, wd, bias).double() - truth).norm()
    assert ours <= 2 * torchs + 1e-7 * truth.norm()


# ---- rotation and quantization together ---------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("which", ROTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_is_rotate_then_quantize(name, which, dtype):
    r = rotation(which)
    x = (torch.randn(37, 128) * torch.logspace(-6, 4, 37)[:, None]).to(dtype)
    fused = hq.quantize(x, name, rotation=r)
    expected = oracle.quantize(hq.rotate(x, r).numpy(), name)
    np.testing.assert_array_equal(
        fused.codes.numpy(), expected.codes if name == "int8" else oracle.pack(expected.codes)
    )
    np.testing.assert_array_equal(fused.scales.numpy().view(np.uint8), expected.scales.view(np.uint8))
    if fused.global_scale is not None:
        amax = torch.ops.hadaquant.amax(x, fused.rotation.spec, fused.rotation.signs, None, "auto")
        assert amax == hq.rotate(x, r).abs().max()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int8"])
def test_row_by_row_and_in_pieces(name, monkeypatch):
    """Rows do not see each other, and the size of the pieces worked on does not show."""
    x, g = torch.randn(50, 256), 0.001 if name == "nvfp4" else None
    whole = hq.quantize(x, name, rotation="regular:256", global_scale=g)
    for row in (0, 17, 49):
        alone = hq.quantize(x[row], name, rotation="regular:256", global_scale=g)
        assert torch.equal(alone.codes, whole.codes[row]) and torch.equal(alone.scales, whole.scales[row])
    for chunk in (1, 256, 3 * 256, 1 << 20):
        monkeypatch.setattr(reference, "CHUNK", chunk)
        pieces = hq.quantize(x, name, rotation="regular:256", global_scale=g)
        assert torch.equal(pieces.codes, whole.codes) and torch.equal(pieces.scales, whole.scales)
        assert torch.equal(hq.rotate(x, "sylvester:64"), reference.rotate(x, hq.Rotation("sylvester", 64)))


def test_matrix_rotation_quantizes_within_explained_ties():
    """A matrix is a matrix product in torch's order of sums: a code may differ only beside a tie."""
    q = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64)).Q
    r = hq.Rotation("matrix", matrix=q)
    x = torch.randn(20, 96)
    exact_y = (x.double().view(-1, 32) @ r.dense()).view(20, 96)
    ours = hq.quantize(x, "int8", rotation=r)
    steps = exact_y / (exact_y.abs().amax(-1, keepdim=True) / 127)
    expected = steps.round().to(torch.int8)
    from_tie = ((steps - steps.floor()) - 0.5).abs()
    wrong = ours.codes != expected
    # 32 terms and the scale, each within half an ulp of sums at most sqrt(32) times the maximum
    assert (from_tie[wrong] <= 127 * 32**0.5 * 34 * 2.0**-24).all() and wrong.sum() <= 2
