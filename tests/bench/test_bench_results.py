"""Recorded times become ratios, tables and pictures."""

import json

import pytest
from rich.console import Console

from hadaquant.bench import Case, default_file, latest, read
from hadaquant.bench.plot import draw
from hadaquant.bench.record import append, environment, revision
from hadaquant.bench.report import speed_tables
from hadaquant.errors import CheckpointError, MissingExtra


def row(run="a", op="linear", shape=(4, 8, 256), variant="ours", timing="graph", ms=1.0, **more):
    what = {"format": "int8", "rotation": "regular:256", "dtype": "bf16", "bytes": 10**9, "flops": 10**12}
    here = {"git": run, "date": "2026-11-30", "gpu": "A GPU", "torch": "2", "triton": "3", "host_us": None}
    return {"run": run, **here, "op": op, "shape": list(shape), "variant": variant, "timing": timing, "ms": ms} | {
        **what,
        **more,
    }


ROWS = [
    row("a", ms=9.0),
    row("a", variant="torch_bf16", ms=9.0),
    row("b", ms=2.0, host_us=30.0),
    row("b", variant="torch_bf16", ms=3.0),
    row("b", variant="plain_triton", ms=2.5),
    row("b", ms=4.0, timing="do_bench"),
    row("b", op="rotate_quantize", shape=(4, 256), flops=None, variant="copy", ms=0.9),
    row("b", op="rotate_quantize", shape=(4, 256), flops=None, ms=1.0),
    row("b", op="rotate_quantize", shape=(4, 256), flops=None, variant="ours_dynamic", ms=1.5),
    row("b", op="front_end", shape=(4, 256), flops=None, ms=1.0, front_end="rms_norm"),
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "speed.jsonl"
    append(path, ROWS, {})
    return path


def test_the_newest_run_of_a_case_counts(file):
    found = {(str(result.case), result.timing): result for result in latest(read(file))}
    assert len(found) == 4
    linear = found["linear int8 regular:256 4x8x256", "graph"]
    assert linear.run == "b" and linear.host_us == {"ours": 30.0}
    assert linear.ratio() == 1.5 and linear.ratio(against="plain_triton") == 1.25
    assert linear.ratio("plain_triton") == 1.2 and linear.ratio("copy") is None
    assert found["rotate_quantize int8 regular:256 4x256", "graph"].ratio() == 0.9
    assert found["front_end int8 regular:256 rms_norm 4x256", "graph"].case.front_end == "rms_norm"
    assert "A GPU, torch 2, Triton 3, 2026-11-30, revision b" in linear.where


def test_small_ratios_keep_their_digits(tmp_path):
    path = tmp_path / "speed.jsonl"
    append(path, [row(ms=500.0), row(variant="torch_bf16", ms=1.23), row(variant="plain_triton", ms=62.0)], {})
    console = Console(width=300, record=True)
    console.print(*speed_tables(read(path)))
    text = console.export_text()
    assert " 0.0025 " in text and "plain_triton 0.12" in text


def test_tables(file):
    console = Console(width=300, record=True)
    for table in speed_tables(latest(read(file))):
        console.print(table)
    text = " ".join(console.export_text().split())
    assert "int8 regular:256 4 × 8 × 256 graph 2000.0 500 TOPS 1.50 30 plain_triton 1.25" in text
    assert "int8 regular:256 4 × 256 graph 1000.0 1000 GB/s 0.90 ours_dynamic 1.50" in text
    assert "rms_norm regular:256" in text


def test_pictures(file, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = draw(latest(read(file)), tmp_path / "plots")
    assert [path.name for path in drawn] == [f"speed-int8-{kind}.png" for kind in ("products", "rows", "roofline")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert draw([], tmp_path) == []


def test_pictures_without_matplotlib(file, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'hadaquant\[report\]'"):
        draw(latest(read(file)), tmp_path)


@pytest.mark.parametrize("text", ["not json", json.dumps({"op": "linear"}), json.dumps([1])])
def test_a_file_of_something_else(tmp_path, text):
    (tmp_path / "x").write_text(text)
    with pytest.raises(CheckpointError, match="no measurement"):
        read(tmp_path / "x")


def test_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read(tmp_path / "x")
    with pytest.raises(CheckpointError, match="give a file in a folder"):
        append(tmp_path, ROWS)


def test_the_recorded_file_can_be_read():
    assert default_file().parts == ("benchmarks", "results", "speed.jsonl")
    assert latest(read(default_file()))


def test_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(default_file()) == "speed.jsonl"


def test_the_environment(monkeypatch):
    monkeypatch.setenv("HADAQUANT_GIT", "abc1234")
    assert revision() == "abc1234"
    assert list(environment()) == ["git", "date", "gpu", "torch", "triton"]


def test_cases_are_words():
    assert (
        str(Case(op="front_end", shape=(4, 256), front_end="rms_norm")) == "front_end int8 regular:256 rms_norm 4x256"
    )
