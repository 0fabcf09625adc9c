"""Which int8 product a plan takes: Triton's, cuBLASLt's, bfloat16 units or CUTLASS, and why."""

import pytest
import torch

import hadaquant as hq
from hadaquant.errors import BackendError, UnknownChoice
from hadaquant.formats import get_format
from hadaquant.ops import Target, candidates, plan
from hadaquant.ops.options import BACKENDS, PRODUCTS, using_backend, without_products
from hadaquant.ops.plan import plan_quantize, plan_rotate, plan_scaled_mm
from hadaquant.ops.target import get_target
from hadaquant.rotation import NONE, parse

INT8 = get_format("int8")


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    monkeypatch.setattr(plan, "has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def product(target: str | Target, m: int, n: int = 4096, k: int = 4096, backend: str = "auto", **how) -> plan.Plan:
    return plan_scaled_mm(INT8, get_target(target), backend, m=m, n=n, k=k, **how)


def why_not(found: plan.Plan, kernel: str) -> str:
    return dict(found.rejected)[kernel]


@pytest.mark.parametrize("m", [3, 16, 17, 64, 4096])
def test_b4_auto_multiplies_on_bfloat16_units_where_int8_units_are_slow(m):
    found = product("sm_103", m)
    assert found.kernel == "int8_bf16" and found.fast and "int8 units of sm_103 are slower" in found.reason
    assert "slower" in why_not(found, "int8_mm")


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_b4_auto_takes_cublas_from_blackwell_on(target):
    assert product(target, 4096).kernel == product(target, 17).kernel == "int8_cublas"
    few = product(target, 16)
    assert few.kernel.startswith("int8_few") and "17 rows" in why_not(few, "int8_cublas")
    odd = product(target, 4096, n=4097)
    assert odd.kernel == "int8_mm" and "N=4097" in why_not(odd, "int8_cublas")


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "gfx942", "gfx950"])
@pytest.mark.parametrize("m", [1, 16, 64, 4096])
def test_b4_auto_takes_triton_on_hopper_and_below_and_on_amd(target, m):
    found = product(target, m)
    triton = {"int8_gemv", "int8_mm_ahead", "int8_few_rows", "int8_mm", "int8_mm_hopper"}
    assert found.fast and found.kernel in triton
    assert {"int8_cublas", "int8_bf16", "int8_sgl"} <= dict(found.rejected).keys()


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_103", "sm_120"])
@pytest.mark.parametrize(("backend", "kernel"), [("cublas", "int8_cublas"), ("bf16", "int8_bf16")])
def test_b4_by_name(target, backend, kernel):
    for m, n, k in ((1, 4096, 4096), (33, 17, 16), (4096, 22473, 5376)):
        found = product(target, m, n, k, backend)
        assert found.kernel == kernel and found.fast
    assert "padded" in product(target, 33, 17, 16, "cublas").reason


def test_b4_sgl_is_never_chosen_and_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(candidates, "has_sgl", lambda: True)
    for target in ("sm_90", "sm_100", "sm_103"):
        assert product(target, 4096).kernel != "int8_sgl"
        assert "one ulp" in why_not(product(target, 4096), "int8_sgl")
    assert product("sm_90", 1, backend="sgl").kernel == "int8_sgl"
    for how, reason in (
        ({"n": 4104}, "multiples of 16, not N=4104"),
        ({"k": 4104}, "multiples of 16, not N=4096, K=4104"),
        ({"out_dtype": torch.float32}, "16-bit outputs, not torch.float32"),
    ):
        with pytest.raises(BackendError, match=f"backend='sgl' on sm_90: int8_sgl: .*{reason}"):
            product("sm_90", 64, backend="sgl", **how)
    monkeypatch.setattr(candidates, "has_sgl", lambda: False)
    with pytest.raises(BackendError, match="sgl-kernel is not installed"):
        product("sm_90", 64, backend="sgl")


