"""INT8 products by other libraries: the contract's bits, by chunks of rows and of K, padded or not."""

import itertools
import sys
import types

import pytest
import torch

import hadaquant as hq
from hadaquant import reference
from hadaquant.errors import DtypeError
from hadaquant.formats import get_format
from hadaquant.kernels import vendor

INT8 = get_format("int8")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (1, 2, 15, 16, 17, 31, 33)
#: (N, K), the last two odd.
SHAPES = ((33, 64), (17, 16), (1, 64), (4304, 4304), (22473, 5376), (24, 2056), (129, 1041), (7, 33))


@pytest.fixture
def place() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def operands(m: int, n: int, k: int, dtype: torch.dtype, bias: bool = True) -> tuple[torch.Tensor | None, ...]:
    gen = torch.Generator().manual_seed(m * n + k)
    x, w = (torch.randint(-127, 128, (rows, k), generator=gen, dtype=torch.int8) for rows in (m, n))
    sx, sw = (torch.rand(rows, generator=gen) for rows in (m, n))
    return x, sx, w, sw, torch.randn(n, generator=gen).to(dtype) if bias else None


def assert_the_references_bits(given, out_dtype: torch.dtype, kernel: str, place: str, **how) -> None:
    x, sx, w, sw, bias = given
    if kernel == "int8_cublas" and place == "cpu" and not reference.int_mm_is_exact():
        pytest.skip("torch._int_mm saturates on this CPU")
    expected = reference.scaled_mm(x, sx, None, w, sw, None, INT8, bias, out_dtype)
    moved = [None if t is None else t.to(place) for t in given]
    y = vendor.scaled_mm(*moved, out_dtype, kernel=kernel, **how).cpu()
    assert y.dtype == out_dtype and y.is_contiguous() and torch.equal(y.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("m", "n", "limit"), [(1, 1, 4), (100, 8, 320), (17, 4, 256), (50, 7, 28 * 17), (33, 9, 1)])
