"""Plans: decisions that can be read, asked for hardware that is not here, and logged when slow."""

import itertools
import logging
from dataclasses import FrozenInstanceError

import pytest
import torch

import hadaquant as hq
from hadaquant.errors import AccumulatorError, BackendError, BlockError, GroupError, UnknownChoice
from hadaquant.formats import FORMATS, get_format
from hadaquant.ops import LinearPlan, Target, plan
from hadaquant.ops.options import resolve_backend, using_backend
from hadaquant.ops.plan import plan_quantize, plan_scaled_mm, tell
from hadaquant.ops.target import TARGETS, get_target, target_of
from hadaquant.rotation import parse

GPUS = [name for name in TARGETS if name not in ("cpu", "interpreter")]
OLD = Target(name="sm_75", vendor="nvidia", arch=75)


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(plan, "has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def plans(found: LinearPlan) -> tuple[plan.Plan, plan.Plan]:
    return found.quantize, found.scaled_mm


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("target", GPUS)
def test_b4_every_gpu_has_a_kernel_and_a_reason(name, target, with_triton):
    for m, (n, k), rotation in itertools.product(
        (1, 2, 16, 17, 64, 4096), ((4096, 4096), (8, 64), (33, 4160)), ("none", "sylvester:64", "regular:16")
    ):
        for p in plans(hq.explain(name, m, n, k, target, rotation=rotation)):
            assert p.fast and p.kernel != "reference" and p.target == target and p.format == name
            assert len(p.reason) > 10 and all(kernel != p.kernel and why for kernel, why in p.rejected)


def test_plans_are_pure_and_frozen(with_triton):
    a, b = (hq.explain("int8", 64, 128, 256, "sm_90", rotation="regular:256") for _ in range(2))
    assert a == b and hash(a) == hash(b)
    with pytest.raises(FrozenInstanceError):
        a.quantize.kernel = "mine"  # type: ignore[misc]


def test_plan_is_readable(with_triton):
    text = str(hq.explain("nvfp4", 64, 128, 256, "cpu"))
    assert text.count("-> reference: plain torch, exact") == 2
    assert text.startswith("quantize [nvfp4 on cpu]") and "\nscaled_mm [nvfp4 on cpu]" in text
    assert "  not " in text and "Triton needs a GPU" in text


def test_a_matrix_of_an_odd_side_is_rotated_first(with_triton):
    r = hq.Rotation("matrix", matrix=torch.eye(48))
    found = plan_quantize(get_format("nvfp4"), r, get_target("sm_90"))
    assert found.kernel.startswith("rotate+") and "48" in found.reason


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a11_cpu_runs_the_reference_and_that_is_its_fast_path(backend):
    for p in plans(hq.explain("int8", 1, 8, 64, "cpu", backend=backend)):
        assert p.kernel == "reference" and p.fast


def test_a11_reference_on_a_gpu_is_not_its_fast_path(with_triton):
    for p in plans(hq.explain("int8", 1, 8, 64, "sm_90", backend="reference")):
        assert p.kernel == "reference" and not p.fast and p.reason == "asked for by name"
        assert all(why == "backend='reference'" for _, why in p.rejected)


def test_a11_an_old_gpu_or_no_triton(monkeypatch, with_triton):
    for p in plans(hq.explain("mxfp4", 1, 8, 64, OLD)):
        assert p.kernel == "reference" and not p.fast and "older than sm_80" in str(p)
    with pytest.raises(
        BackendError, match=r"no kernel runs quantize with backend='triton' on sm_75: .*older than sm_80"
    ):
        hq.explain("int8", 1, 8, 64, OLD, backend="triton")
    monkeypatch.setattr(plan, "has_triton", lambda: False)
    for p in plans(hq.explain("nvfp4", 1, 8, 64, "sm_90")):
        assert p.kernel == "reference" and not p.fast and "pip install 'hadaquant[triton]'" in str(p)
    with pytest.raises(BackendError, match="Triton is not installed"):
        hq.explain("nvfp4", 1, 8, 64, "sm_90", backend="triton")


def test_backend_triton_on_a_cpu_needs_the_interpreter(monkeypatch, with_triton):
    with pytest.raises(BackendError, match="set TRITON_INTERPRET=1"):
        hq.explain("int8", 1, 8, 64, "cpu", backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert hq.explain("int8", 1, 8, 64, "cpu", backend="triton").quantize.target == "interpreter"
    assert hq.explain("int8", 1, 8, 64, "cpu").quantize.kernel == "reference"  # auto never interprets


def test_explain_refuses_what_cannot_exist():
    with pytest.raises(UnknownChoice, match=r"unknown target 'sm_42': choose one of cpu, interpreter, sm_80.*gfx950"):
        hq.explain("int8", 1, 8, 64, "sm_42")
    with pytest.raises(UnknownChoice, match="unknown format 'fp8'"):
        hq.explain("fp8", 1, 8, 64)
    with pytest.raises(UnknownChoice, match="unknown backend 'cutlass'"):
        hq.explain("int8", 1, 8, 64, backend="cutlass")
    with pytest.raises(BlockError):
        hq.explain("mxfp4", 1, 8, 48)
    with pytest.raises(GroupError):
        hq.explain("int8", 1, 8, 96, rotation="regular:256")
    with pytest.raises(AccumulatorError):
        hq.explain("int8", 1, 8, 1 << 18)


# ---- options ------------------------------------------------------------------------------------


def test_b10_process_wide_and_of_a_call():
    assert resolve_backend("auto") == "auto"
    with using_backend("reference"):
        assert resolve_backend("auto") == "reference" and resolve_backend("triton") == "triton"
        assert hq.explain("int8", 1, 8, 64, "sm_90").quantize.kernel == "reference"
        with using_backend("triton"):
            assert resolve_backend("auto") == "triton" and resolve_backend("reference") == "reference"
    assert resolve_backend("auto") == "auto"
    hq.set_backend("reference")
    assert resolve_backend("auto") == "reference"
    with pytest.raises(UnknownChoice), using_backend("fast"):
        pass
    assert resolve_backend("auto") == "reference"


# ---- targets ------------------------------------------------------------------------------------


def test_targets():
    assert get_target(OLD) is OLD and str(OLD) == "sm_75"
    assert target_of(torch.device("cpu")) is TARGETS["cpu"]
    assert {name: (t.vendor, t.arch) for name, t in TARGETS.items() if t.vendor != "cpu"} == {
        **{f"sm_{arch}": ("nvidia", arch) for arch in (80, 86, 89, 90, 100, 103, 120)},
        "gfx942": ("amd", 942),
        "gfx950": ("amd", 950),
    }
    for consumer in ("sm_86", "sm_89", "sm_120"):
        assert TARGETS[consumer].shared_bytes == 99 * 1024


# ---- telling ------------------------------------------------------------------------------------


def test_a11_a_slow_plan_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(plan, "_told", set())
    slow = plan_quantize(get_format("int8"), parse("none"), OLD)
    fast = plan_scaled_mm(get_format("int8"), get_target("cpu"))
    with caplog.at_level(logging.WARNING, logger="hadaquant"):
        for _ in range(3):
            assert tell(slow) is slow and tell(fast) is fast
        tell(plan_quantize(get_format("int8"), parse("none"), OLD))
    assert [record.getMessage() for record in caplog.records] == [str(slow)]
    assert "older than sm_80" in caplog.text


def test_a11_a_layer_on_a_slow_target_logs_once(caplog, monkeypatch):
    monkeypatch.setattr(plan, "_told", set())
    monkeypatch.setattr("hadaquant.ops.library.target_of", lambda device: OLD)
    layer = hq.RotatedLinear.from_linear(torch.nn.Linear(64, 8), "int8", "regular:64")
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hadaquant"):
        for rows in (1, 2, 3):
            layer(torch.randn(rows, 64))
    assert [record.getMessage().split(" ")[0] for record in caplog.records] == ["scaled_mm"]  # quantize: by from_linear
