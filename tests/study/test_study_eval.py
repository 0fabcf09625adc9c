"""hadaquant eval on a tiny model's folders."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hadaquant.checkpoint import quantize_checkpoint
from hadaquant.cli import app
from hadaquant.errors import CheckpointError, LayerError, MissingExtra
from hadaquant.study.models import ModelFolder, described, evaluate, with_sources


def run(*args):
    return CliRunner().invoke(app, ["eval", *map(str, args)])


def flat(text):
    return " ".join(text.split())


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
    for heading in ("same", "gain", "rotation helps"):
        assert f" {heading} " not in result.stdout.split("──")[0]


def test_one_window_claims_nothing_of_others(tiny):
    result = run(tiny.source, "--text", tiny.text, "--window", 512)
    assert "1 window of 512 tokens" in flat(result.stdout)
    assert "One window gives no interval over windows" in flat(result.stdout)
    assert "other windows of the text would give" not in flat(result.stdout)


@pytest.mark.parametrize("quantize", [False, True])
def test_a_model_of_nan_is_an_error(tiny, tmp_path, quantize):
    from tiny_llama import tiny_llama

    folder, out = tmp_path / "broken", tmp_path / "eval.json"
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(folder)
    args = [folder]
    if quantize:
        quantize_checkpoint(folder, tmp_path / "int8", "int8", "none")
        args = [tmp_path / "int8", "--source", tiny.source]
    for file in tiny.source.glob("*token*"):
        shutil.copy(file, folder)
    result = run(*args, "--text", tiny.text, "--window", 64, "--json", out)
    assert result.exit_code == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"error: {args[0]}: its losses are NaN or infinite, for 63 of the 63 tokens of window 1")
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
        ((tiny.text, *text), "no such folder"),
        ((empty, *text), "holds no .safetensors file"),
        ((no_config, *text), "holds no config.json"),
        ((no_tokenizer, *text), "holds no tokenizer that transformers can read; copy tokenizer.json"),
        ((tiny.source, "--text", tmp_path / "none.txt"), "No such file"),
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