@pytest.mark.parametrize("backend", PRODUCTS)
@pytest.mark.parametrize("target", ["cpu", "gfx942"])
def test_b4_other_hardware_is_refused_with_the_reason(backend, target):
    with pytest.raises(
        BackendError, match=f"scaled_mm with backend='{backend}' on {target}: int8_{backend}: it .*NVIDIA"
    ):
        product(target, 64, backend=backend)


@pytest.mark.parametrize("backend", PRODUCTS)
def test_b4_other_formats_are_refused_with_the_reason(backend):
    reason = "sm_90 has no FP4 units" if backend == "cublas" else f"{backend}: it has no kernel for scaled_mm of nvfp4"
    with pytest.raises(BackendError, match=reason):
        hq.explain("nvfp4", 64, 64, 64, "sm_90", backend=backend)


@pytest.mark.parametrize("backend", PRODUCTS)
def test_b4_a_products_name_leaves_quantize_and_rotate_alone(backend):
    target = get_target("sm_90")
    as_auto = plan_quantize(INT8, parse("regular:256"), target), plan_rotate(NONE, target)
    assert (plan_quantize(INT8, parse("regular:256"), target, backend), plan_rotate(NONE, target, backend)) == as_auto
    with using_backend(backend):
        assert without_products("auto") == "auto" and without_products("reference") == "reference"
        assert (plan_quantize(INT8, parse("regular:256"), target), plan_rotate(NONE, target)) == as_auto
    assert plan_quantize(INT8, NONE, get_target("cpu"), backend).kernel == "reference"


def test_b7_without_triton_cublas_multiplies_and_says_that_it_is_not_the_fast_way(monkeypatch):
    monkeypatch.setattr(plan, "has_triton", lambda: False)
    found = hq.explain("int8", 64, 64, 64, "sm_90")
    assert found.quantize.kernel == "reference"
    assert found.scaled_mm.kernel == "int8_cublas" and not found.scaled_mm.fast
    assert "Triton is not installed" in str(found.scaled_mm)
    assert product("sm_103", 64).kernel == "int8_bf16" and product("gfx942", 64).kernel == "reference"


def test_b10_the_message_lists_the_choices():
    choices = ", ".join(BACKENDS)
    assert choices == "auto, reference, triton, cublas, bf16, sgl"
    for call in (
        lambda: hq.set_backend("cutlass"),
        lambda: hq.RotatedLinear(64, 8, "int8", backend="cutlass"),
        lambda: hq.explain("int8", 1, 8, 64, backend="cutlass"),
    ):
        with pytest.raises(UnknownChoice, match=f"unknown backend 'cutlass': choose one of {choices}"):
            call()


@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("activations", ["coded", "full"])
@pytest.mark.parametrize("m", [1, 4096])
def test_b4_a_reason_against_every_other_kernel_of_the_format(format, activations, m):
    found = hq.explain(format, m, 4096, 4096, "sm_90", activations=activations)
    make = candidates.product_candidates if activations == "coded" else plan.weight_candidates
    every = [c.kernel for c in make(get_format(format), get_target("sm_90"), m, 4096, 4096, torch.bfloat16)]
    others = dict(found.scaled_mm.rejected)
    assert [k for k in every if k != found.scaled_mm.kernel] == list(others) and all(others.values())
    assert others.get("int8_mm", others.get("fp4_mm", "")).startswith("not needed: ") or activations == "full"
    assert format == "int8" or not any(kernel.startswith("int8_") for kernel in others)


# ---- FP4 ----------------------------------------------------------------------------------------


