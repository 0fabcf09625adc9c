"""A plan: written, read, obeyed layer by layer, and refused for any other model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from ckpt_support import read_all, same_bits, write_shards
from typer.testing import CliRunner

import hadaquant as hq
from hadaquant.checkpoint.model_plan import Choice, ModelPlan, fingerprint
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.cli import app
from hadaquant.errors import CheckpointError, PlanError
from hadaquant.formats import get_format

SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0] * 4)
CHOICES = {
    "layers.0.up": Choice(get_format("int8"), hq.Rotation("regular", 16)),
    "layers.0.down": Choice(get_format("nvfp4"), hq.Rotation("none")),
    "layers.1.up": Choice(get_format("mxfp4"), hq.Rotation("sylvester", 16, SIGNS)),
}


def plan_for(path, layers=CHOICES, **fields):
    return ModelPlan(model="model", fingerprint=fingerprint(Checkpoint.open(path)), layers=layers, **fields)


def test_every_layer_gets_what_the_plan_says(folder, plain_tensors, tmp_path):
    source, out = folder(plain_tensors), tmp_path / "out"
    plan = plan_for(source, kept={"layers.1.down": "it is sensitive"})
    plan.write(tmp_path / "plan.json")
    report = hq.quantize_checkpoint(source, out, plan=ModelPlan.read(tmp_path / "plan.json"))
    found = read_all(out)
    for layer, (format, rotation) in CHOICES.items():
        q = hq.quantize(plain_tensors[f"{layer}.weight"], format, rotation=rotation)
        assert same_bits(found[f"{layer}.codes"], q.codes) and same_bits(found[f"{layer}.scales"], q.scales)
    assert same_bits(found["layers.1.up.signs"], SIGNS)
    assert same_bits(found["layers.1.down.weight"], plain_tensors["layers.1.down.weight"])
    reasons = {layer.name: layer.reason for layer in report.kept}
    assert reasons["layers.1.down"] == "it is sensitive" and reasons["lm_head"] == "not in the plan"
    assert {layer.name: layer.format for layer in report.quantized} == {n: c.format.name for n, c in CHOICES.items()}


def test_written_and_read(folder, plain_tensors, tmp_path):
    plan = plan_for(folder(plain_tensors), kept={"lm_head": "asked"}, about={"bits": 4.5})
    plan.write(tmp_path / "plan.json")
    again = ModelPlan.read(tmp_path / "plan.json")
    assert (again.model, again.fingerprint, again.kept) == (plan.model, plan.fingerprint, plan.kept)
    assert again.layers == plan.layers
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["bits"] == 4.5 and content["hadaquant"] == hq.__version__
    assert content["layers"]["layers.1.up"] == "mxfp4 sylvester:16+signs"
    assert content["signs"] == {"16": "+--+" * 4}


def test_fingerprint_is_of_the_weights_not_of_the_files(folder, plain_tensors, tmp_path):
    whole = fingerprint(Checkpoint.open(folder(plain_tensors)))
    shards = tmp_path / "shards"
    shards.mkdir()
    write_shards(shards, plain_tensors, 3)
    assert fingerprint(Checkpoint.open(shards)) == whole


@pytest.mark.parametrize("change", ["one value", "values", "dtype", "name"])
def test_a_plan_for_another_model_is_refused(folder, plain_tensors, tmp_path, change):
    plan = plan_for(folder(plain_tensors))
    other = dict(plain_tensors)
    weight = other["layers.1.up.weight"]
    if change == "values":
        other["layers.1.up.weight"] = weight + 1
    elif change == "one value":
        other["layers.1.up.weight"] = weight.clone()
        other["layers.1.up.weight"][0, 0] += 1
    elif change == "dtype":
        other["layers.1.up.weight"] = weight.to(torch.bfloat16)
    else:
        other["layers.1.gate.weight"] = other.pop("layers.1.up.weight")
    rule = "names 'layers.1.up', which" if change == "name" else "are not those it was made for"
    with pytest.raises(PlanError, match=rule):
        hq.quantize_checkpoint(folder(other, name="other"), tmp_path / "out", plan=plan)
    assert not (tmp_path / "out").exists()


def test_weights_that_the_plan_has_been_checked_for_are_not_hashed_again(folder, plain_tensors, tmp_path, monkeypatch):
    source = folder(plain_tensors)
    plan = plan_for(source)
    monkeypatch.setattr("hadaquant.checkpoint.quantizer.fingerprint", None)
    hq.quantize_checkpoint(source, tmp_path / "out", plan=plan)
    (record,) = Checkpoint.open(tmp_path / "out").records.values()
    assert record.source_fingerprint == plan.fingerprint


def test_a_plan_whose_fingerprint_saw_a_part_of_the_weights(folder, plain_tensors, tmp_path):
    source = folder(plain_tensors)
    plan = replace(plan_for(source), fingerprint="sha256:0123456789abcdef0123456789abcdef")
    with pytest.raises(PlanError, match=r"older version, whose fingerprint saw only a part .*; study this model"):
        hq.quantize_checkpoint(source, tmp_path / "out", plan=plan)


def test_a_plan_was_measured_with_coded_activations(folder, plain_tensors, tmp_path):
    source = folder(plain_tensors)
    with pytest.raises(PlanError, match="measured with coded activations, and 'full' are asked for; leave"):
        hq.quantize_checkpoint(source, tmp_path / "out", plan=plan_for(source), activations="full")
    assert not (tmp_path / "out").exists()


def test_a_plan_and_a_format_exclude_each_other(folder, plain_tensors, tmp_path):
    source = folder(plain_tensors)
    with pytest.raises(PlanError, match="a format is given beside it; give one"):
        hq.quantize_checkpoint(source, tmp_path / "out", "int8", plan=plan_for(source))
    with pytest.raises(PlanError, match="neither a format nor a plan"):
        hq.quantize_checkpoint(source, tmp_path / "out")


def test_a_plan_that_the_layout_cannot_hold(folder, plain_tensors, tmp_path):
    source = folder(plain_tensors)
    with pytest.raises(CheckpointError, match="comfy layout holds format int8"):
        hq.quantize_checkpoint(source, tmp_path / "out", plan=plan_for(source), layout="comfy")


def test_a_plan_for_what_is_no_linear(folder, plain_tensors, tmp_path):
    source = folder(plain_tensors)
    choice = CHOICES["layers.0.up"]
    with pytest.raises(PlanError, match="'embed_tokens': named like an embedding"):
        hq.quantize_checkpoint(source, tmp_path / "out", plan=plan_for(source, {"embed_tokens": choice}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c.update(plan=9), "is no plan of version 1"),
        (lambda c: c.pop("layers"), "is damaged"),
        (lambda c: c["layers"].update(x="fp3 none"), "unknown format 'fp3'"),
        (lambda c: c["layers"].update(x="int8 spin:3"), "a rotation is written"),
        (lambda c: c["signs"].clear(), "is damaged"),
    ],
)
def test_a_damaged_plan(folder, plain_tensors, tmp_path, damage, message):
    path = tmp_path / "plan.json"
    plan_for(folder(plain_tensors)).write(path)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=message):
        ModelPlan.read(path)


def test_no_plan_there(tmp_path):
    with pytest.raises(PlanError, match=r"cannot be read .*; give a plan\.json"):
        ModelPlan.read(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlanError, match="cannot be read"):
        ModelPlan.read(tmp_path / "plan.json")


def test_the_command(folder, plain_tensors, tmp_path):
    source, plan, out = folder(plain_tensors), tmp_path / "plan.json", tmp_path / "out"
    plan_for(source).write(plan)

    def run(*args):
        return CliRunner().invoke(app, ["quantize", str(source), str(out), *map(str, args)])

    for args, words in (
        ((), "give --format and --rotation, or --plan"),
        (("--format", "int8"), "give --format and --rotation, or --plan"),
        (("--plan", plan, "--format", "int8"), "a format is given beside it"),
        (("--plan", plan, "--rotation", "none"), "leave --rotation out"),
    ):
        result = run(*args)
        assert result.exit_code and words in " ".join(result.stderr.replace("│", " ").split())
        assert not out.exists()
    result = run("--plan", plan)
    assert result.exit_code == 0, result.stderr
    assert "3 layers quantized" in result.stdout and "mxfp4" in result.stdout
    assert "layers.0.down.global_scale" in read_all(out)
