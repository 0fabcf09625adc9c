"""Which tensors are quantized, and why the others are not."""

from __future__ import annotations

import json

import pytest
import torch
from ckpt_support import read_all, same_bits
from safetensors.torch import load_file, save_file

import hadaquant as hq
from hadaquant.checkpoint.linears import find_linears
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.errors import CheckpointError, PatternError

LINEARS = [f"layers.{i}.{name}" for i in range(2) for name in ("up", "down")]


def test_c2_tied_head(llama_folder, llama, tmp_path) -> None:
    """The embedding stays bit for bit, and the head that is tied to it is not quantized."""
    report = hq.quantize_checkpoint(llama_folder, tmp_path / "out", "int8", "regular:16", skip=())
    out = read_all(tmp_path / "out")
    assert same_bits(out["model.embed_tokens.weight"], llama.model.embed_tokens.weight.detach())
    assert not any(name.startswith("lm_head") for name in out)
    assert len(report.quantized) == 14
    assert "LlamaForCausalLM" in report.linears


def test_c2_head_stored_beside_its_embedding(llama_folder, llama, tmp_path) -> None:
    tensors = load_file(llama_folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, llama_folder / "model.safetensors")
    for skip, reason in ((("lm_head",), "matches skip pattern 'lm_head'"), ((), "tied to model.embed_tokens.weight")):
        out = tmp_path / f"out{len(skip)}"
        report = hq.quantize_checkpoint(llama_folder, out, "int8", "regular:16", skip=skip)
        kept = {layer.name: layer.reason for layer in report.kept}
        # where the model ties it, that is the reason, whatever the patterns
        assert kept["lm_head"] in (reason, "tied to model.embed_tokens.weight")
        assert same_bits(read_all(out)["lm_head.weight"], tensors["lm_head.weight"])


def test_untied_head_is_skipped_by_default_only(folder, plain_tensors, tmp_path) -> None:
    source = folder(plain_tensors)
    report = hq.quantize_checkpoint(source, tmp_path / "a", "int8")
    assert {x.name: x.reason for x in report.kept}["lm_head"] == "matches skip pattern 'lm_head'"
    report = hq.quantize_checkpoint(source, tmp_path / "b", "int8", skip=())
    assert "lm_head" in [x.name for x in report.quantized]


def test_c8_no_surprise_matches(folder, tmp_path) -> None:
    """Pattern ``layers.1.`` beside layers.10 to 19."""
    tensors = {f"layers.{i}.up.weight": torch.randn(16, 32) for i in range(20)}
    source = folder(tensors)
    report = hq.quantize_checkpoint(source, tmp_path / "out", "int8", skip=["layers.1."])
    assert [layer.name for layer in report.kept] == ["layers.1.up"]
    assert len(report.quantized) == 19
    with pytest.raises(PatternError, match=r"'layers.20' matches no layer"):
        hq.quantize_checkpoint(source, tmp_path / "no", "int8", skip=["layers.20"])
    with pytest.raises(PatternError, match="embed"):
        hq.quantize_checkpoint(source, tmp_path / "no", "int8", skip=["embed"])
    assert not (tmp_path / "no").exists()


