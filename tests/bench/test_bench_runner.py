"""Checks come before times: every op on a CPU, tiny; what is wrong is named and not timed. Never how fast."""

import json

import pytest
import torch

from hadaquant.bench import OPS, Case, run, runner
from hadaquant.bench.contest import Absent, Contest, Variant, differing, far

CPU = torch.device("cpu")
KEYS = ["run", "git", "date", "gpu", "torch", "triton", "op", "format", "rotation", "variant", "shape", "dtype"]
KEYS += ["timing", "ms", "bytes", "flops", "host_us"]
CASES = (
    Case(op="rotate_quantize", shape=(5, 256)),
    Case(op="rotate_quantize", shape=(5, 64), format="nvfp4", rotation="sylvester:16"),
    Case(op="rotate_quantize", shape=(5, 64), format="mxfp4-ceil", rotation="none"),
    Case(op="front_end", shape=(5, 256), front_end="rms_norm"),
    Case(op="front_end", shape=(5, 256), front_end="ada_norm"),
    Case(op="front_end", shape=(5, 256), front_end="silu_mul"),
    Case(op="front_end", shape=(5, 256), front_end="gelu_tanh"),
    Case(op="gemm", shape=(5, 8, 64), rotation="none"),
    Case(op="gemm", shape=(5, 8, 64), format="nvfp4", rotation="none"),
    Case(op="linear", shape=(5, 8, 256)),
    Case(op="linear", shape=(5, 8, 64), format="nvfp4", rotation="sylvester:16"),
    Case(op="linear", shape=(5, 8, 64), format="mxfp4", rotation="regular:64"),
    Case(op="block", shape=(2, 4, 256)),
    Case(op="block_linears", shape=(1, 4, 256)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_op_is_right_and_timed(case, tmp_path):
    said = []
    outcome = run([case], CPU, out=tmp_path / "speed.jsonl", rounds=1, tell=said.append)
    assert not outcome.red and not outcome.left
    assert {row["variant"] for row in outcome.rows} >= {"ours", OPS[case.op].reference}
    assert [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()] == outcome.rows
    assert len({row["run"] for row in outcome.rows}) == 1
    for row in outcome.rows:
        assert [key for key in row if key != "front_end"] == KEYS
        assert row.get("front_end") == case.front_end
        assert row["ms"] > 0 and row["timing"] == "wall" and row["host_us"] is None
    assert said[-1].startswith(str(case))


def test_least_bytes_and_operations():
    def of(**case):
        return run([Case(**case)], CPU, rounds=1).rows[0]

    assert of(op="rotate_quantize", shape=(4, 256))["bytes"] == 4 * 256 * 3 + 4 * 4
    nvfp4 = of(op="rotate_quantize", shape=(4, 256), format="nvfp4", rotation="none")
    assert nvfp4["bytes"] == 4 * 256 * 2.5625 + 4
    mxfp4 = of(op="rotate_quantize", shape=(4, 256), format="mxfp4", rotation="none")
    assert mxfp4["bytes"] == 4 * 256 * 2.53125
    assert of(op="front_end", shape=(4, 256), front_end="silu_mul")["bytes"] == 4 * 256 * 5 + 4 * 4
    assert of(op="linear", shape=(4, 8, 256))["flops"] == 2 * 4 * 8 * 256
    # qkv, out, up and down of a block: 12 · hidden² weights
    assert of(op="block_linears", shape=(2, 4, 256))["flops"] == 2 * 2 * 4 * 12 * 256**2


def contest(**variants):
    return lambda case, device: Contest({**variants}, ("wall",))


def right(check=None, ours=True):
    return lambda: Variant([lambda: None], check, ours)


def absent():
    raise Absent("its package is not installed")


def broken():
    raise RuntimeError("it cannot be built\nsecond line")


def test_a_wrong_op_is_named_and_not_timed_and_the_others_run(monkeypatch):
    wrong = contest(ours=right(lambda: "3 of 9 bytes differ"), torch_bf16=right())
    monkeypatch.setitem(runner.CONTESTS, "gemm", wrong)
    gemm, linear = Case(op="gemm", shape=(1, 1, 64), rotation="none"), Case(op="linear", shape=(1, 8, 256))
    outcome = run([gemm, linear], CPU, rounds=1)
    assert outcome.red == ["gemm int8 none 1x1x64: ours: 3 of 9 bytes differ"]
    assert {row["op"] for row in outcome.rows} == {"linear"}


def test_variants_that_are_absent_wrong_or_broken(monkeypatch):
    made = contest(
        ours=right(),
        torch_bf16=right(),
        sgl=absent,
        cublas=broken,
        comfy=right(lambda: "its relative error is 0.5", ours=False),
        plain_triton=right(lambda: "1 of 9 bytes differ"),
    )
    monkeypatch.setitem(runner.CONTESTS, "gemm", made)
    said = []
    outcome = run([Case(op="gemm", shape=(1, 1, 64), rotation="none")], CPU, rounds=2, tell=said.append)
    assert {row["variant"] for row in outcome.rows} == {"ours", "torch_bf16"}
    assert "gemm int8 none 1x1x64: without sgl: its package is not installed" in said
    assert "gemm int8 none 1x1x64: without comfy: its relative error is 0.5" in said
    assert outcome.red == [
        "gemm int8 none 1x1x64: cublas: RuntimeError: it cannot be built … second line",
        "gemm int8 none 1x1x64: plain_triton: 1 of 9 bytes differ",
    ]


def test_an_op_that_cannot_be_built_is_red(monkeypatch):
    monkeypatch.setitem(runner.CONTESTS, "gemm", lambda case, device: broken())
    outcome = run([Case(op="gemm", shape=(1, 1, 64), rotation="none")], CPU)
    assert outcome.red == ["gemm int8 none 1x1x64: RuntimeError: it cannot be built … second line"] and not outcome.rows


def test_only_some_variants():
    outcome = run([Case(op="rotate_quantize", shape=(4, 64), format="nvfp4", rotation="none")], CPU,
                  variants=["ours_tiled"], rounds=1)  # fmt: skip
    assert {row["variant"] for row in outcome.rows} == {"ours", "copy", "ours_tiled"}


def test_out_of_time():
    cases = [Case(op="linear", shape=(m, 8, 256)) for m in (1, 2, 3)]
    outcome = run(cases, CPU, rounds=1, seconds=0.0)
    assert outcome.left == cases and not outcome.rows


def test_what_the_checks_say():
    a = torch.tensor([1.0, 2.0])
    assert differing([a, None], [a.clone(), None]) is None
    assert differing([a], [torch.tensor([1.0, -2.0])]) == "1 of 8 bytes differ"
    assert "float32 where" in differing([a], [a.double()])
    assert "lacks" in differing([a], [None])
    assert far(a, a, 0.0) is None
    assert far(2 * a, a, 0.5) == "its relative error is 1.0000, above 0.5000"
    assert far(torch.full((2,), float("nan")), a, 0.5) is not None
