"""hadaquant study."""

import json

from typer.testing import CliRunner

from hadaquant.cli import app
from hadaquant.study import all_cases

ROWS = """\
nvfp4 sylvester:16 0.0902 → 0.1155 0.3942 → 0.4973 20.9 → 18.7 8192 + 1024 no
nvfp4 sylvester:16 0.0952 → 0.0948 20.4 → 20.5 8192 + 1024 no difference"""


def run(*args):
    return CliRunner().invoke(app, ["study", *args])


def test_a6_a7_digits_in_the_table():
    cases = ("--case", "outlier-channels", "--case", "gaussian")
    result = run("--formats", "nvfp4", "--rotations", "sylvester:16", *cases)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines() if "sylvester:16" in line]
    assert lines == ROWS.splitlines()


def test_everything_as_json(tmp_path):
    path = tmp_path / "study.json"
    assert run("--json", str(path)).exit_code == 0
    content = json.loads(path.read_text())
    cases = {case.name: case for case in all_cases()}
    assert list(content["cases"]) == list(cases)
    assert len(content["rows"]) == 5 * sum(len(case.rotations) for case in cases.values())
    demo = next(row for row in content["rows"] if row["rotation"] == "sylvester:16")
    assert (demo["case"], demo["format"], demo["helps"]) == ("outlier-channels", "nvfp4", "no")
    assert f"{demo['plain_error']:.4f} {demo['rotated_error']:.4f}" == "0.0902 0.1155"
    assert {row["helps"] for row in content["rows"]} == {"yes", "no", "no difference"}


def test_mistakes_are_one_line(tmp_path):
    for args, words in (
        (["--case", "cauchy"], "unknown case 'cauchy': choose one of outlier-channels"),
        (["--formats", "fp3"], "unknown format 'fp3'"),
        (["--rotations", "regular:256", "--case", "gaussian"], "K=64 is not a multiple of the group 256"),
        (["--case", "laplace", "--json", str(tmp_path / "none" / "x.json")], "its parent folder does not exist"),
    ):
        result = run(*args)
        assert result.exit_code == 1 and result.stdout == ""
        assert words in " ".join(result.stderr.split())


def test_a_place_that_cannot_be_the_study_s_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("hadaquant.cli.study.conduct", None)
    file = tmp_path / "text.txt"
    file.write_text("words")
    for out, words in (
        (tmp_path / "none" / "out", "its parent folder does not exist; create it first"),
        (file, "is a file; give a folder"),
    ):
        result = run(str(tmp_path), "--calibration", str(file), "--out", str(out))
        assert result.exit_code == 1
        assert f"error: {out}: {words}" in " ".join(result.stderr.split())


def test_a_model_that_is_a_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_text("")
    result = run(str(file), "--calibration", str(file), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    words = f"error: {file}: is a file, not a folder; give a folder with config.json, tokenizer and weights"
    assert words in " ".join(result.stderr.split())
