"""quantize --weights: a text in, better codes out, in the same kind of folder."""

import json

import pytest
import torch
from safetensors import safe_open
from test_cli_quantize import assert_error, run

import hadaquant as hq


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model and a text."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
    from tiny_llama import byte_tokenizer, tiny_llama

    root = tmp_path_factory.mktemp("calibrated")
    tiny_llama().save_pretrained(root / "source")
    byte_tokenizer().save_pretrained(root / "source")
    (root / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 30)
    (root / "short.txt").write_text("Too short.")
    return root


def quantize(folders, out, *options):
    return run("quantize", folders / "source", out, "--format", "mxfp4", "--rotation", "sylvester:32", *options)


def test_better_codes_in_the_same_kind_of_folder(folders, tmp_path):
    plain, better, report = tmp_path / "plain", tmp_path / "better", tmp_path / "report.json"
    assert quantize(folders, plain).exit_code == 0
    result = quantize(
        folders, better, "--weights", "gptq+search", "--calibration", folders / "text.txt", "--json", report
    )
    assert result.exit_code == 0, result.stderr
    assert "the weight of an Embedding, not the weight of an nn.Linear" in result.stdout
    assert "gptq+search on 2 windows of 512 tokens: mean error of the outputs 0." in " ".join(result.stdout.split())
    assert {path.name for path in better.iterdir()} == {path.name for path in plain.iterdir()}
    first, second = (json.loads((path / "config.json").read_text())["quantization_config"] for path in (plain, better))
    assert second.pop("calibration") and first == second
    assert {layer["format"] for layer in json.loads(report.read_text())["layers"] if layer["format"]} == {"mxfp4"}
    models = [hq.load(path) for path in (plain, better)]
    name = "model.layers.0.mlp.up_proj"
    assert not torch.equal(*(model.get_submodule(name).codes for model in models))
    assert torch.equal(*(model.get_input_embeddings().weight for model in models))


def test_codes_in_the_folder_are_those_of_the_calibrated_model(folders, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hadaquant.calibrate import calibrate_, token_batches

    out = tmp_path / "out"
    options = ("--weights", "gptq", "--calibration", folders / "text.txt", "--windows", 1)
    assert quantize(folders, out, *options).exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(folders / "source", dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folders / "source")((folders / "text.txt").read_text())["input_ids"]
    calibrate_(model, "mxfp4", "sylvester:32", token_batches(torch.tensor(tokens), 512, 1), "gptq")
    stored = hq.load(out).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(stored[name], tensor), name


def test_gains_in_the_folder_are_those_of_the_fitted_model(folders, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hadaquant.calibrate import calibrate_, fit_gains_, gains_of, token_batches

    out = tmp_path / "out"
    result = quantize(folders, out, "--gains", 3, "--calibration", folders / "text.txt")
    assert result.exit_code == 0, result.stderr
    assert "over 3 steps" in " ".join(result.stdout.split())
    model, full = (AutoModelForCausalLM.from_pretrained(folders / "source", dtype=torch.float32) for _ in range(2))
    tokens = AutoTokenizer.from_pretrained(folders / "source")((folders / "text.txt").read_text())["input_ids"]
    batches = token_batches(torch.tensor(tokens), 512, 2)
    calibrate_(model, "mxfp4", "sylvester:32", batches, "rtn")
    fit_gains_(model, full, batches, steps=3)
    stored, source = hq.load(out).state_dict(), full.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(stored[name], tensor), name
    assert all(not torch.equal(stored[name], source[name]) for name in gains_of(full))


def test_what_calibrated_leaves_its_trace(folders, tmp_path):
    """In the header and in config.json, shown by inspect; and eval refuses the very text."""
    out, text = tmp_path / "out", folders / "text.txt"
    result = quantize(folders, out, "--weights", "gptq", "--gains", 2, "--windows", 1, "--calibration", text)
    assert result.exit_code == 0, result.stderr
    with safe_open(out / "hadaquant.safetensors", "pt") as file:
        header = json.loads(file.metadata()["hadaquant"])["calibration"]
    assert header == json.loads((out / "config.json").read_text())["quantization_config"]["calibration"]
    digest = header.pop("digest")
    assert len(digest) == 16
    assert header == {
        "method": "gptq", "options": {}, "text": "text.txt", "windows": 1, "window": 512, "gains": 2
    }  # fmt: skip
    said = f"calibration: gptq, gains fitted for 2 steps, on 1 × 512 tokens of text.txt ({digest})"
    assert said in run("inspect", out).stdout
    for options in ((), ("--tokens", 64)):
        result = run("eval", out, "--text", text, "--window", 64, *options)
        assert_error(result, "text.txt", "was calibrated on", "test on text never calibrated on")
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[1:])
    assert run("eval", out, "--text", other, "--window", 64, "--tokens", 128).exit_code == 0


def test_options_of_the_recipe_are_recorded(folders):
    from hadaquant.calibrate import Recipe
    from hadaquant.cli.calibration import Calibration

    better = Calibration(str(folders / "source"), folders / "text.txt", "gptq", 1, "cpu", "coded")
    better.recipe = Recipe(method="gptq", damping=0.5, stepwise=False)
    assert better.record().options == {"damping": 0.5, "stepwise": False}
    assert str(better.record()).startswith("gptq, stepwise False, damping 0.5, on 1 × 512 tokens")


def test_what_is_asked_must_go_together(folders, tmp_path):
    out = tmp_path / "out"
    assert quantize(folders, out, "--weights", "gptq").exit_code == 2
    assert quantize(folders, out, "--gains", 3).exit_code == 2
    assert quantize(folders, out, "--calibration", folders / "text.txt").exit_code == 2
    text = ("--calibration", folders / "short.txt")
    assert_error(
        quantize(folders, out, "--weights", "gptq", *text),
        "short.txt",
        "shorter than one window",
        "512; give a longer text",
    )
    text = ("--calibration", folders / "text.txt")
    assert_error(quantize(folders, out, "--weights", "best", *text), "unknown method of --weights 'best'")
    assert not out.exists()


def test_gains_of_a_model_with_nan_are_refused_before_it_is_calibrated(folders, tmp_path, monkeypatch):
    from tiny_llama import byte_tokenizer, tiny_llama

    def fail(*args, **options):
        raise AssertionError("nothing is to be computed")

    monkeypatch.setattr("hadaquant.cli.calibration.calibrate_", fail)
    model, source = tiny_llama(), tmp_path / "nan"
    model.model.layers[1].mlp.up_proj.weight.data[2, 3] = float("nan")
    model.save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    options = ("--format", "int8", "--rotation", "none", "--weights", "gptq", "--calibration", folders / "text.txt")
    result = run("quantize", source, tmp_path / "out", *options, "--gains", 4)
    assert_error(result, "layer 'model.layers.1.mlp.up_proj.weight': it holds NaN or Inf", "leave the gains out")
