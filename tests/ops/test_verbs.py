"""The verbs on the CPU: memory layouts, empty inputs, ranks, wrong operands, and the caller's modes."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hadaquant as hq
from hadaquant.errors import BackendError, DtypeError, GroupError, MismatchError, ShapeError, UnknownChoice
from hadaquant.formats import FORMATS

NAMES = sorted(FORMATS)
formats = pytest.mark.parametrize("name", NAMES)


def same(a: hq.QuantizedTensor, b: hq.QuantizedTensor) -> bool:
    pairs = ((a.codes, b.codes), (a.scales, b.scales), (a.global_scale, b.global_scale))
    return all((x is None and y is None) or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


# ---- inputs -------------------------------------------------------------------------------------

VIEWS = {
    "columns of a wider matrix": lambda dtype: torch.randn(8, 64, dtype=dtype)[:, :32],
    "rows of a cube": lambda dtype: torch.randn(2, 8, 64, dtype=dtype)[:, 3:, :],
    "transposed": lambda dtype: torch.randn(64, 8, dtype=dtype).t(),
    "every other column": lambda dtype: torch.randn(5, 128, dtype=dtype)[..., ::2],
    "storage offset 1": lambda dtype: torch.randn(5 * 64 + 1, dtype=dtype)[1:].view(5, 64),
    "expanded": lambda dtype: torch.randn(1, 64, dtype=dtype).expand(6, 64),
    "permuted": lambda dtype: torch.randn(64, 3, 2, dtype=dtype).permute(2, 1, 0),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_l1_views_equal_their_contiguous_copy(make, dtype):
    x = make(dtype)
    copy = x.clone(memory_format=torch.contiguous_format)
    for name in NAMES:
        for rotation in ("none", "sylvester:16", "regular:16"):
            assert same(hq.quantize(x, name, rotation=rotation), hq.quantize(copy, name, rotation=rotation))
    for rotation in ("none", "sylvester:32"):
        y = hq.rotate(x, rotation)
        assert y.is_contiguous() and torch.equal(y, hq.rotate(copy, rotation))


@formats
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
def test_s2_empty(name, shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    q = hq.quantize(x, name, rotation="regular:64")
    assert q.shape == shape and q.dequantize().shape == shape
    w = hq.quantize(torch.randn(9, 64), name, rotation="regular:64")
    assert hq.scaled_mm(q, w, torch.zeros(9)).shape == (*shape[:-1], 9)
    assert hq.rotate(x, "regular:64").shape == shape


@formats
def test_s2_no_outputs(name):
    x, w = hq.quantize(torch.randn(3, 64), name), hq.quantize(torch.empty(0, 64), name)
    assert hq.scaled_mm(x, w).shape == (3, 0)


@formats
@pytest.mark.parametrize("shape", [(64,), (7, 64), (2, 3, 64), (2, 1, 3, 2, 64)])
def test_s6_ranks(name, shape):
    x, w, bias = torch.randn(shape), hq.quantize(torch.randn(5, 64), name), torch.randn(5)
    q = hq.quantize(x, name)
    y = hq.scaled_mm(q, w, bias, torch.float32)
    flat = hq.quantize(x.reshape(-1, 64), name, global_scale=q.global_scale)
    assert y.shape == (*shape[:-1], 5)
    assert torch.equal(y.reshape(-1, 5), hq.scaled_mm(flat, w, bias, torch.float32))


@formats
def test_s6_wrong_scales_raise_in_the_square_case_too(name):
    n = 32
    x, w = hq.quantize(torch.randn(n, n), name), hq.quantize(torch.randn(n, n), name)
    hq.scaled_mm(x, w)
    shapes = [(), (1,), (n, 1, 1), (1, n), (n, n), (1, n, 1)] + ([(n, 1)] if name == "int8" else [(n,)])
    for shape in shapes:
        for side in ("x", "w"):
            bad = torch.zeros(shape, dtype=w.scales.dtype)
            args = [
                x.codes,
                x.scales,
                x.global_scale,
                w.codes,
                w.scales,
                w.global_scale,
                None,
                name,
                torch.float32,
                "auto",
            ]
            args[1 if side == "x" else 4] = bad
            with pytest.raises(ShapeError, match=rf"{side} scales .*has shape"):
                torch.ops.hadaquant.scaled_mm(*args)


@formats
def test_wrong_operands(name):
    x, w = hq.quantize(torch.randn(4, 64), name), hq.quantize(torch.randn(8, 64), name)
    with pytest.raises(ShapeError, match=r"K=128.*K=64 of x"):
        hq.scaled_mm(x, hq.quantize(torch.randn(8, 128), name))
    with pytest.raises(ShapeError, match=r"bias has shape \(4,\), but \(8,\)"):
        hq.scaled_mm(x, w, torch.zeros(4))
    with pytest.raises(ShapeError, match=r"w codes has shape .*\[N, K\]"):
        hq.scaled_mm(x, hq.quantize(torch.randn(2, 8, 64), name))
    with pytest.raises(DtypeError, match="w codes has dtype"):
        torch.ops.hadaquant.scaled_mm(
            x.codes,
            x.scales,
            x.global_scale,
            w.codes.int(),
            w.scales,
            w.global_scale,
            None,
            name,
            torch.float32,
            "auto",
        )


def test_operands_that_do_not_mean_the_same():
    x = torch.randn(4, 64)
    signs = torch.ones(64)
    signed, other = hq.Rotation("regular", 64, signs), hq.Rotation("regular", 64, -signs)
    q = hq.quantize(x, "nvfp4", rotation=signed)
    hq.scaled_mm(q, hq.quantize(x, "nvfp4", rotation=hq.Rotation("regular", 64, signs.clone())))
    with pytest.raises(MismatchError, match="x's format is nvfp4, but int8"):
        hq.scaled_mm(q, hq.quantize(x, "int8", rotation=signed))
    with pytest.raises(MismatchError, match=r"x's rotation is regular:64.signs, but none"):
        hq.scaled_mm(q, hq.quantize(x, "nvfp4"))
    with pytest.raises(MismatchError, match="x's rotation"):
        hq.scaled_mm(q, hq.quantize(x, "nvfp4", rotation=other))
    tiled = hq.quantize(x, "nvfp4", rotation=signed, scale_layout="tiled")  # another order, the same meaning
    assert torch.equal(hq.scaled_mm(tiled, tiled), hq.scaled_mm(q, q))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int8, torch.bool, torch.complex64])
def test_inputs_of_another_dtype(dtype):
    x = torch.ones(2, 32).to(dtype)
    for call in (lambda: hq.quantize(x, "nvfp4"), lambda: hq.quantize(x, "int8"), lambda: hq.rotate(x, "sylvester:16")):
        with pytest.raises(DtypeError, match=rf"x has dtype {dtype}, but one of torch.bfloat16.*convert it with x.to"):
            call()


def test_scalars_and_bad_arguments():
    with pytest.raises(ShapeError, match=r"x has shape \(\).*at least one dimension"):
        hq.quantize(torch.tensor(1.0), "int8")
    with pytest.raises(GroupError):
        hq.quantize(torch.ones(2, 48), "nvfp4", rotation="sylvester:64")
    for call in (
        lambda: hq.quantize(torch.ones(2, 32), "nvfp4", backend="cuda"),
        lambda: hq.rotate(torch.ones(2, 32), "none", backend="cuda"),
        lambda: hq.set_backend("cuda"),
        lambda: hq.RotatedLinear(32, 8, "int8", backend="cuda"),
    ):
        with pytest.raises(UnknownChoice, match="backend 'cuda': choose one of auto, reference, triton"):
            call()


# ---- fakes --------------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 192), (0, 64)])
@pytest.mark.parametrize("scale_layout", ["linear", "tiled"])
def test_fakes_have_the_real_shapes(name, shape, scale_layout):
    if scale_layout == "tiled" and FORMATS[name].block is None:
        return
    real = hq.quantize(torch.randn(shape), name, rotation="regular:64", scale_layout=scale_layout)
    values = [real.codes, real.scales, real.global_scale, real.dequantize(), hq.rotate(torch.randn(shape), "none")]
    with FakeTensorMode():
        fake = hq.quantize(torch.randn(shape), name, rotation="regular:64", scale_layout=scale_layout)
        fakes = [fake.codes, fake.scales, fake.global_scale, fake.dequantize(), hq.rotate(torch.randn(shape), "none")]
    for r, f in zip(values, fakes, strict=True):
        assert (r is None) == (f is None)
        if r is not None and f is not None:
            assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


@formats
def test_fakes_refuse_what_the_ops_refuse(name):
    with FakeTensorMode():
        for call, error in (
            (lambda: hq.quantize(torch.ones(2, 64, dtype=torch.int32), name), DtypeError),
            (lambda: hq.quantize(torch.ones(2, 64), name, scale_layout="zigzag"), UnknownChoice),
            (lambda: hq.quantize(torch.ones(2, 64), name, rotation="sylvester:128"), GroupError),
            (
                lambda: hq.scaled_mm(hq.quantize(torch.ones(2, 64), name), hq.quantize(torch.ones(2, 128), name)),
                ShapeError,
            ),
        ):
            with pytest.raises(error):
                call()


# ---- the caller's modes -------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_a6_autocast_does_not_reach_inside(name, amp, monkeypatch):
    x, w, bias = torch.randn(5, 2048), torch.randn(7, 2048), torch.randn(7)
    matrix = hq.Rotation("matrix", matrix=torch.linalg.qr(torch.randn(32, 32)).Q)

    def everything():
        found = []
        for rotation in ("regular:64", matrix):
            qx, qw = (hq.quantize(t, name, rotation=rotation) for t in (x, w))
            found += [qx.codes, qx.scales, qx.dequantize(), hq.scaled_mm(qx, qw, bias, torch.float32)]
        return found

    for trusted in (True, False):
        monkeypatch.setattr("hadaquant.reference.int_mm_is_exact", lambda answer=trusted: answer)
        outside = everything()
        with torch.autocast("cpu", amp):
            inside = everything()
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(outside, inside, strict=True))


def test_a6_the_self_test_does_not_depend_on_autocast():
    from hadaquant.reference import int_mm_is_exact

    int_mm_is_exact.cache_clear()
    verdict = int_mm_is_exact()
    int_mm_is_exact.cache_clear()
    q = hq.quantize(torch.randn(3, 64), "int8")
    with torch.autocast("cpu", torch.bfloat16):
        hq.scaled_mm(q, q)
    assert int_mm_is_exact() is verdict


@formats
def test_a6_inference_mode_and_grad_mode(name):
    x = torch.randn(4, 64)
    outside = hq.quantize(x, name, rotation="regular:64")
    with torch.inference_mode():
        assert same(hq.quantize(x, name, rotation="regular:64"), outside)
        assert torch.equal(outside.dequantize(), hq.quantize(x, name, rotation="regular:64").dequantize())
    assert same(hq.quantize(x.clone().requires_grad_(), name, rotation="regular:64"), outside)


@pytest.mark.parametrize("inverse", [False, True])
def test_gradient_of_rotate(inverse):
    signs = torch.tensor([1.0, -1.0] * 8)
    rotation = hq.Rotation("sylvester", 16, signs)
    x = torch.randn(3, 32, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(3, 32)
    hq.rotate(x, rotation, inverse).backward(gradient)
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert torch.equal(x.grad, hq.rotate(gradient, rotation, not inverse).to(torch.bfloat16))


def test_default_device_and_dtype_do_not_matter():
    x = torch.randn(3, 64)
    expected = [hq.quantize(x, name, rotation="sylvester:8") for name in NAMES]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            found = [hq.quantize(x, name, rotation="sylvester:8") for name in NAMES]
            given = hq.quantize(x, "nvfp4", rotation="sylvester:8", global_scale=0.5)
    finally:
        torch.set_default_dtype(before)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert same(given, hq.quantize(x, "nvfp4", rotation="sylvester:8", global_scale=0.5))


def test_i1_backend_triton_on_a_cpu():
    """In a process of its own, without the interpreter."""
    code = """
import torch, hadaquant as hq
q = hq.quantize(torch.randn(4, 64), "int8")
for name, call in {
    "quantize": lambda: hq.quantize(torch.randn(4, 64), "int8", backend="triton"),
    "rotate": lambda: hq.rotate(torch.randn(4, 64), "sylvester:16", backend="triton"),
    "scaled_mm": lambda: hq.scaled_mm(q, q, backend="triton"),
    "linear": lambda: hq.RotatedLinear(64, 8, "int8", backend="triton")(torch.randn(4, 64)),
    "process": lambda: (hq.set_backend("triton"), hq.quantize(torch.randn(4, 64), "int8")),
}.items():
    try:
        call()
    except hq.HadaquantError as error:
        print(name, type(error).__name__, error)
"""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [name, BackendError.__name__] for name in ("quantize", "rotate", "scaled_mm", "linear", "process")
    ]
    for line in lines:
        assert "backend='triton' on cpu" in line and "needs a GPU" in line and "TRITON_INTERPRET=1" in line
        assert "ask for backend='auto' or 'reference'" in line
