"""The commands quantize, inspect and explain, as a stranger meets them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import hadaquant as hq
from hadaquant.cli import app
from hadaquant.cli.output import size


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    gen = torch.Generator().manual_seed(0)
    path = tmp_path / "model.safetensors"
    tensors = {f"layers.{i}.up.weight": torch.randn(32, 96, generator=gen) for i in range(2)}
    tensors |= {"embed.weight": torch.randn(50, 96, generator=gen), "lm_head.weight": torch.randn(50, 96)}
    save_file(tensors, path)
    return path


def assert_error(result: Result, *parts: str) -> None:
    """One line on stderr, exit code 1, no traceback, nothing on stdout."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in parts), line
    assert result.stdout == ""


def test_quantize_reports_and_writes(source, tmp_path) -> None:
    out, report = tmp_path / "out.safetensors", tmp_path / "report.json"
    args = ("--format", "int8", "--rotation", "regular:256", "--json", report, "--verbose")
    result = run("quantize", source, out, *args)
    assert result.exit_code == 0, result.stderr
    w = load_file(source)["layers.0.up.weight"]
    q = hq.quantize(w, "int8", rotation="regular:16")
    assert torch.equal(load_file(out)["layers.0.up.codes"], q.codes)
    error = f"{((q.dequantize() - w).norm() / w.norm()).item():.4f}"
    row = next(line for line in result.stdout.splitlines() if "layers.0.up" in line)
    assert all(part in row for part in ("32 × 96", "int8", "regular:16", "fitted", error, "12.0 KiB → 3.2 KiB"))
    assert "matches skip pattern 'lm_head'" in result.stdout
    assert "named like an embedding" in result.stdout
    before, after = source.stat().st_size, out.stat().st_size
    assert f"2 layers quantized, 2 kept; largest error {error}"[:30] in result.stdout
    assert f"{size(before)} → {size(after)} ({after / before:.0%})" in result.stdout
    content = json.loads(report.read_text())
    assert (content["file_bytes_before"], content["file_bytes_after"]) == (before, after)
    assert content["record"]["source"] == str(source)
    assert [x["name"] for x in content["layers"] if x["format"]] == ["layers.0.up", "layers.1.up"]


def test_layers_of_a_kind_share_a_line(source, tmp_path) -> None:
    out = tmp_path / "out.safetensors"
    result = run("quantize", source, out, "--format", "int8", "--rotation", "regular:16")
    weights = load_file(source)
    errors = []
    for i in range(2):
        w = weights[f"layers.{i}.up.weight"]
        errors.append(f"{((hq.quantize(w, 'int8', rotation='regular:16').dequantize() - w).norm() / w.norm()):.4f}")
    (row,) = (line for line in result.stdout.splitlines() if "32 × 96" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        *("layers.*.up", "2", "32 × 96", "int8", "regular:16", "24.0 KiB → 6.4 KiB"),
        " … ".join(sorted(set(errors))),
    ]


def test_c8_skip_patterns(source, tmp_path) -> None:
    args = ("--format", "int8", "--rotation", "none", "--skip", "layers.1", "--skip", "lm_head")
    result = run("quantize", source, tmp_path / "a.safetensors", *args)
    assert result.exit_code == 0
    assert "1 layer quantized" in result.stdout
    result = run("quantize", source, tmp_path / "b.safetensors", *args, "--skip", "layer.1")
    assert_error(result, "pattern 'layer.1' matches no layer; the layers are layers.0.up")
    assert not (tmp_path / "b.safetensors").exists()


