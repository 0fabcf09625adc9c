"""Front ends on register tiles: the reference's bytes for norms, explained near-ties for activations. On a GPU only."""

import pytest
import torch

import hadaquant as hq
from hadaquant import front, reference
from hadaquant.formats import get_format
from hadaquant.rotation import Rotation, parse
from hadaquant.tensor import QuantizedTensor

from .front_ends import check_explained, norms, on
from .test_twins import assert_same, nasty

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hadaquant.kernels.front_gluon import inverse_root_of
from hadaquant.kernels.quantize_front_gluon import quantize_front
from hadaquant.kernels.runtime import OPTIONS

INT8 = get_format("int8")
SIGNED = Rotation("regular", 256, torch.randint(0, 2, (256,), generator=torch.Generator().manual_seed(1)) * 2 - 1)


def ours(x: torch.Tensor, front_end: hq.FrontEnd, rotation: Rotation) -> QuantizedTensor:
    codes = torch.full(x.shape, 99, dtype=torch.int8, device="cuda")
    scales = torch.full(x.shape[:1], 7.0, device="cuda")
    quantize_front(x, codes, scales, INT8, rotation.to("cuda"), front_end)
    return QuantizedTensor(codes, scales, None, INT8, rotation.to("cuda"))


def oracle(x: torch.Tensor, front_end: hq.FrontEnd, rotation: Rotation) -> QuantizedTensor:
    codes, scales = reference.quantize(x, INT8, rotation, None, front_end=front_end)
    return QuantizedTensor(codes, scales, None, INT8, rotation)


def check_norm(x: torch.Tensor, front_end: hq.FrontEnd, rotation: Rotation) -> None:
    """x [B, L, K] on the CPU."""
    k = x.shape[-1]
    found = ours(x.cuda().view(-1, k), on(front_end, "cuda"), rotation)
    expected = oracle(x, front_end, rotation)
    assert_same(found.scales, expected.scales.view(-1), "scales")
    assert_same(found.codes, expected.codes.view(-1, k), "codes")


# of every number of warps, whole and half tiles, ragged or not, with the next row in registers or in shared memory
@pytest.mark.parametrize(
    ("kind", "k"),
    [
        *(("rms_norm with weight", k) for k in (256, 3072, 4096, 12288)),
        *(("ada_norm of batches", k) for k in (768, 3072, 4096, 5120, 13824, 32768)),
    ],
)
def test_norms(kind, k):
    x = nasty(34, k, torch.bfloat16).view(2, 17, k) + (1 if kind.startswith("ada") else 0)
    check_norm(x, norms(x, torch.bfloat16)[kind], parse("regular:256"))


def test_each_row_has_operands_of_its_own():
    x = nasty(1060, 768, torch.bfloat16).view(1060, 1, 768)
    check_norm(x, norms(x, torch.bfloat16)["ada_norm of batches"], parse("regular:256"))


@pytest.mark.parametrize("spec", ["regular:16", "regular:64", "sylvester:128", "sylvester:512"])
def test_norms_under_other_rotations(spec):
    x = nasty(301, 3072, torch.bfloat16).view(1, 301, 3072)
    check_norm(x, norms(x, torch.bfloat16)["rms_norm with weight"], parse(spec))


@pytest.mark.parametrize(
    ("dtype", "operands"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.bfloat16)],
)
def test_norms_of_mixed_dtypes_with_signs(dtype, operands):
    x = nasty(34, 1024, dtype).view(2, 17, 1024)
    for front_end in norms(x, operands).values():
        check_norm(x, front_end, SIGNED)


@gluon.jit
def roots(v_ptr, y_ptr, EPS: gl.constexpr, K: gl.constexpr):
    i = gl.program_id(0) * 1024 + gl.arange(0, 1024, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y_ptr + i, inverse_root_of(gl.load(v_ptr + i), EPS, K))


@pytest.mark.parametrize("k", [256, 3072, 12288])
def test_roots_of_every_mantissa(k):
    mantissas = torch.arange(2**23, device="cuda", dtype=torch.int32)
    for exponent in (0, 60, 107, 108, 128, 140, 253):
        v = (mantissas + (exponent << 23)).view(torch.float32)
        y = torch.empty_like(v)
        roots[(2**13,)](v, y, **{"EPS": 1e-6, "K": k, **OPTIONS})
        mean = (v.double() / k).float() + 1e-6
        expected = (1 / mean.double().sqrt().float().double()).float()
        assert torch.equal(y, expected), exponent


@pytest.mark.parametrize(
    ("spec", "k"), [*(("regular:256", k) for k in (768, 3072, 4096, 5120, 12288)), ("sylvester:64", 3072)]
)
def test_activations(spec, k):
    gen = torch.Generator().manual_seed(4)
    whole = (torch.randn(301, 2 * k, generator=gen) * 3).to(torch.bfloat16)
    gate, up = whole.chunk(2, -1)
    there = whole.cuda().chunk(2, -1)
    for mine, its in ((front.silu_mul(up), front.silu_mul(there[1])), (front.gelu_tanh(), front.gelu_tanh())):
        check_explained(ours(there[0], its, parse(spec)), oracle(gate, mine, parse(spec)), gate, mine)


def test_more_rows_than_programs_at_once():
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(9001, 768, generator=gen).to(torch.bfloat16)
    check_explained(
        ours(x.cuda(), front.gelu_tanh(), parse("regular:16")),
        oracle(x, front.gelu_tanh(), parse("regular:16")),
        x,
        front.gelu_tanh(),
    )


def test_bad_rows_behind_activations():
    x = nasty(9, 1024, torch.bfloat16)
    for front_end in (front.silu_mul(torch.ones_like(x)), front.gelu_tanh()):
        found = ours(x.cuda(), on(front_end, "cuda"), parse("regular:16"))
        expected = oracle(x, front_end, parse("regular:16"))
        bad = expected.scales.isnan()
        assert bad.any() and torch.equal(bad, found.scales.cpu().isnan())
        assert not found.codes[bad.cuda()].any()


@pytest.mark.parametrize("m", [1, 2, 131, 1057])
def test_any_number_of_rows(m):
    x = torch.randn(m, 1, 1024).to(torch.bfloat16)
    check_norm(x, norms(x, torch.bfloat16)["ada_norm of batches"], parse("regular:64"))


def test_rows_that_do_not_begin_where_loads_may():
    whole = torch.randn(9, 1024 + 8).to(torch.bfloat16)
    weight = torch.randn(1025).to(torch.bfloat16)
    x, w = whole[:, 8:], weight[1:]
    found = ours(whole.cuda()[:, 8:], front.rms_norm(weight.cuda()[1:]), parse("regular:16"))
    expected = oracle(x, front.rms_norm(w), parse("regular:16"))
    assert_same(found.scales, expected.scales, "scales")
    assert_same(found.codes, expected.codes, "codes")


def test_the_plan_takes_it():
    x = torch.randn(2, 9, 1024).to(torch.bfloat16)
    front_end = norms(x, torch.bfloat16)["ada_norm"]
    a = hq.quantize(x.cuda(), "int8", rotation="regular:256", front_end=on(front_end, "cuda"))
    b = hq.quantize(x, "int8", rotation="regular:256", front_end=front_end)
    assert_same(a.codes, b.codes, "codes")
    assert_same(a.scales, b.scales, "scales")
