"""Which product a plan takes for full activations, and why."""

import pytest
import torch

import hadaquant as hq
from hadaquant.errors import BackendError, UnknownChoice
from hadaquant.formats import FORMATS, get_format
from hadaquant.ops import plan
from hadaquant.ops.options import PRODUCTS
from hadaquant.ops.plan import plan_weight_mm
from hadaquant.ops.target import TARGETS, get_target


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    monkeypatch.setattr(plan, "has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def product(target: str, m: int, n: int = 4096, k: int = 4096, format: str = "nvfp4", **how) -> plan.Plan:
    return plan_weight_mm(get_format(format), get_target(target), m=m, n=n, k=k, **how)


def why_not(found: plan.Plan, kernel: str) -> str:
    return dict(found.rejected)[kernel]


@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("target", [name for name in TARGETS if name not in ("cpu", "interpreter")])
def test_every_format_has_a_kernel_on_every_gpu(target, format):
    for m in (1, 64, 65, 4096):
        found = product(target, m, format=format)
        assert found.kernel.startswith("weight_") and found.fast and found.op == "weight_mm"


def test_by_the_number_of_rows():
    found = [product("sm_90", m).kernel for m in (1, 16, 17, 4096)]
    assert found == ["weight_few_rows", "weight_few_rows", "weight_mm_hopper", "weight_mm_hopper"]
    found = [product("sm_80", m).kernel for m in (1, 64, 65)]
    assert found == ["weight_few_rows", "weight_few_rows", "weight_unpacked"]
    found = [product("sm_90", m, format="int8").kernel for m in (1, 64, 65)]
    assert found == ["weight_mm", "weight_mm", "weight_unpacked"]
    assert [product("sm_90", m).tile for m in (1, 9, 17)] == [(8, 16), (16, 16), (32, 128)]


def test_what_speaks_against_each():
    assert "M=65 is above 64" in why_not(product("sm_80", 65), "weight_few_rows")
    assert "M=17 is above 16" in why_not(product("sm_90", 17), "weight_few_rows")
    assert "K=4112" in why_not(product("sm_90", 1, k=4112), "weight_few_rows")
    assert "not int8" in why_not(product("sm_90", 1, format="int8"), "weight_few_rows")
    assert "sm_90" in why_not(product("sm_100", 128), "weight_mm_hopper")
    assert "N=4097" in why_not(product("sm_90", 128, n=4097), "weight_mm_hopper")
    assert "16-bit" in why_not(product("sm_90", 128, out_dtype=torch.float32), "weight_mm_hopper")
    assert product("gfx942", 4096).kernel == "weight_mm"


def test_explain_says_rotate_and_multiply():
    found = hq.explain("nvfp4", 16, 4096, 4096, "sm_90", rotation="sylvester:16", activations="full")
    assert found.quantize.op == found.quantize.kernel == "rotate" and found.scaled_mm.op == "weight_mm"
    assert hq.explain("nvfp4", 16, 4096, 4096, "cpu", activations="full").scaled_mm.kernel == "reference"
    with pytest.raises(UnknownChoice, match="unknown activations 'half': choose one of coded, full"):
        hq.explain("nvfp4", 16, 4096, 4096, activations="half")


@pytest.mark.parametrize("backend", PRODUCTS)
def test_products_of_codes_are_refused_with_the_reason(backend):
    with pytest.raises(BackendError, match=f"{backend}: it has no kernel for weight_mm of "):
        hq.explain("int8", 64, 64, 64, "sm_90", activations="full", backend=backend)
