"""hadaquant bench."""

import json

import pytest
import torch
from typer.testing import CliRunner

from hadaquant.bench import runner
from hadaquant.bench.contest import Contest, Variant
from hadaquant.cli import app

TINY = ("--device", "cpu", "--only", "linear", "--shapes", "2x8x256", "--rounds", "1")


def run(*args):
    return CliRunner().invoke(app, ["bench", *args])


def said(result):
    return " ".join(result.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs():
    result = run()
    assert result.exit_code == 1
    assert "it needs a CUDA GPU and Triton, and torch sees no GPU here; --device cpu times" in said(result)


def test_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*TINY)
    assert result.exit_code == 0
    assert "int8 regular:256 2 × 8 × 256 wall" in said(result)
    assert list(tmp_path.iterdir()) == []  # a CPU's times are recorded only where one asks for it


def test_recorded_shown_and_drawn(tmp_path):
    file, plots = tmp_path / "a" / "speed.jsonl", tmp_path / "plots"
    assert run(*TINY, "--out", str(file)).exit_code == 0
    variants = {json.loads(line)["variant"] for line in file.read_text().splitlines()}
    assert variants == {"ours", "torch_bf16"}
    result = run("--show", str(file), "--plot", str(plots))
    assert result.exit_code == 0
    assert "2 × 8 × 256" in result.output and "speed-int8-products.png" in result.output
    assert (plots / "speed-int8-products.png").stat().st_size > 10_000


def test_a_wrong_answer_gives_exit_code_one(monkeypatch):
    def wrong(case, device):
        return Contest({"ours": lambda: Variant([lambda: None], lambda: "1 of 2 bytes differ")}, ("wall",))

    monkeypatch.setitem(runner.CONTESTS, "linear", wrong)
    result = run(*TINY)
    assert result.exit_code == 1
    line = "wrong, so not timed: linear int8 regular:256 2x8x256: ours: 1 of 2 bytes differ"
    assert said(result).count(line) == 1 and "wrong, so not timed: 1, see above" in said(result)


def test_out_of_time_says_how_to_go_on():
    result = run("--device", "cpu", "--seconds", "0", "--skip", "1")
    assert result.exit_code == 0
    assert "3 cases are left: go on with --skip 1" in said(result)


def test_an_output_that_cannot_be_is_refused_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("hadaquant.cli.bench.run", None)
    file = tmp_path / "file"
    file.write_text("")
    for args, words in (
        (["--out", tmp_path], "is a folder; give a file in a folder"),
        (["--out", file / "speed.jsonl"], f"{file} is a file; choose another place"),
        (["--plot", file], "is a file; give a folder"),
    ):
        result = run(*TINY, *map(str, args))
        assert result.exit_code == 1
        assert words in said(result)


def test_mistakes_are_one_line(tmp_path):
    for args, words in (
        (["--device", "cpu", "--shapes", "2x8by256"], "a shape has shape '2x8by256'"),
        (["--device", "cpu", "--shapes", "3x3"], "error: --shapes has shape 3x3, but M × K with K a multiple of 256"),
        (["--device", "cpu", "--suite", "int4"], "unknown suite 'int4'"),
        (["--device", "cpu", "--only", "matmul"], "unknown op 'matmul'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--show", str(tmp_path / "none")], "No such file"),
        ([*TINY, "--out", str(tmp_path)], "is a folder; give a file in a folder"),
    ):
        result = run(*args)
        assert result.exit_code == 1
        assert words in said(result)