def fp4(target: str, m: int, n: int = 4096, k: int = 4096, format: str = "nvfp4", **how) -> plan.Plan:
    return plan_scaled_mm(get_format(format), get_target(target), m=m, n=n, k=k, **how)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4-even"])
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90"])
def test_fp4_by_the_number_of_rows(format, target):
    found = [fp4(target, m, format=format) for m in (1, 4, 5, 16, 64, 65)]
    some, many = ("fp4_mm_hopper",) * 2 if target == "sm_90" else ("fp4_value_rows", "fp4_unpacked")
    few = ["fp4_gemv", "fp4_gemv", "fp4_value_rows", "fp4_value_rows"]
    assert [p.kernel for p in found] == [*few, some, many]
    assert "M=65 is above 64" in why_not(found[-1], "fp4_value_rows")


def test_fp4_x_is_read_once_a_program():
    more = fp4("sm_90", 17)
    assert more.kernel == "fp4_mm_hopper" and "all M=17 rows" in why_not(more, "fp4_value_rows")
    assert fp4("sm_90", 17, out_dtype=torch.float32).kernel == "fp4_value_rows"


def test_fp4_what_hopper_s_kernel_needs():
    assert fp4("sm_90", 4096).kernel == "fp4_mm_hopper"
    assert "sm_90" in why_not(fp4("sm_80", 4096), "fp4_mm_hopper")
    assert "N=4097" in why_not(fp4("sm_90", 4096, n=4097), "fp4_mm_hopper")
    assert "16-bit" in why_not(fp4("sm_90", 4096, out_dtype=torch.float32), "fp4_mm_hopper")


@pytest.mark.parametrize("m", [1, 16, 4096])
def test_fp4_the_portable_kernel_takes_the_rest(m):
    assert fp4("gfx942", m).kernel == "fp4_mm"
    odd = fp4("sm_90", m, k=4112)
    assert odd.kernel == "fp4_unpacked" and "K=4112" in why_not(odd, "fp4_gemv")


@pytest.mark.parametrize(("m", "n", "tile"), [(3, 4096, (64, 32)), (64, 4096, (64, 32)), (65, 4096, (64, 64)),
                                              (256, 4096, (64, 128)), (64, 14336, (64, 128)),
                                              (512, 4096, (128, 128))])  # fmt: skip
def test_int8_tiles_on_hopper_are_the_smallest_with_a_multiprocessor_each(m, n, tile):
    found = product("sm_90", m, n)
    assert (found.kernel, found.tile) == ("int8_mm_ahead", tile)
    programs = -(-m // tile[0]) * -(-n // tile[1])
    assert programs <= get_target("sm_90").multiprocessors
    assert "sm_90" in why_not(product("sm_100", m, n), "int8_mm_ahead")


def test_int8_products_that_tma_cannot_feed_or_that_are_too_large():
    assert "K=4104" in why_not(product("sm_90", 64, k=4104), "int8_mm_ahead")
    assert "more 128x128 tiles" in why_not(product("sm_90", 4096), "int8_mm_ahead")
    assert product("sm_90", 2).kernel == "int8_gemv"


def test_int8_tiles_of_plan_and_kernel_are_the_same():
    pytest.importorskip("triton")
    from hadaquant.kernels.gemm_int8_ahead import TILES

    assert tuple(TILES) == candidates.AHEAD_TILES


@pytest.mark.parametrize(("m", "n", "tile"), [(8, 4096, (8, 16)), (16, 4096, (16, 16)), (16, 14336, (16, 32)),
                                              (32, 4096, (32, 128)), (64, 4096, (64, 128))])  # fmt: skip
def test_fp4_tiles_are_narrow_while_they_all_run_at_once(m, n, tile):
    assert fp4("sm_90", m, n).tile == tile


@pytest.mark.parametrize(("m", "n", "tile"), [(1, 4096, 16), (17, 4096, 32), (128, 4096, 128), (1024, 4096, 256),
                                              (1024, 14336, 256), (4096, 4096, 256), (2048, 1024, 128)])  # fmt: skip
def test_fp4_tiles_on_hopper_fill_the_last_wave(m, n, tile):
    assert candidates.hopper_tile(m, n, get_target("sm_90")) == (tile, 128)
