"""hq.save and hq.load: the same model again, or a clear refusal that leaves the given model alone."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_support import read_all, same_bits
from torch import nn

import hadaquant as hq
from hadaquant.checkpoint.record import CalibrationRecord
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.errors import CheckpointError, LayerError, MissingExtra

TOKENS = torch.tensor([[1, 7, 49], [0, 3, 3]])


def state_bits_equal(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(same_bits(x[name], y[name]) for name in x)


def rotation_of(kind: str) -> Any:
    gen = torch.Generator().manual_seed(3)
    if kind == "signs":
        return hq.Rotation("regular", 16, signs=torch.randint(0, 2, (16,), generator=gen) * 2 - 1)
    if kind == "matrix":
        return hq.Rotation("matrix", matrix=torch.linalg.qr(torch.randn(32, 32, generator=gen)).Q)
    return kind


@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4-even"])
@pytest.mark.parametrize("kind", ["none", "sylvester:32", "signs", "matrix"])
@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_round_trip(plain_model, tmp_path, format, kind, name) -> None:
    fresh = copy.deepcopy(plain_model)
    hq.quantize_(plain_model, format, rotation_of(kind))
    hq.save(plain_model, tmp_path / name)
    back = hq.load(tmp_path / name, fresh)
    assert back is fresh
    assert state_bits_equal(plain_model, back)
    assert back.layers[0].up.rotation == plain_model.layers[0].up.rotation
    assert torch.equal(back(TOKENS), plain_model(TOKENS))
    assert isinstance(back.lm_head, nn.Linear)


@pytest.mark.parametrize("format", ["int8", "nvfp4"])
def test_file_to_file_is_quantize_in_memory(folder, plain_tensors, plain_model, tmp_path, format) -> None:
    hq.quantize_checkpoint(folder(plain_tensors, 2), tmp_path / "out", format, "regular:16")
    loaded = hq.load(tmp_path / "out", copy.deepcopy(plain_model))
    hq.quantize_(plain_model, format, "regular:16")
    assert state_bits_equal(plain_model, loaded)


class TestTransformers:
    def test_builds_the_model_of_config_json(self, llama_folder, llama, tmp_path) -> None:
        hq.quantize_checkpoint(llama_folder, tmp_path / "out", "int8", "regular:16")
        loaded = hq.load(tmp_path / "out")
        hq.quantize_(llama, "int8", "regular:16")
        assert type(loaded) is type(llama)
        assert not loaded.training
        assert state_bits_equal(llama, loaded)
        assert torch.equal(loaded(TOKENS).logits, llama(TOKENS).logits)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert not hasattr(loaded.config, "quantization_config")

    def test_saved_and_loaded(self, llama, tmp_path) -> None:
        hq.quantize_(llama, "nvfp4", "sylvester:16")
        llama.generation_config.max_new_tokens = 17
        hq.save(llama, tmp_path / "out")
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
            "config.json",
            "generation_config.json",
            "hadaquant.safetensors",
        ]
        assert "lm_head.weight" not in read_all(tmp_path / "out")
        loaded = hq.load(tmp_path / "out")
        assert torch.equal(loaded(TOKENS).logits, llama(TOKENS).logits)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert loaded.generation_config.max_new_tokens == 17

    def test_a_loaded_model_brings_its_folder_s_other_files(self, llama_folder, tmp_path) -> None:
        made = CalibrationRecord(method="gptq", options={}, text="a.txt", digest="0" * 16, windows=2, window=512)
        hq.quantize_checkpoint(llama_folder, tmp_path / "first", "int8", "regular:16", calibration=made)
        (tmp_path / "first" / "more").mkdir()
        (tmp_path / "first" / "more" / "vocab.txt").write_text("a")
        (tmp_path / "first" / "gone.txt").write_text("b")
        loaded = copy.deepcopy(hq.load(tmp_path / "first"))
        (tmp_path / "first" / "gone.txt").unlink()
        hq.save(loaded, tmp_path / "second")
        for name in ("tokenizer.json", "more/vocab.txt"):
            assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
        found = {p.name for p in (tmp_path / "second").iterdir()}
        assert "config.json" in found and "gone.txt" not in found
        again = hq.load(tmp_path / "second")
        assert torch.equal(again(TOKENS).logits, loaded(TOKENS).logits)
        assert next(iter(Checkpoint.open(tmp_path / "second").records.values())).calibration == made
        shutil.rmtree(tmp_path / "second")
        hq.save(again, tmp_path / "third")  # without what is no longer there
        assert "tokenizer.json" not in {p.name for p in (tmp_path / "third").iterdir()}

    def test_dtype_reaches_the_floating_remainder_only(self, llama_folder, tmp_path) -> None:
        hq.quantize_checkpoint(llama_folder, tmp_path / "out", "nvfp4", "sylvester:16")
        a, b = hq.load(tmp_path / "out"), hq.load(tmp_path / "out", dtype=torch.bfloat16)
        assert b.model.embed_tokens.weight.dtype == b.model.norm.weight.dtype == torch.bfloat16
        x, y = a.model.layers[0].mlp.up_proj, b.model.layers[0].mlp.up_proj
        assert y.weight.dtype == torch.bfloat16
        for name in ("codes", "scales", "global_scale"):
            assert same_bits(getattr(x, name), getattr(y, name))
        assert b(TOKENS).logits.dtype == torch.bfloat16

    def test_given_model(self, llama_folder, llama, tmp_path) -> None:
        hq.quantize_checkpoint(llama_folder, tmp_path / "out", "int8", "regular:16")
        built, given = hq.load(tmp_path / "out"), hq.load(tmp_path / "out", copy.deepcopy(llama))
        assert state_bits_equal(built, given)
        assert given.lm_head.weight is given.model.embed_tokens.weight

    def test_without_transformers(self, llama_folder, llama, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        report = hq.quantize_checkpoint(llama_folder, tmp_path / "out", "int8", "regular:16")
        assert "transformers" in report.linears
        assert len(report.quantized) == 14
        with pytest.raises(MissingExtra, match=r"hadaquant\[models\]"):
            hq.load(tmp_path / "out")
        assert hq.load(tmp_path / "out", llama) is llama

    def test_unknown_model(self, llama_folder, tmp_path) -> None:
        hq.quantize_checkpoint(llama_folder, tmp_path / "out", "int8", "regular:16")
        path = tmp_path / "out" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "nobody", "architectures": ["No"]}))
        with pytest.raises(CheckpointError, match=r"does not know the model .*'nobody'.*hq\.load\(path, model="):
            hq.load(tmp_path / "out")

    def test_no_config(self, folder, plain_tensors, tmp_path) -> None:
        hq.quantize_checkpoint(folder(plain_tensors), tmp_path / "out", "int8")
        with pytest.raises(CheckpointError, match=r"holds no config\.json"):
            hq.load(tmp_path / "out")


class Odd(nn.Module):
    """What other programs have stumbled over when they save."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight
        self.first = nn.Linear(32, 32)
        self.again = self.first
        self.blöcke = nn.ModuleDict({"層": nn.Linear(32, 48)})
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.register_buffer("fp8", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("part", torch.arange(10.0)[3:7])
        self.register_buffer("none", torch.empty(0, 3))


@pytest.fixture
def odd() -> Odd:
    torch.manual_seed(0)
    return Odd()


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_c3_tied_transposed_fp8_and_unicode(odd, tmp_path, name) -> None:
    fresh = copy.deepcopy(odd)
    hq.quantize_(odd, "int8", "regular:16", skip=["head"])
    hq.save(odd, tmp_path / name)
    stored = read_all(tmp_path / name)
    assert "head.weight" not in stored  # the names of one tensor are stored once
    assert same_bits(stored["transposed"], odd.transposed.detach())
    back = hq.load(tmp_path / name, fresh)
    assert state_bits_equal(odd, back)
    assert back.again is back.first
    assert back.head.weight is back.embed.weight
    assert back.embed.weight.requires_grad


def test_c3_ties_are_restored_in_a_model_that_has_lost_them(odd, tmp_path) -> None:
    fresh = copy.deepcopy(odd)
    hq.quantize_(odd, "int8", "regular:16", skip=["head"])
    hq.save(odd, tmp_path / "out")
    fresh.head.weight = nn.Parameter(fresh.embed.weight.detach().clone())
    fresh.again = copy.deepcopy(fresh.first)
    back = hq.load(tmp_path / "out", fresh)
    assert state_bits_equal(odd, back)
    assert back.head.weight is back.embed.weight
    assert back.again.codes is back.first.codes


def test_l1_weight_as_a_transposed_view(tmp_path) -> None:
    w = torch.randn(64, 48)
    results = []
    for i, weight in enumerate((w.t(), w.t().contiguous())):
        model = nn.Sequential(nn.Linear(64, 48))
        model[0].weight = nn.Parameter(weight)
        hq.quantize_(model, "nvfp4", "sylvester:16")
        hq.save(model, tmp_path / f"{i}.safetensors")
        results.append(read_all(tmp_path / f"{i}.safetensors"))
    assert all(same_bits(results[0][name], t) for name, t in results[1].items() if name != "0.bias")


def test_static_input_scale_is_kept(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(32, 16))
    fresh = copy.deepcopy(model)
    model[0] = hq.RotatedLinear.from_linear(model[0], "nvfp4", "sylvester:16", input_global_scale=0.01)
    hq.save(model, tmp_path / "out")
    back = hq.load(tmp_path / "out", fresh)
    x = torch.randn(3, 32)
    assert torch.equal(back[0].input_global_scale, model[0].input_global_scale)
    assert torch.equal(back(x), model(x))


def test_dtype_of_the_given_model_is_kept(folder, plain_tensors, plain_model, tmp_path) -> None:
    hq.quantize_checkpoint(folder(plain_tensors), tmp_path / "out", "int8", "regular:16")
    back = hq.load(tmp_path / "out", copy.deepcopy(plain_model).half())
    assert {p.dtype for n, p in back.named_parameters() if n.endswith(("bias", "norm.weight"))} == {torch.float16}
    assert back.layers[0].up.weight.dtype == torch.float16
    assert back.layers[0].up.scales.dtype == torch.float32
    as_bf16 = hq.load(tmp_path / "out", copy.deepcopy(plain_model), dtype=torch.bfloat16)
    assert as_bf16.layers[0].up.bias.dtype == as_bf16.embed_tokens.weight.dtype == torch.bfloat16


def test_a_model_on_meta_gets_its_data(folder, plain_tensors, plain_model, tmp_path) -> None:
    hq.quantize_checkpoint(folder(plain_tensors), tmp_path / "out", "int8", "regular:16")
    back = hq.load(tmp_path / "out", copy.deepcopy(plain_model).to("meta"))
    assert state_bits_equal(back, hq.load(tmp_path / "out", plain_model))


def test_training_mode_is_kept(folder, plain_tensors, plain_model, tmp_path) -> None:
    hq.quantize_checkpoint(folder(plain_tensors), tmp_path / "out", "int8", "regular:16")
    assert not hq.load(tmp_path / "out", copy.deepcopy(plain_model).eval()).layers[0].up.training
    assert hq.load(tmp_path / "out", plain_model.train()).layers[0].up.training


class TestMismatch:
    @pytest.fixture
    def out(self, folder, plain_tensors, tmp_path) -> Path:
        hq.quantize_checkpoint(folder(plain_tensors), tmp_path / "out", "int8", "regular:16")
        return tmp_path / "out"

    def refused(self, out: Path, model: nn.Module, match: str) -> None:
        """Refused, and the model is as it was: same modules, same bits."""
        before, modules = copy.deepcopy(model), [type(m) for m in model.modules()]
        with pytest.raises(LayerError, match=match):
            hq.load(out, model)
        assert [type(m) for m in model.modules()] == modules
        assert state_bits_equal(before, model)

    def test_layer_missing_in_the_model(self, out, plain_model) -> None:
        del plain_model.layers[1].down
        self.refused(out, plain_model, r"'layers\.1\.down': is in the checkpoint but not in the model")

    def test_tensor_missing_in_the_model(self, out, plain_model) -> None:
        del plain_model.lm_head
        self.refused(out, plain_model, r"'lm_head\.weight': is in the checkpoint but not in the model")

    def test_tensor_missing_in_the_checkpoint(self, out, plain_model) -> None:
        plain_model.extra = nn.Linear(3, 4)
        self.refused(out, plain_model, r"'extra\.bias': is in the model but not in the .* extra\.weight \(2 in all\)")

    def test_bias_missing_in_the_checkpoint(self, out, plain_model) -> None:
        plain_model.layers[0].down = nn.Linear(96, 64)
        self.refused(out, plain_model, r"'layers\.0\.down\.bias': is in the model but not")

    def test_shape_of_a_layer(self, out, plain_model) -> None:
        plain_model.layers[0].down = nn.Linear(96, 65, bias=False)
        self.refused(out, plain_model, r"'layers\.0\.down': has shape \[64, 96\], in the model \[65, 96\]")

    def test_shape_of_a_tensor(self, out, plain_model) -> None:
        plain_model.norm = nn.RMSNorm(65)
        self.refused(out, plain_model, r"'norm\.weight': has shape \[64\], in the model \[65\]")

    def test_not_a_linear(self, out, plain_model) -> None:
        plain_model.layers[0].down = nn.Embedding(64, 96)
        self.refused(out, plain_model, r"'layers\.0\.down': cannot be replaced in the model: Embedding is not")

    def test_quantized_with_another_rotation(self, out, plain_model) -> None:
        hq.quantize_(plain_model, "int8", "regular:4")
        self.refused(out, plain_model, r"'layers\.0\.down': rotation: stored 'regular:16', expected 'regular:4'")

    def test_quantized_where_the_checkpoint_is_not(self, out, plain_model) -> None:
        hq.quantize_(plain_model, "int8", "regular:16", skip=())
        self.refused(out, plain_model, r"'lm_head\.weight': is in the checkpoint but not in the model")

    def test_quantized_in_the_same_way(self, out, plain_model) -> None:
        expected = hq.load(out, copy.deepcopy(plain_model))
        hq.quantize_(plain_model, "int8", "regular:16")
        with torch.no_grad():
            plain_model.layers[0].up.codes.zero_()
        assert state_bits_equal(hq.load(out, plain_model), expected)

    def test_plain_checkpoint(self, folder, plain_tensors, plain_model) -> None:
        with pytest.raises(CheckpointError, match="holds nothing quantized"):
            hq.load(folder(plain_tensors, name="plain"), plain_model)

    def test_buffer_that_nothing_stores(self, out, plain_model) -> None:
        plain_model.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
        with pytest.raises(LayerError, match="'table': is on the meta device"):
            hq.load(out, plain_model)


class TestSaveRefuses:
    def test_an_unquantized_model(self, plain_model, tmp_path) -> None:
        with pytest.raises(LayerError, match="holds no RotatedLinear"):
            hq.save(plain_model, tmp_path / "out")

    def test_a_layer_alone(self, tmp_path) -> None:
        layer = hq.RotatedLinear.from_linear(nn.Linear(16, 4), "int8")
        with pytest.raises(LayerError, match="has no name"):
            hq.save(layer, tmp_path / "out")

    def test_an_existing_output(self, odd, tmp_path) -> None:
        hq.quantize_(odd, "int8", skip=["head"])
        (tmp_path / "out").mkdir()
        with pytest.raises(CheckpointError, match="exists already"):
            hq.save(odd, tmp_path / "out")

    def test_a_tensor_without_data(self, plain_model, tmp_path) -> None:
        hq.quantize_(plain_model, "int8")
        plain_model.norm.to("meta")
        with pytest.raises(LayerError, match=r"'norm\.weight': it is on the meta device"):
            hq.save(plain_model, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_a_dtype_safetensors_has_not(self, plain_model, tmp_path) -> None:
        hq.quantize_(plain_model, "int8")
        plain_model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
        with pytest.raises(CheckpointError, match=r"phase: safetensors cannot hold dtype torch\.complex128"):
            hq.save(plain_model, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_extra_state(self, plain_model, tmp_path) -> None:
        class Extra(nn.Module):
            def get_extra_state(self) -> dict[str, int]:
                return {"a": 1}

        hq.quantize_(plain_model, "int8")
        plain_model.extra = Extra()
        with pytest.raises(LayerError, match=r"'extra\._extra_state': its extra state is dict"):
            hq.save(plain_model, tmp_path / "out")

    def test_a_config_that_is_not_json(self, plain_model, tmp_path) -> None:
        hq.quantize_(plain_model, "int8")
        plain_model.config = {"dtype": torch.float32}
        with pytest.raises(CheckpointError, match=r"config is not JSON"):
            hq.save(plain_model, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


def test_a_plain_config_is_saved(plain_model, tmp_path) -> None:
    hq.quantize_(plain_model, "int8")
    plain_model.config = {"_class_name": "Größe"}
    hq.save(plain_model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config.pop("quantization_config")["quant_method"] == "hadaquant"
    assert config == {"_class_name": "Größe"}
