"""Gluon kernels give the bytes of their plain Triton twins. They run on a GPU only."""

import pytest
import torch

from hadaquant import reference
from hadaquant.formats import get_format
from hadaquant.rotation import Rotation, parse

from .test_twins import assert_same, nasty

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def rows_of(x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    from hadaquant.kernels.quantize_rows_gluon import quantize_rows

    codes = torch.full(x.shape, 99, dtype=torch.int8, device="cuda")
    scales = torch.full(x.shape[:1], 7.0, device="cuda")
    quantize_rows(x, codes, scales, get_format("int8"), rotation)
    return codes, scales


def check_rows(x: torch.Tensor, rotation: Rotation) -> None:
    ours = rows_of(x.cuda(), rotation.to("cuda"))
    oracle = reference.quantize(x, get_format("int8"), rotation, None)
    assert_same(ours[0], oracle[0], "codes")
    assert_same(ours[1], oracle[1], "scales")


SPECS = (
    *(f"regular:{g}" for g in (16, 64, 256, 1024)),
    *(f"sylvester:{g}" for g in (16, 32, 64, 128, 256, 512, 1024)),
)
#: A half tile alone; whole and half tiles; a row that ends within its last tile.
WIDTHS = (256, 1024, 3072, 5120, 13824)


@pytest.mark.parametrize(("spec", "k"), [(s, k) for s in SPECS for k in WIDTHS if k % parse(s).group == 0])
def test_rows(spec, k):
    check_rows(nasty(301, k, torch.bfloat16), parse(spec))


@pytest.mark.parametrize("k", [768, 4096, 12288, 32768])
def test_rows_of_other_widths(k):
    check_rows(nasty(301, k, torch.bfloat16), parse("regular:256"))


@pytest.mark.parametrize("spec", ["regular:256", "sylvester:64", "regular:1024"])
def test_rows_of_float16_with_signs(spec):
    r = parse(spec)
    signs = torch.randint(0, 2, (r.group,), generator=torch.Generator().manual_seed(2)) * 2 - 1
    check_rows(nasty(301, 3072, torch.float16), Rotation(r.kind, r.group, signs=signs))


@pytest.mark.parametrize("m", [1, 2, 131, 1057])
def test_any_number_of_rows(m):
    check_rows(nasty(m, 3072, torch.bfloat16), parse("regular:256"))


def test_rows_of_any_bf16_values():
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    check_rows(
        every[torch.randperm(65536, generator=torch.Generator().manual_seed(0))].view(64, 1024), parse("sylvester:16")
    )


def check_product(
    kernel: str, m: int, n: int, k: int, bias: bool, dtype: torch.dtype = torch.bfloat16, tile=None, at_rest=False
) -> None:
    from hadaquant.kernels.products_int8 import _MAKERS, Case

    gen = torch.Generator(device="cuda").manual_seed(m)
    x, w = (torch.randint(-127, 128, (r, k), dtype=torch.int8, device="cuda", generator=gen) for r in (m, n))
    sx, sw = (torch.rand(r, device="cuda", generator=gen) + 0.5 for r in (m, n))
    b = torch.randn(n, device="cuda", generator=gen).to(dtype) if bias else None
    y = torch.full((m + 1, n), float("nan"), dtype=dtype, device="cuda")
    how = {"bias": dtype if bias else None, "device": x.device, "tile": tile, "at_rest": at_rest}
    product = _MAKERS[kernel](Case(shape=(m, n, k), out=dtype, **how))
    product(*(None if t is None else t.data_ptr() for t in (x, sx, w, sw, b, y)))
    # sums of products below 2**53 are exact in float64
    oracle = (x.double() @ w.double().T).float() * sx[:, None] * sw[None, :]
    oracle = oracle + b.float() if b is not None else oracle
    assert torch.equal(y[:m], oracle.to(dtype))
    assert y[m].isnan().all()


hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)


@hopper
class TestHopperProductOfFewRows:
    @pytest.mark.parametrize("tile", [(64, 32), (64, 64), (64, 128), (128, 128)], ids=str)
    @pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 17, 40, 63, 64, 65, 100, 127, 128, 129, 200, 515])
    def test_bitwise(self, tile, m):
        # N that ends within a tile; K of fewer steps than stages, of more, and that ends within a step
        for n, k in ((33, 16), (512, 1024), (520, 4304), (129, 256 * 21)):
            check_product("int8_mm_ahead", m, n, k, n % 2 == 0, tile=tile, at_rest=m % 2 == 0)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_other_outputs(self, dtype):
        check_product("int8_mm_ahead", 100, 520, 272, True, dtype, tile=(64, 64))


@hopper
class TestHopperProduct:
    kernel = "int8_mm_hopper"

    @pytest.mark.parametrize("shape", [(128, 256, 128), (1100, 1544, 1296), (4608, 3072, 1024), (64, 8, 16)], ids=str)
    @pytest.mark.parametrize("bias", [False, True])
    def test_bitwise(self, shape, bias):
        check_product(self.kernel, *shape, bias)

    @pytest.mark.parametrize("programs", [3, 5, 7])
    def test_many_tiles_a_program(self, monkeypatch, programs):
        # a wrong stage freed deadlocks only where a program has more than one tile; 5 and 7 cut the last wave
        monkeypatch.setattr("hadaquant.kernels.products_int8.multiprocessors", lambda _: programs)
        check_product(self.kernel, 1100, 1544, 1296, True)

    def test_float16(self):
        check_product(self.kernel, 300, 520, 272, True, torch.float16)

    @pytest.mark.parametrize("shape", [(4608, 3072, 1024), (2304, 3072, 512)], ids=str)
    def test_cut_tiles(self, shape):
        check_product(self.kernel, *shape, True)