def test_b5_chunks_cover_every_row_once_within_the_limit(m, n, limit):
    parts = list(vendor.row_chunks(m, n, limit))
    assert [i for part in parts for i in range(m)[part]] == list(range(m))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) * n * 4 <= max(limit, n * 4)
    assert len(sizes) == -(-m // max(1, limit // (4 * n))) or min(sizes) >= max(sizes) // 2


def test_b5_the_sums_of_a_chunk_stay_near_one_gibibyte():
    assert vendor.ACCUMULATOR_BYTES == 2**30
    sizes = [part.stop - part.start for part in vendor.row_chunks(32769, 65536)]
    assert len(sizes) == 9 and max(sizes) - min(sizes) < len(sizes)


@pytest.mark.parametrize("kernel", ["int8_cublas", "int8_bf16"])
@pytest.mark.parametrize("limit", [1, 33 * 4 * 16, 33 * 4 * 20, 33 * 4 * 40, vendor.ACCUMULATOR_BYTES])
def test_l3_chunks_of_rows_give_the_same_bits(kernel, limit, place):
    for m in (1, 17, 37, 65):
        given = operands(m, 33, 64, torch.float32)
        assert_the_references_bits(given, torch.float32, kernel, place, limit=limit)


@pytest.mark.parametrize("kernel", ["int8_cublas", "int8_bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_s1_s3_every_number_of_rows_and_odd_sizes(kernel, shape, place):
    if place == "cpu" and shape[0] > 20000:
        pytest.skip("takes long without a GPU")
    if kernel == "int8_cublas" and place == "cpu" and not reference.int_mm_is_exact():
        pytest.skip("torch._int_mm saturates on this CPU")
    x, sx, w, sw, bias = operands(max(ROWS), *shape, torch.float32)
    on_place = [t.to(place) for t in (x, sx, w, sw, bias)]
    for dtype, with_bias in itertools.product(DTYPES, (False, True)):
        b = bias.to(dtype) if with_bias else None
        expected = reference.scaled_mm(x, sx, None, w, sw, None, INT8, b, dtype)
        for m in ROWS:
            px, psx, pw, psw, _ = on_place
            pb = None if b is None else b.to(place)
            y = vendor.scaled_mm(px[:m], psx[:m], pw, psw, pb, dtype, kernel=kernel).cpu()
            assert torch.equal(y.view(torch.uint8), expected[:m].view(torch.uint8)), f"M={m} {dtype} {with_bias}"


@pytest.mark.parametrize("kernel", ["int8_cublas", "int8_bf16"])
@pytest.mark.parametrize("k", [1024, 1032, 4608, 13824])
def test_n18_sums_of_the_largest_products(kernel, k, place):
    ones, sign = torch.ones(40, k, dtype=torch.int8), torch.randint(0, 2, (40, k)).mul(2).sub(1).to(torch.int8)
    scale = torch.ones(40)
    for x, w in (
        (ones * 127, ones * 127),
        (ones * 127, ones * -128),
        (sign * 127, ones * 127),
        (sign * 127, sign * -127),
    ):
        assert_the_references_bits((x, scale, w, scale, None), torch.float32, kernel, place)


@pytest.mark.parametrize("kernel", ["int8_cublas", "int8_bf16"])
def test_strided_operands_and_a_nan_scale(kernel, place):
    x, sx, w, sw, bias = operands(20, 16, 128, torch.bfloat16)
    sx[3] = torch.nan
    given = (x[:, ::2], sx, w[:, 64:], sw, bias)
    if kernel == "int8_cublas" and place == "cpu" and not reference.int_mm_is_exact():
        pytest.skip("torch._int_mm saturates on this CPU")
    y = vendor.scaled_mm(*(t.to(place) for t in given), torch.bfloat16, kernel=kernel).cpu()
    expected = reference.scaled_mm(given[0], sx, None, given[2], sw, None, INT8, bias, torch.bfloat16)
    assert y[3].isnan().all()
    keep = torch.arange(20) != 3
    assert torch.equal(y[keep], expected[keep])


def test_b4_sgl_is_called_as_it_wants_to_be(monkeypatch):
    """sgl_kernel needs a GPU: a stand-in checks what it is given."""

    def int8_scaled_mm(a, b, scales_a, scales_b, out_dtype, bias=None):
        assert a.stride(1) == 1 and b.stride(0) == 1  # row-major times column-major
        y = (a.float() @ b.float()) * (scales_a[:, None] * scales_b)
        return (y if bias is None else y + bias.float()).to(out_dtype)

    monkeypatch.setitem(sys.modules, "sgl_kernel", types.SimpleNamespace(int8_scaled_mm=int8_scaled_mm))
    given = operands(20, 32, 64, torch.bfloat16)
    y = vendor.scaled_mm(*given, torch.bfloat16, kernel="int8_sgl")
    expected = reference.scaled_mm(given[0], given[1], None, given[2], given[3], None, INT8, given[4], torch.bfloat16)
    assert (y.view(torch.int16).int() - expected.view(torch.int16).int()).abs().max() <= 1
    with pytest.raises(DtypeError, match="bias with backend='sgl' has dtype"):
        vendor.scaled_mm(*given, torch.float16, kernel="int8_sgl")


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cublas", "bf16"])
def test_b4_a_linear_gives_the_cpus_bits_on_every_backend(backend):
    for n, k, rotation in ((1544, 3072, "regular:256"), (33, 64, "regular:16"), (4304, 4304, "regular:16")):
        torch.manual_seed(0)
        linear = torch.nn.Linear(k, n, dtype=torch.bfloat16)
        cpu = hq.RotatedLinear.from_linear(linear, "int8", rotation)
        gpu = hq.RotatedLinear.from_linear(linear.cuda(), "int8", rotation, backend=backend)
        for m in (*ROWS, 300):
            x = torch.randn(m, k).bfloat16()
            assert torch.equal(gpu(x.cuda()).cpu(), cpu(x)), f"M={m}: {gpu.explain(m)}"


@needs_gpu
@pytest.mark.parametrize("backend", ["cublas", "bf16", "triton"])
def test_l3_a_product_beyond_32_bits(backend):
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    m, n, k = 32769, 65536, 16
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
    w = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
    qx = hq.QuantizedTensor(x, torch.rand(m, device="cuda"), None, INT8, hq.rotation.NONE)
    qw = hq.QuantizedTensor(w, torch.rand(n, device="cuda"), None, INT8, hq.rotation.NONE)
    y = hq.scaled_mm(qx, qw, backend=backend)
    for rows in (slice(0, 3), slice(16380, 16390), slice(m - 3, m)):
        expected = (x[rows].float() @ w.float().T) * qx.scales[rows, None] * qw.scales
        assert torch.equal(y[rows], expected.bfloat16())


@needs_gpu
@pytest.mark.parametrize("backend", ["cublas", "bf16"])
def test_a3_cuda_graph(backend):
    q = hq.quantize(torch.randn(64, 1024, device="cuda"), "int8")
    w = hq.quantize(torch.randn(128, 1024, device="cuda"), "int8")
    expected = hq.scaled_mm(q, w, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = hq.scaled_mm(q, w, backend=backend)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)


@needs_gpu
def test_without_triton_the_scales_are_torchs_and_the_bits_the_same(monkeypatch):
    given = [None if t is None else t.cuda() for t in operands(200, 77, 1100, torch.bfloat16)]
    expected = vendor.scaled_mm(*given, torch.bfloat16, kernel="int8_bf16")
    monkeypatch.setattr(vendor, "_HAS_TRITON", False)
    for kernel in ("int8_cublas", "int8_bf16"):
        assert torch.equal(vendor.scaled_mm(*given, torch.bfloat16, kernel=kernel), expected)