def test_c8_what_is_no_linear_stays_bit_for_bit(folder, tmp_path) -> None:
    nan = torch.full((4, 8), float("nan"))
    others = {
        "conv.weight": torch.randn(4, 8, 3),
        "experts.down.weight": torch.randn(3, 8, 16),
        "experts_flat": torch.randn(3, 8, 16),
        "wte.weight": torch.randn(10, 16),
        "token_embedding.weight": torch.randn(10, 16),
        "patch_embed.proj.weight": torch.randn(10, 16),
        "rotary_emb.weight": torch.randn(10, 16),
        "pos_table.weight": torch.randn(10, 16),
        "h.0.ln_1.weight": torch.randn(16),
        "norm_out.weight": torch.randn(16, 16),
        "relative_attention_bias.weight": torch.randn(32, 4),
        "h.0.attn.c_attn.weight": torch.randn(16, 48),
        "transposed.weight": torch.randn(16, 48),
        "transposed.bias": torch.randn(48),
        "counts.weight": torch.randint(0, 9, (4, 16)),
        "mask": torch.tensor([True, False]),
        "nan_embed.weight": nan,
        "zero.norm.weight": torch.full((3,), -0.0),
    }
    source = folder({**others, "real.weight": torch.randn(8, 16)})
    report = hq.quantize_checkpoint(source, tmp_path / "out", "int8")
    out = read_all(tmp_path / "out")
    assert [layer.name for layer in report.quantized] == ["real"]
    assert all(same_bits(out[name], t) for name, t in others.items())
    reasons = {layer.name: layer.reason for layer in report.kept}
    assert reasons["conv"] == "3 dimensions, a linear has two"
    assert reasons["experts_flat"] == "not named <layer>.weight"
    assert "Conv1D" in reasons["h.0.attn.c_attn"]
    assert reasons["transposed"] == "its bias has shape [48], not [16]"
    assert reasons["counts"] == "dtype I64"
    assert all(reasons.values())
    assert json.loads(Checkpoint.open(tmp_path / "out").files[0].metadata["hadaquant"])["kept"] == reasons


def test_c8_conv1d_by_the_model(folder, tmp_path) -> None:
    """GPT-2 has no nn.Linear but its tied head: there is nothing to quantize, and that is said."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=8)
    config.architectures = ["GPT2LMHeadModel"]
    tensors = {k: v.clone() for k, v in transformers.GPT2LMHeadModel(config).state_dict().items() if "lm_head" not in k}
    source = folder(tensors)
    (source / "config.json").write_text(config.to_json_string())
    with pytest.raises(CheckpointError, match="Conv1D"):
        hq.quantize_checkpoint(source, tmp_path / "out", "int8")


def test_prefix_of_a_base_model(llama_folder, tmp_path) -> None:
    """A checkpoint of the base model names its tensors without ``model.``."""
    tensors = load_file(llama_folder / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, llama_folder / "model.safetensors")
    report = hq.quantize_checkpoint(llama_folder, tmp_path / "out", "int8", "regular:16")
    assert "layers.0.mlp.up_proj" in [layer.name for layer in report.quantized]
    assert len(report.quantized) == 14
    loaded = hq.load(tmp_path / "out")
    assert torch.equal(loaded.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


def test_merged_experts_are_no_linears(folder, tmp_path) -> None:
    """transformers merges Mixtral's experts when it loads them: kept, with that reason."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    config.vocab_size, config.num_local_experts, config.architectures = 20, 2, ["MixtralForCausalLM"]
    layer = "model.layers.0"
    tensors = {f"{layer}.self_attn.{x}_proj.weight": torch.randn(32, 32) for x in "qkvo"}
    for e in range(2):
        tensors |= {f"{layer}.block_sparse_moe.experts.{e}.w{i}.weight": torch.randn(48, 32) for i in (1, 3)}
        tensors[f"{layer}.block_sparse_moe.experts.{e}.w2.weight"] = torch.randn(32, 48)
    source = folder(tensors)
    (source / "config.json").write_text(config.to_json_string())
    linears, how = find_linears(Checkpoint.open(source))
    assert "MixtralForCausalLM" in how
    assert {name for name, why in linears.items() if why is None} == {n for n in tensors if "self_attn" in n}
    assert {why for why in linears.values() if why} == {"transformers rebuilds it when it loads the model"}


def test_unknown_model_type_falls_back_to_names_and_says_so(folder, plain_tensors, tmp_path) -> None:
    source = folder(plain_tensors)
    (source / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    report = hq.quantize_checkpoint(source, tmp_path / "out", "int8", "regular:16")
    assert report.linears.startswith("names, because transformers")
    assert sorted(layer.name for layer in report.quantized) == sorted(LINEARS)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["_class_name"] == "FluxTransformer2DModel"


def test_nothing_to_quantize(folder, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no linear to quantize \(norm: 1 dimensions"):
        hq.quantize_checkpoint(folder({"norm.weight": torch.ones(4)}), tmp_path / "out", "int8")
