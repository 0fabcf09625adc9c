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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

INT8 = get_format("int8")
SIGNED = Rotation("regular", 256, torch.randint(0, 2, (256,), generator=torch.Generator().manual_seed(1)) * 2 - 1)


def ours(x: torch.Tensor, front_end: hq.FrontEnd, rotation: Rotation) -> QuantizedTensor:
    from hadaquant.kernels.quantize_front_gluon import quantize_front

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


# of every number of warps, whole and half tiles, ragged or not
@pytest.mark.parametrize("k", [256, 768, 3072, 4096, 5120, 12288, 13824, 32768])
@pytest.mark.parametrize("kind", ["rms_norm with weight", "ada_norm of batches"])
def test_norms(kind, k):
    x = nasty(34, k, torch.bfloat16).view(2, 17, k) + (1 if kind.startswith("ada") else 0)
    check_norm(x, norms(x, torch.bfloat16)[kind], parse("regular:256"))


@pytest.mark.parametrize("spec", ["regular:16", "sylvester:32", "regular:64", "sylvester:128", "sylvester:512"])
def test_norms_under_other_rotations(spec):
    x = nasty(301, 3072, torch.bfloat16).view(1, 301, 3072)
    check_norm(x, norms(x, torch.bfloat16)["rms_norm with weight"], parse(spec))


@pytest.mark.parametrize("operands", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_mixed_dtypes_with_signs(dtype, operands):
    x = nasty(34, 1024, dtype).view(2, 17, 1024)
    for front_end in norms(x, operands).values():
        check_norm(x, front_end, SIGNED)


@pytest.mark.parametrize("k", [768, 3072, 5120, 12288])
@pytest.mark.parametrize("spec", ["regular:256", "sylvester:64"])
def test_activations(spec, k):
    gen = torch.Generator().manual_seed(4)
    whole = (torch.randn(301, 2 * k, generator=gen) * 3).to(torch.bfloat16)
    gate, up = whole.chunk(2, -1)
    there = whole.cuda().chunk(2, -1)
    for mine, its in ((front.silu_mul(up), front.silu_mul(there[1])), (front.gelu_tanh(), front.gelu_tanh())):
        check_explained(ours(there[0], its, parse(spec)), oracle(gate, mine, parse(spec)), gate, mine)


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
