"""From a model folder to a verdict, a plan, a quantized folder and its perplexity, by the commands."""

import json
import re
import shutil
import sys
from importlib import resources
from types import SimpleNamespace

import pytest
import torch
from tiny_llama import tiny_llama
from torch import nn
from typer.testing import CliRunner

from hadaquant.cli import app
from hadaquant.study.budget import select
from hadaquant.study.conduct import Answer
from hadaquant.study.layers import Cell, LayerResult
from hadaquant.study.perplexity import Comparison, Perplexity
from hadaquant.study.report import SHARED
from hadaquant.study.run import Settings
from hadaquant.study.trials import FormatTrial, Outcome, Trial
from hadaquant.study.verdict import verdicts


def run(*args):
    return CliRunner().invoke(app, [*map(str, args)])


def flat_text(text):
    return " ".join(text.replace("│", " ").split())


def flat(result):
    return flat_text(result.stdout + result.stderr)


SMALL = ("--window", 64, "--rotations", "none,regular:16,random:64", "--rows", 64)


@pytest.fixture(scope="module")
def study(tiny, tmp_path_factory):
    """The study of the tiny model: its folder and what was printed."""
    root = tmp_path_factory.mktemp("study")
    prose = root / "prose.txt"
    prose.write_text("Sphinx of black quartz, judge my vow; pack my box with five dozen liquor jugs. " * 9)
    out = root / "out"
    args = ("study", tiny.source, "--calibration", prose, "--text", tiny.text, "--out", out, *SMALL, "--bits", 5)
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    return SimpleNamespace(out=out, prose=prose, args=args, printed=flat(result), stderr=result.stderr)


def test_the_study_says_what_it_found(study):
    content = json.loads((study.out / "study.json").read_text())
    assert [f["format"] for f in content["formats"]] == ["int8", "nvfp4", "mxfp4"]
    assert len(content["layers"]) == 14 and content["text"] == "text.txt"
    assert [(t["format"], t["rotation"]) for t in content["trials"]][:2] == [
        ("full precision", "none"),
        ("int8", "none"),
    ]
    assert len(content["trials"]) == 11 and content["trials"][-1]["format"] == "plan"
    assert content["kept"] == {}  # the head is tied to the embedding
    assert f"Does the rotation help? {content['verdict']}" in study.printed
    for trial in content["trials"]:
        assert f"{trial['perplexity']:.2f}" in study.printed
    assert {t["status"] for t in content["tested"]} <= {"confirmed", "not confirmed", "withdrawn"}
    assert content["plan"]["bits"] <= 5 and f"Plan: {content['plan']['bits']:.3f} bits a weight" in study.printed


