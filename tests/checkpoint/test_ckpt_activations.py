"""Full activations travel with a checkpoint: written, read, shown, and refused where a layout cannot say them."""

from __future__ import annotations

import pytest
import torch
from ckpt_support import read_all
from torch import nn

import hadaquant as hq
from hadaquant.checkpoint.contents import describe
from hadaquant.errors import CheckpointError, LayerError, UnknownChoice


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))


@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4"])
def test_saved_and_loaded(format, tmp_path):
    quantized = model()
    hq.quantize_(quantized, format, "sylvester:16", activations="full")
    hq.save(quantized, tmp_path / "full.safetensors")
    loaded = hq.load(tmp_path / "full.safetensors", model(1))
    assert loaded[0].activations == loaded[2].activations == "full"
    x = torch.randn(5, 64)
    assert torch.equal(loaded(x), quantized(x))
    assert [layer.activations for layer in describe(tmp_path / "full.safetensors").layers] == ["full", "full"]


def test_quantized_from_file_to_file_with_the_same_codes(folder, plain_tensors, tmp_path):
    source = folder(plain_tensors)
    for activations in ("coded", "full"):
        hq.quantize_checkpoint(source, tmp_path / activations, "nvfp4", "sylvester:16", activations=activations)
    full, coded = read_all(tmp_path / "full"), read_all(tmp_path / "coded")
    assert full.keys() == coded.keys()
    for name, tensor in full.items():
        assert torch.equal(tensor, coded[name]) != name.endswith(".contract"), name
    assert {layer.activations for layer in describe(tmp_path / "full").layers} == {"full"}


def test_c4_a_checkpoint_of_before_means_coded(tmp_path):
    """Nothing in its bytes says so: the field is written for full activations alone."""
    quantized = model()
    hq.quantize_(quantized, "nvfp4")
    path = tmp_path / "coded.safetensors"
    hq.save(quantized, path)
    assert b"activations" not in path.read_bytes()
    assert hq.load(path, model(1))[0].activations == "coded"


def test_a_model_quantized_otherwise_is_refused(tmp_path):
    full, coded = model(), model()
    hq.quantize_(full, "nvfp4", activations="full")
    hq.quantize_(coded, "nvfp4")
    hq.save(full, tmp_path / "full.safetensors")
    with pytest.raises(LayerError, match="activations: stored 'full', expected 'coded'"):
        hq.load(tmp_path / "full.safetensors", coded)


def test_comfy_cannot_say_it(folder, plain_tensors, tmp_path):
    with pytest.raises(CheckpointError, match=r"ComfyUI quantizes the inputs .* choose layout 'native'"):
        hq.quantize_checkpoint(
            folder(plain_tensors), tmp_path / "out", "int8", "regular:16", activations="full", layout="comfy"
        )
    assert not (tmp_path / "out").exists()


def test_an_unknown_kind_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UnknownChoice, match="unknown activations 'none'"):
        hq.quantize_checkpoint(tmp_path / "missing", tmp_path / "out", "int8", activations="none")