def test_comfy_layout(source, tmp_path) -> None:
    args = ("--format", "int8", "--rotation", "regular:16", "--layout", "comfy")
    assert run("quantize", source, tmp_path / "c.safetensors", *args).exit_code == 0
    shown = run("inspect", tmp_path / "c.safetensors").stdout
    assert "layout comfy" in shown
    assert "regular:16" in shown


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"SRC": "nowhere"}, ["nowhere: no such file or folder"]),
        ({"--format": "int9"}, ["unknown format 'int9'", "int8, mxfp4"]),
        ({"--rotation": "regular:8"}, ["power of four"]),
        ({"--rotation": "hadamard"}, ["is written 'none', 'sylvester:G' or 'regular:G'; for example"]),
        ({"--rotation": "matrix:64"}, ["is written 'none', 'sylvester:G' or 'regular:G'; for example"]),
        ({"--skip": r"re:up\."}, [r"pattern 're:up\.' matches no layer", "expression for the whole name"]),
        ({"--weights": "foo"}, ["unknown method of --weights 'foo': choose one of rtn, search, gptq"]),
        ({"--layout": "gguf"}, ["unknown layout 'gguf'", "choose one of comfy, native"]),
        ({"--layout": "comfy", "--format": "nvfp4"}, ["comfy layout holds format int8"]),
        ({"--device": "nowhere"}, ["unknown device 'nowhere'", "cpu"]),
        ({"OUT": "EXISTING"}, ["exists already"]),
        ({"OUT": "no/such/folder"}, ["parent folder does not exist"]),
        ({"--json": "no/such/report.json"}, ["no/such/report.json: its parent folder does not exist"]),
    ],
)
def test_errors_are_one_line(source, tmp_path, change, parts, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EXISTING").mkdir()
    args = {"SRC": source, "OUT": "out", "--format": "int8", "--rotation": "regular:16"} | change
    options = [x for key, value in args.items() if key.startswith("-") for x in (key, value)]
    before = sorted(p.name for p in tmp_path.iterdir())
    assert_error(run("quantize", args["SRC"], args["OUT"], *options), *parts)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_nan_is_warned_of(tmp_path) -> None:
    w = torch.randn(8, 32)
    w[1, 1] = float("inf")
    save_file({"a.weight": w}, tmp_path / "m.safetensors")
    out = tmp_path / "o.safetensors"
    result = run("quantize", tmp_path / "m.safetensors", out, "--format", "int8", "--rotation", "none")
    assert result.exit_code == 0
    assert "warning: a holds NaN or Inf" in result.stderr


def test_inspect_plain_and_quantized(source, tmp_path) -> None:
    shown = run("inspect", source)
    assert shown.exit_code == 0
    assert "0 quantized layers" in shown.stdout
    row = next(line for line in shown.stdout.splitlines() if "layers.*.up.weight" in line)
    assert all(part in row for part in ("2", "F32", "32 × 96", "24.0 KiB"))
    out = tmp_path / "out.safetensors"
    run("quantize", source, out, "--format", "nvfp4", "--rotation", "sylvester:16")
    shown = run("inspect", out).stdout
    row = next(line for line in shown.splitlines() if "layers.*.up" in line)
    assert all(part in row for part in (" 2 ", "32 × 96", "nvfp4", "sylvester:16", "4.51"))
    assert "layers.1.up" not in shown
    row = next(line for line in run("inspect", out, "-v").stdout.splitlines() if "layers.1.up" in line)
    assert all(part in row for part in ("32 × 96", "nvfp4", "sylvester:16", "4.51"))
    assert f"written by: hadaquant {hq.__version__}" in shown
    assert f"source: {source}" in shown
    assert_error(run("inspect", tmp_path / "none"), "no such file")


def test_inspect_lists_layers_in_the_order_of_their_numbers(tmp_path) -> None:
    save_file({f"layers.{i}.up.weight": torch.ones(8, 16) for i in range(11)}, tmp_path / "m.safetensors")
    run("quantize", tmp_path / "m.safetensors", tmp_path / "q.safetensors", "--format", "int8", "--rotation", "none")
    shown = run("inspect", "--verbose", tmp_path / "q.safetensors").stdout
    assert re.findall(r"layers\.(\d+)\.up ", shown) == [str(i) for i in range(11)]


def test_an_expression_in_skip_is_shown_as_it_was_typed(source, tmp_path) -> None:
    args = ("--format", "int8", "--rotation", "none", "--skip", r"re:layers\.0\..*", "--skip", "lm_head")
    result = run("quantize", source, tmp_path / "q.safetensors", *args)
    assert r"matches skip pattern 're:layers\.0\..*'" in result.stdout


def test_explain() -> None:
    shown = run("explain", "int8", 4096, 3072, 3072, "--target", "sm_90", "--rotation", "regular:256")
    assert shown.exit_code == 0
    assert shown.stdout.strip() == str(hq.explain("int8", 4096, 3072, 3072, "sm_90", rotation="regular:256"))
    assert_error(run("explain", "int8", 1, 2, 100, "--rotation", "regular:256"), "K=100 is not a multiple")


@pytest.mark.parametrize("command", ["quantize", "inspect", "explain", "study", "eval", "bench"])
def test_help_is_whole_on_80_columns(command, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(command, "--help")
    assert max(map(len, shown.stdout.splitlines())) <= 80
    cut = [w for w in shown.stdout.replace("│", " ").split() if w.endswith("…") and w != "…"]
    assert not cut, cut


def test_help_is_for_strangers() -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    for part in ("hadaquant quantize MODEL OUT", "quantize", "inspect", "explain"):
        assert part in shown.stdout
    for command in ("quantize", "inspect", "explain"):
        assert run(command, "--help").exit_code == 0
    assert run("--version").stdout == f"hadaquant {hq.__version__}\n"
    assert run().exit_code == 2  # no command: the help again


def test_quantize_needs_to_be_told_the_rotation(source, tmp_path) -> None:
    for given, missing in (
        (("--format", "int8"), "--rotation not given; give"),
        (("--rotation", "none"), "--format not given; give"),
        ((), "--format and --rotation not given; give"),
    ):
        result = run("quantize", source, tmp_path / "o.safetensors", *given)
        assert result.exit_code == 2
        said = " ".join(result.stderr.replace("│", "").split())
        assert f"Invalid value: {missing} --format and --rotation, or --plan" in said


def test_a_killed_run_leaves_nothing(tmp_path) -> None:
    """SIGTERM in the midst of writing."""
    source, out = tmp_path / "m.safetensors", tmp_path / "out.safetensors"
    save_file({"a.weight": torch.randn(4096, 8192)}, source)
    args = ["quantize", source, out, "--format", "nvfp4", "--rotation", "sylvester:16"]
    code = f"from hadaquant.cli import app; app({[os.fspath(a) for a in args]!r})"
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*.partial")):
        assert process.poll() is None, "ended before it wrote anything"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_full_activations(source, tmp_path) -> None:
    out = tmp_path / "out.safetensors"
    how = ("--format", "nvfp4", "--rotation", "sylvester:16", "--activations")
    assert_error(run("quantize", source, out, *how, "half"), "unknown activations 'half'", "coded, full")
    assert run("quantize", source, out, *how, "full").exit_code == 0
    assert "nvfp4, full activations" in run("inspect", out).stdout
    found = run("explain", "nvfp4", 16, 4096, 4096, "--activations", "full")
    assert found.exit_code == 0 and "weight_mm [nvfp4 on sm_90]" in found.stdout