def test_the_plan_is_obeyed_and_its_model_is_the_one_that_was_tried(study, tiny, tmp_path):
    out, figures = tmp_path / "planned", tmp_path / "eval.json"
    result = run("quantize", tiny.source, out, "--plan", study.out / "plan.json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads((study.out / "plan.json").read_text())
    assert plan["bits"] <= 5 and len(plan["layers"]) == 14
    layers = json.loads((out / "config.json").read_text())["quantization_config"]["layers"]
    assert {
        name: f"{c['format']} {c['rotation']}{'+signs' if c['signs'] else ''}" for name, c in layers.items()
    } == plan["layers"]
    assert run("eval", out, "--text", tiny.text, "--window", 64, "--json", figures).exit_code == 0
    row = json.loads(figures.read_text())["rows"][1]
    tried = json.loads((study.out / "study.json").read_text())["trials"][-1]
    assert row["perplexity"] == pytest.approx(tried["perplexity"], rel=1e-6)
    assert row["divergence"] == pytest.approx(tried["divergence"], rel=1e-5)


def test_a_plan_for_another_model(study, tiny, tmp_path):
    other = tiny_llama()
    other.model.layers[0].mlp.up_proj.weight.data *= 2
    other.save_pretrained(tmp_path / "other")
    result = run("quantize", tmp_path / "other", tmp_path / "out", "--plan", study.out / "plan.json")
    assert result.exit_code == 1 and "are not those it was made for" in flat(result)
    assert not (tmp_path / "out").exists()


def test_a_second_run_only_plans_and_reports_anew(study, tmp_path, monkeypatch):
    from hadaquant.study import run as module
    from hadaquant.study import trials

    folder = tmp_path / "again"
    shutil.copytree(study.out, folder)
    monkeypatch.setattr(module, "capture", None)
    args = [folder if a == study.out else a for a in study.args]
    before = (study.out / "report.html").read_text()
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    assert (folder / "plan.json").read_bytes() == (study.out / "plan.json").read_bytes()
    assert re.sub("<pre>.*?</pre>", "", before, flags=re.S) == re.sub(
        "<pre>.*?</pre>", "", (folder / "report.html").read_text(), flags=re.S
    )
    # another limit needs another plan's trial, nothing else
    measured = []
    real = trials.perplexity
    monkeypatch.setattr(trials, "perplexity", lambda *a: measured.append(1) or real(*a))
    assert run(*[8.5 if a == 5 else a for a in args]).exit_code == 0
    assert len(measured) <= 1 and json.loads((folder / "plan.json").read_text())["limits"] == {"bits": 8.5}


def test_the_report_needs_nothing_beside_it(study):
    page = (study.out / "report.html").read_text()
    content = json.loads((study.out / "study.json").read_text())
    assert content["verdict"] in page and "model.layers.1.self_attn.q_proj" in page
    assert page.count("data:image/png;base64,") == 3 and "http" not in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    for name in ("layers", "outliers", "perplexity"):
        assert (study.out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for setting in (
        "prose.txt",
        content["settings"]["digest"],
        content["settings"]["fingerprint"],
        "torch",
        "hadaquant",
    ):
        assert setting in page


def test_layers_alone(study, tiny, tmp_path):
    args = ("study", tiny.source, "--calibration", study.prose, "--out", tmp_path / "out", *SMALL)
    result = run(*args, "--formats", "int8", "--layers", "layers.0.mlp", "--target-db", 20)
    assert result.exit_code == 0, result.stderr
    assert "(by the layers; untested on the model)" in flat(result)
    content = json.loads((tmp_path / "out" / "study.json").read_text())
    assert len(content["layers"]) == 3 and content["trials"] == [] and content["plan"]["db"] >= 20
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["kept"]["model.layers.1.mlp.up_proj"] == "not among the layers that were studied"
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png") == 2
    # three of 14 are in INT8, the others in float32
    linears = {name: m.weight.numel() for name, m in tiny_llama().model.named_modules() if isinstance(m, nn.Linear)}
    studied = {n: c for n, c in linears.items() if "layers.0.mlp" in n}
    bits = content["plan"]["bits"] * sum(studied.values()) + 32 * (sum(linears.values()) - sum(studied.values()))
    scope = f"3 of 14 linears; the other 11 stay as they are, {bits / sum(linears.values()):.3f} bits a weight over all"
    assert scope in flat(result) and scope in page and "3 of 14 linears, measured on" in page
    again = f"hadaquant quantize {tiny.source} OUT --plan {tmp_path / 'out' / 'plan.json'}"
    assert f"Quantize so: {again}" in result.stdout and again in page


def test_a_model_of_nan_is_an_error_at_once(study, tiny, tmp_path, monkeypatch):
    folder, out = tmp_path / "broken", tmp_path / "out"
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(folder)
    for file in tiny.source.glob("*token*"):
        shutil.copy(file, folder)
    monkeypatch.setattr("hadaquant.study.conduct.study_layers", None)  # nothing is measured
    for text in ((), ("--text", tiny.text)):
        result = run("study", folder, "--calibration", study.prose, "--out", out, *SMALL, *text)
        assert result.exit_code == 1
        error = f"error: {folder}: its losses are NaN or infinite, for 63 of the 63 tokens of window 1"
        assert error in flat(result) and "(model.layers.1.mlp.up_proj holds NaN or Inf)" in flat(result)
        assert not out.exists()


def test_too_few_bits_are_an_error_at_once(study, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("hadaquant.study.conduct.study_layers", None)  # nothing is measured
    out = tmp_path / "out"
    result = run("study", tiny.source, "--calibration", study.prose, "--out", out, *SMALL, "--bits", 3)
    assert result.exit_code == 1 and "error: the plan: 3 bits a weight are too few: these formats need 4.25" in flat(
        result
    )
    assert not out.exists()


def test_windows_are_those_that_the_text_holds(study, tiny, tmp_path, monkeypatch):
    out = tmp_path / "out"
    args = ("study", tiny.source, "--calibration", study.prose, "--out", out, *SMALL, "--windows", 100_000)
    args = (*args, "--formats", "int8", "--layers", "layers.0.mlp")
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    held = len(study.prose.read_bytes()) // 64
    said = f"{held} windows of 64 tokens of prose.txt"
    assert f"Measured on {said}, all that it holds of the 100,000 asked for" in flat(result)
    assert json.loads((out / "settings.json").read_text())["windows"] == held
    page = (out / "report.html").read_text()
    page = re.sub("<pre>.*?</pre>", "", page, flags=re.DOTALL)
    assert f"measured on {said}" in page and f"<dt>windows</dt><dd>{held}</dd>" in page
    # a second run measures nothing
    monkeypatch.setattr("hadaquant.study.run.capture", None)
    again = run(*args)
    assert again.exit_code == 0 and "all that it holds" in flat(again)
    assert f"Measured on {said} Plan" in flat(run(*[held if a == 100_000 else a for a in args]))


def test_linears_that_read_one_tensor_share_a_choice(study):
    assert SHARED in study.printed
    before, _, rest = (study.out / "report.html").read_text().partition("<summary>Every layer</summary>")
    assert SHARED in before.partition("The layers</h2>")[0] and rest.lstrip().startswith(f'<p class="note">{SHARED}')


def test_pictures_and_tables_scroll_in_their_own_boxes(study):
    page = (study.out / "report.html").read_text()
    assert re.search(r"figure {[^}]*overflow-x: auto", page) and re.search(r"figure img {[^}]*min-width: \d+px", page)
    assert page.count("<table>") == page.count('<div class="scroll"><table>') > 0


def answered(tmp_path, *, loss, divergence):
    """The answer of a study of two linears, whose verdict is INT8 with regular:256."""

    def cell(rotation, asked, gain):
        numbers = dict.fromkeys(("quiet_db", "weights_db", "inputs_db"), 20.0)
        ends = {"low_db": gain, "high_db": gain}
        return Cell(
            format="int8", rotation=rotation, asked=asked, bits=8, db=20 + gain, gain_db=gain, **ends, **numbers
        )

    def layer(name, k, group):
        cells = (
            cell("none", ("none",), 0.0),
            cell(f"regular:{group}", ("regular:64", "regular:256")[-group // 64 :], 9.0),
        )
        return LayerResult(name=name, shape=(8, k), reads=name, cells=cells)

    def measured(by, kl):
        losses = torch.tensor([3.0, 5.0] * 8, dtype=torch.float64) + torch.tensor(by * 8)
        return Perplexity(losses=losses, divergence=torch.full((16,), kl, dtype=torch.float64), windows=8, seconds=1.0)

    plain, rotated = measured([0.0, 0.0], 1e-4), measured(loss, divergence)
    results = [layer("a", 576, 64), layer("b", 512, 256)]
    (verdict,) = verdicts(results)
    trials = [Trial(format="int8", rotation=r, result=t) for r, t in (("none", plain), (verdict.rotation, rotated))]
    tested = FormatTrial(verdict=verdict, gains={verdict.rotation: Comparison.of(plain, rotated)})
    settings = Settings(
        model="m", fingerprint="", calibration="c", digest="", formats=("int8",), rotations=("none", "regular:256")
    )
    return Answer(
        model=tmp_path,
        settings=settings,
        text="t",
        results=results,
        verdicts=[verdict],
        outcome=Outcome(trials=trials, formats=[tested]),
        selection=select(results),
        limits={},
        planned=None,
        kept={},
        stored={},
    )


def test_a_smaller_group_in_the_plan_is_explained_beside_it(tmp_path):
    answer = answered(tmp_path, loss=[-1.0, -1.0], divergence=5e-5)
    assert answer.sentence == "Rotate int8 (regular:256)."
    assert answer.smaller_groups == [
        "regular:256 is regular:64 in linears of 576 inputs, the largest group that divides them"
    ]
    template = resources.files("hadaquant.study").joinpath("report.html.j2").read_text(encoding="utf-8")
    plan = template.partition("<h2>The plan</h2>")[2].partition("<pre>")[0]
    assert "answer.smaller_groups" in plan


def test_evidence_begins_with_what_decided(tmp_path):
    sure = answered(tmp_path, loss=[-1.0, -1.0], divergence=5e-5)
    text = sure.evidence(sure.verdicts[0])
    assert text == "regular:256 takes perplexity from 54.60 to 20.09 and KL from 0.0001 to 5e-05"
    # perplexity rises a little, within what other windows would give
    unsure = answered(tmp_path, loss=[-1.0, 1.1], divergence=5e-5)
    assert unsure.sentence == "Rotate int8 (regular:256)."
    text = unsure.evidence(unsure.verdicts[0])
    assert text == "regular:256 takes KL from 0.0001 to 5e-05; perplexity, from 54.60 to 57.40, cannot tell"


def test_a_log_file_hears_of_it(study):
    # no terminal: each thing that is done has a line of its own
    lines = study.stderr.splitlines()
    assert any(line.startswith("loading ") for line in lines)
    for variant in ("full precision", "int8, none", "plan, per layer"):
        assert variant in lines


def test_one_window_claims_nothing_of_others(study, tiny, tmp_path):
    args = ("study", tiny.source, "--calibration", study.prose, "--text", tiny.text, "--out", tmp_path / "out")
    few = ("--window", 500, "--rotations", "none,regular:16", "--formats", "int8", "--rows", 16, "--windows", 1)
    result = run(*args, *few, "--layers", "layers.0.mlp")
    assert result.exit_code == 0, result.stderr
    page = flat_text((tmp_path / "out" / "report.html").read_text())
    for text in (flat(result), page):
        assert "One window gives no interval over windows" in text
        assert "other windows of the text would give" not in text
        assert "1 windows" not in text
    assert "The 3 linears that were studied, of 14, in one format" in page


def test_mistakes_are_one_line(study, tiny, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    base = ("--calibration", study.prose, "--out", tmp_path / "out")
    for args, words in (
        ((tiny.source,), "give --calibration"),
        ((tiny.source, *base, "--bits", 5, "--target-db", 20), "give one"),
        ((tmp_path / "none", *base), "no such folder"),
        ((tiny.plain, *base, "--window", 64), "already quantized"),
        ((tiny.source, *base, "--formats", "fp3"), "unknown format 'fp3'"),
        ((tiny.source, *base, "--rotations", "random:12"), "must be a power of two"),
        ((tiny.source, "--calibration", short, "--window", 64), "shorter than one window"),
        ((tiny.source, *base, "--text", short, "--window", 64), "shorter than one window"),
        ((tiny.source, *base, "--text", study.prose, "--window", 64), "is the calibration text too"),
        ((tiny.source, *base, "--rotations", "hadamard"), "'regular:G', 'random:G' or 'matrix:G'; for example"),
        ((tiny.source, *base, "--layers", "layers.9", "--window", 64), "error: pattern 'layers.9' matches no layer"),
        ((tiny.source, *base, "--layers", r"re:up\.", "--window", 64), r"pattern 're:up\.' matches no layer"),
    ):
        result = run("study", *args)
        assert result.exit_code and words in flat(result), (args, flat(result))
        assert not (tmp_path / "out").exists()


def test_without_the_report_s_packages(study, monkeypatch):
    for package in ("jinja2", "matplotlib"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            result = run(*study.args)
        assert result.exit_code == 0
        assert "warning: there is no report.html" in result.stderr and "hadaquant[report]" in flat(result)
