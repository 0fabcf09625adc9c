"""hadaquant eval on a tiny model's folders."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hadaquant.checkpoint import quantize_checkpoint
from hadaquant.checkpoint.model_plan import fingerprint
from hadaquant.cli import app
from hadaquant.errors import CheckpointError, LayerError, MissingExtra
from hadaquant.study.models import ModelFolder, check_sources, described, evaluate, with_sources


def run(*args):
    return CliRunner().invoke(app, ["eval", *map(str, args)])


def flat(text):
    return " ".join(text.split())


def with_one(file, name, value):
    """Change the first element of a tensor in a file."""
    tensors = load_file(file)
    tensors[name].view(-1)[0] = value
    with safe_open(file, "pt") as before:
        save_file(tensors, file, before.metadata())


@pytest.fixture
def moved(tiny, tmp_path):
    """``int8``, made of ``source`` by a relative path, at which ``other``, another model, lies elsewhere."""
    made, elsewhere = tmp_path / "made", tmp_path / "elsewhere"
    for place in (made, elsewhere):
        shutil.copytree(tiny.source, place / "model")
    with_one(elsewhere / "model" / "model.safetensors", "model.layers.0.mlp.up_proj.weight", 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        quantize_checkpoint("model", "int8", "int8", "none")
    return SimpleNamespace(source=made / "model", int8=made / "int8", other=elsewhere / "model")


def test_eval_prints_source_and_quantized_models(tiny, tmp_path):
    out = tmp_path / "eval.json"
    result = run(tiny.plain, tiny.rotated, "--text", tiny.text, "--window", 64, "--tokens", 600, "--json", out)
    assert result.exit_code == 0, result.stderr
    assert "9 windows of 64 tokens, 567 predicted" in flat(result.stdout)
    content = json.loads(out.read_text())
    rows = content["rows"]
    assert [(r["model"], r["format"], r["rotation"]) for r in rows] == [
        (str(tiny.source), "float32", "none"),
        (str(tiny.plain), "int8", "none"),
        (str(tiny.rotated), "int8", "regular:64"),
    ]
    assert (content["window"], content["windows"]) == (64, 9)
    assert all(r["predicted_tokens"] == 567 and r["seconds"] > 0 for r in rows)
    assert [r["bytes"] for r in rows] == [
        sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        for folder in (tiny.source, tiny.plain, tiny.rotated)
    ]
    assert [r["source"] for r in rows] == [None, str(tiny.source), str(tiny.source)]
    # only the rotated one has an unrotated one to be compared with
    assert [r["gain"] is None for r in rows] == [True, True, False]
    assert rows[2]["gain"]["loss"]["mean"] == pytest.approx(rows[1]["nll"] - rows[2]["nll"])
    assert rows[2]["gain"]["divergence"]["mean"] == pytest.approx(rows[1]["divergence"] - rows[2]["divergence"])
    for gain in (rows[2]["gain"]["loss"], rows[2]["gain"]["divergence"]):
        assert gain["low"] <= gain["mean"] <= gain["high"]
    # the source beside nothing, the others beside it
    assert ["divergence" in r for r in rows] == [False, True, True]
    assert all(0 < r["divergence"] < 0.1 and 0.8 < r["agreement"] <= 1 for r in rows[1:])
    assert rows[2]["helps"] in ("yes", "no", "no difference")
    for row in rows:
        assert f"{row['perplexity']:.2f}" in result.stdout and Path(row["model"]).name in result.stdout
    assert str(tiny.source.parent) not in result.stdout


def test_eval_on_a_narrow_terminal(tiny, monkeypatch):
    args = (tiny.plain, tiny.rotated, "--text", tiny.text, "--window", 64)
    whole = run(*args)
    monkeypatch.setenv("COLUMNS", "80")
    result = run(*args)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in result.stdout.replace("[…]", "")
    # every word and number of the wide table but the time, which is another in every run
    timed = re.compile(r"\d+")
    for line in whole.stdout.splitlines():
        if "int8" in line:
            assert {word for word in line.split() if not timed.fullmatch(word)} <= set(result.stdout.split())


def test_empty_columns_are_left_out(tiny):
    result = run(tiny.source, "--text", tiny.text, "--window", 64)
    assert "perplexity" in result.stdout
    # nor are they explained
    assert not {"Gain:", "KL:", "helps"} & set(result.stdout.split())
    for heading in ("same", "gain", "rotation helps"):
        assert f" {heading} " not in result.stdout.split("──")[0]


def test_one_window_claims_nothing_of_others(tiny):
    result = run(tiny.source, "--text", tiny.text, "--window", 512)
    assert "1 window of 512 tokens" in flat(result.stdout)
    assert "One window gives no interval over windows" in flat(result.stdout)
    assert "other windows of the text would give" not in flat(result.stdout)


@pytest.mark.parametrize("quantize", [False, True])
def test_a_model_of_nan_is_an_error(tiny, tmp_path, quantize):
    folder, out = tmp_path / "broken", tmp_path / "eval.json"
    if quantize:
        shutil.copytree(tiny.plain, folder)
        with_one(folder / "hadaquant.safetensors", "model.layers.1.mlp.up_proj.scales", float("nan"))
    else:
        shutil.copytree(tiny.source, folder)
        with_one(folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight", float("nan"))
    result = run(folder, "--text", tiny.text, "--window", 64, "--json", out)
    assert result.exit_code == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"error: {folder}: its losses are NaN or infinite, for 63 of the 63 tokens of window 1")
    assert "model.layers.1.mlp.up_proj holds NaN or Inf" in line
    assert result.stdout == "" and not out.exists()


def test_eval_order_does_not_matter(tiny, tmp_path):
    out = tmp_path / "eval.json"
    args = (tiny.rotated, tiny.plain, tiny.source, tiny.plain, "--text", tiny.text, "--window", 64, "--json", out)
    assert run(*args).exit_code == 0
    rows = json.loads(out.read_text())["rows"]
    assert [r["model"] for r in rows] == [str(tiny.source), str(tiny.rotated), str(tiny.plain)]
    assert [r["helps"] is None for r in rows] == [True, False, True]


def test_eval_of_a_plain_folder_alone(tiny):
    result = run(tiny.source, "--text", tiny.text, "--window", 64)
    assert result.exit_code == 0 and "float32" in result.stdout and "regular" not in result.stdout


def test_a_source_that_has_moved(tiny, tmp_path):
    folder = ModelFolder.open(tiny.plain)
    assert folder.quantized and folder.source == tiny.source
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tiny.source, elsewhere)
    assert [m.path for m in with_sources([tiny.plain], elsewhere)] == [elsewhere, tiny.plain]
    for folders in ([tiny.plain], [tiny.source]):
        with pytest.raises(CheckpointError, match=r"gone: no such folder; give a folder with config\.json"):
            with_sources(folders, tmp_path / "gone")
    lost = tmp_path / "lost"
    quantize_checkpoint(elsewhere, lost, "int8", "none")
    shutil.rmtree(elsewhere)
    with pytest.raises(CheckpointError, match=r"'.*elsewhere' is not there; say where it is with --source"):
        with_sources([lost])


def test_the_source_is_found_from_any_working_directory(moved, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(moved.other.parent)
    out = tmp_path / "eval.json"
    result = run(moved.int8, "--text", tiny.text, "--window", 64, "--json", out)
    assert result.exit_code == 0, result.stderr
    assert [r["model"] for r in json.loads(out.read_text())["rows"]] == [str(moved.source), str(moved.int8)]


def test_a_source_of_other_weights_is_refused(moved, tiny):
    args = ("--text", tiny.text, "--window", 64)
    message = f"{moved.int8}: was quantized from other weights than those that '{{}}' holds; give the model that it was"
    result = run(moved.int8, *args, "--source", moved.other)
    assert result.exit_code == 1 and f"error: {message.format(moved.other)}" in flat(result.stderr)
    with_one(moved.source / "model.safetensors", "model.layers.0.mlp.up_proj.weight", 1.0)
    result = run(moved.int8, *args)
    assert result.exit_code == 1 and f"error: {message.format(moved.source)}" in flat(result.stderr)
    assert "evaluating" not in result.stderr


def test_each_source_is_read_once(tiny, monkeypatch):
    read = []

    def counted(checkpoint):
        read.append(checkpoint.path)
        return fingerprint(checkpoint)

    monkeypatch.setattr("hadaquant.study.models.fingerprint", counted)
    models = with_sources([tiny.plain, tiny.rotated])
    assert len(models) == 3
    check_sources(models)
    assert read == [tiny.source / "model.safetensors"]
    plain = models[1]
    check_sources([replace(plain, source=None), replace(plain, source_fingerprint=None)])
    assert len(read) == 1


def test_a_folder_that_does_not_say_which_weights_is_taken_as_it_is(moved, tiny, monkeypatch):
    file = moved.int8 / "hadaquant.safetensors"
    with safe_open(file, "pt") as before:
        metadata = before.metadata()
    record = json.loads(metadata["hadaquant"])
    assert record.pop("source_fingerprint").startswith("blake2b:")
    config = json.loads((moved.int8 / "config.json").read_text())
    for said in (record, config["quantization_config"]):
        said.pop("source_fingerprint", None)
        said["source"] = "model"
    save_file(load_file(file), file, metadata | {"hadaquant": json.dumps(record)})
    (moved.int8 / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(moved.other.parent)
    assert run(moved.int8, "--text", tiny.text, "--window", 64).exit_code == 0


def test_a_source_that_is_a_file(tiny, tmp_path):
    out = tmp_path / "int8"
    quantize_checkpoint(tiny.source / "model.safetensors", out, "int8", "none")
    for file in tiny.source.glob("*.json"):
        shutil.copy(file, out)
    words = r"its source '.*model.safetensors' is a file, not a folder; by --source, give a folder with config.json"
    with pytest.raises(CheckpointError, match=words):
        with_sources([out])
    check_sources(with_sources([out], tiny.source))  # the same weights


def test_the_json_s_place_is_looked_at_first(tiny, tmp_path):
    out = tmp_path / "none" / "eval.json"
    result = run(tiny.source, "--text", tiny.text, "--window", 64, "--json", out)
    assert result.exit_code == 1 and "evaluating" not in result.stderr
    assert f"error: {out}: its parent folder does not exist; create it first" in flat(result.stderr)


def test_fitted_groups_show(tiny):
    import hadaquant as hq

    model = ModelFolder.open(tiny.source).load()
    assert described(model) == ("float32", "none")
    model.model.layers[0].mlp.down_proj = hq.RotatedLinear(128, 64, "int8", "sylvester:128")
    model.model.layers[1].mlp.down_proj = hq.RotatedLinear(128, 64, "int8", "sylvester:128")
    model.model.layers[0].self_attn.q_proj = hq.RotatedLinear(64, 64, "int8", "sylvester:64")
    assert described(model) == ("int8", "sylvester:128 (2), sylvester:64 (1)")


def test_mistakes_are_one_line(tiny, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    no_config = tmp_path / "no-config"
    shutil.copytree(tiny.source, no_config)
    (no_config / "config.json").unlink()
    no_tokenizer = tmp_path / "no-tokenizer"
    shutil.copytree(tiny.source, no_tokenizer)
    for file in no_tokenizer.glob("*token*"):
        file.unlink()
    text = ("--text", tiny.text)
    for args, words in (
        ((tmp_path / "none", *text), "no such folder"),
        ((tiny.text, *text), "is a file, not a folder; give a folder with config.json, tokenizer and weights"),
        ((empty, *text), "holds no .safetensors file"),
        ((no_config, *text), "holds no config.json"),
        ((no_tokenizer, *text), "holds no tokenizer that transformers can read; copy tokenizer.json"),
        ((tiny.source, "--text", tmp_path / "none.txt"), "none.txt: no such file; check the path"),
        ((tiny.source, *text, "--window", 4096), "shorter than one window: 720 tokens, window 4096"),
        ((tiny.source, *text, "--tokens", 100), "its first 100 tokens are shorter than one window"),
    ):
        result = run(*args)
        assert result.exit_code == 1, args
        assert words in flat(result.stderr) and "Traceback" not in result.stderr


def test_a_quantized_folder_without_quantized_layers(tiny, monkeypatch):
    import torch

    folder = ModelFolder.open(tiny.plain)
    plain = ModelFolder.open(tiny.source).load()
    monkeypatch.setattr(ModelFolder, "load", lambda self, device: plain)
    with pytest.raises(LayerError, match="no linear of it is quantized"):
        evaluate(folder, torch.zeros(64, dtype=torch.int64), 64)


def test_without_transformers(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'hadaquant\[models\]'"):
        ModelFolder.open(tiny.source).load()
