"""Which files of a folder are the weights, and sources that are refused."""

from __future__ import annotations

import json

import pytest
import torch
from ckpt_support import write_shards
from safetensors.torch import save_file

import hadaquant as hq
from hadaquant.checkpoint.contents import describe, number_free
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.errors import AlreadyQuantized, CheckpointError

W = torch.randn(16, 32)
CODES = torch.zeros(16, 32, dtype=torch.int8)
BYTES = torch.zeros(16, 16, dtype=torch.uint8)
FP8 = W.to(torch.float8_e4m3fn)
ROWS = torch.ones(16)


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"a.weight": FP8, "a.weight_scale": ROWS[0]}, "'weight_scale'"),
        ({"a.weight": FP8, "a.weight_scale_inv": torch.ones(1, 1)}, "'weight_scale_inv'"),
        ({"a.weight": FP8, "a.scale_weight": ROWS}, "'scale_weight'"),
        ({"a.weight": FP8, "a.scales_of_mine": ROWS}, "a weight of dtype F8_E4M3 beside scales"),
        ({"a.weight": W, "scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}, "'scaled_fp8'"),
        ({"a.weight": CODES, "a.weight_scale": ROWS}, "'weight_scale'"),
        ({"a.weight": CODES, "a.SCB": ROWS}, "'SCB'"),
        ({"a.weight": BYTES, "a.weight_scale_2": ROWS[0]}, "'weight_scale_2'"),
        ({"a.weight": BYTES, "a.weight.absmax": ROWS}, "'absmax'"),
        ({"a.weight_packed": BYTES, "a.weight_global_scale": ROWS[:1]}, "'weight_"),
        ({"a.qweight": torch.zeros(4, 32, dtype=torch.int32), "a.qzeros": torch.zeros(1, 4)}, "'q"),
        ({"a.qweight": CODES, "a.wscale": ROWS}, "layout 'hyperflow'"),
        ({"a.weight": CODES, "a.comfy_quant": BYTES[0]}, "layout 'comfy'"),
        ({"a.codes": CODES, "a.scales": ROWS}, "layout 'native'"),
    ],
)
def test_s7_quantized_sources_are_refused(folder, tmp_path, tensors, found) -> None:
    source = folder({name: t.clone() for name, t in tensors.items()})
    with pytest.raises(AlreadyQuantized, match=found):
        hq.quantize_checkpoint(source, tmp_path / "out", "int8")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_s7_config_of_another_quantizer(folder, tmp_path) -> None:
    source = folder({"a.weight": W})
    (source / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(AlreadyQuantized, match="'gptq'"):
        hq.quantize_checkpoint(source, tmp_path / "out", "int8")


def test_low_bit_weights_without_scales_are_values(folder, tmp_path) -> None:
    source = folder({"a.weight": FP8, "table.weight": CODES, "other.scale": ROWS})
    report = hq.quantize_checkpoint(source, tmp_path / "out", "int8")
    assert [layer.name for layer in report.quantized] == ["a"]


class TestWhichFiles:
    def test_named_ones_come_before_others(self, tmp_path) -> None:
        save_file({"right.weight": W}, tmp_path / "model.safetensors")
        save_file({"wrong.weight": W}, tmp_path / "consolidated.safetensors")
        write_shards(tmp_path, {"wrong.weight": W, "wrong.bias": ROWS}, 2)
        assert set(Checkpoint.open(tmp_path).tensors) == {"right.weight"}

    def test_diffusers_names(self, tmp_path) -> None:
        save_file({"right.weight": W}, tmp_path / "diffusion_pytorch_model.safetensors")
        assert set(Checkpoint.open(tmp_path).tensors) == {"right.weight"}

    def test_an_only_file(self, tmp_path) -> None:
        save_file({"right.weight": W}, tmp_path / "anything.safetensors")
        assert set(Checkpoint.open(tmp_path).tensors) == {"right.weight"}

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ([], r"holds no \.safetensors file"),
            (["pytorch_model.bin"], r"holds no \.safetensors file"),
            (["a.safetensors", "b.safetensors"], r"several \.safetensors files and no index: a\.safetensors, b\."),
            (["a.safetensors.index.json", "b.safetensors.index.json"], "several indexes"),
        ],
    )
    def test_doubt_is_refused(self, tmp_path, files, message) -> None:
        for name in files:
            (tmp_path / name).write_bytes(b"x")
        if message.startswith("several indexes"):
            save_file({"a": W}, tmp_path / "x.safetensors")
            save_file({"a": W}, tmp_path / "y.safetensors")
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path)

    def test_paths_that_are_nothing(self, tmp_path) -> None:
        (tmp_path / "model.gguf").write_bytes(b"x")
        with pytest.raises(CheckpointError, match="no such file or folder"):
            Checkpoint.open(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match=r"not a \.safetensors file"):
            Checkpoint.open(tmp_path / "model.gguf")


class TestIndex:
    def break_index(self, folder, change) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda i: i.pop("weight_map"), "holds no weight_map"),
            (lambda i: i["weight_map"].update(more="model-00001-of-00002.safetensors"), "says it holds 'more'"),
            (lambda i: i["weight_map"].update(more="gone.safetensors"), r"gone\.safetensors: this shard is named in"),
            (lambda i: i["weight_map"].update(more="../x.safetensors"), r"x\.safetensors: this shard is named in"),
        ],
    )
    def test_it_agrees_with_the_shards(self, tmp_path, change, message) -> None:
        save_file({"more": W}, tmp_path / "x.safetensors")
        model = tmp_path / "m"
        model.mkdir()
        write_shards(model, {"a.weight": W, "b.weight": W + 1}, 2)
        self.break_index(model, change)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(model)

    def test_a_tensor_in_two_shards(self, tmp_path) -> None:
        write_shards(tmp_path, {"a.weight": W, "b.weight": W + 1}, 2)
        save_file({"a.weight": W, "b.weight": W + 1}, tmp_path / "model-00002-of-00002.safetensors")
        with pytest.raises(CheckpointError, match=r"'a\.weight' is in model-00001-of-00002\.safetensors too"):
            Checkpoint.open(tmp_path)

    def test_not_json(self, tmp_path) -> None:
        write_shards(tmp_path, {"a.weight": W, "b.weight": W + 1}, 2)
        (tmp_path / "model.safetensors.index.json").write_text("{")
        with pytest.raises(CheckpointError, match="not valid JSON"):
            Checkpoint.open(tmp_path)


def test_describe_a_plain_checkpoint(folder, plain_tensors) -> None:
    contents = describe(folder(plain_tensors, 2))
    assert (contents.layout, contents.layers, contents.made, contents.files) == (None, [], {}, 2)
    up = next(group for group in contents.rest if group.pattern == "layers.*.up.weight")
    assert (up.count, up.dtype, up.shape, up.nbytes) == (2, "F32", (96, 64), 2 * 4 * 96 * 64)
    assert sum(group.nbytes for group in contents.rest) == sum(t.nbytes for t in plain_tensors.values())


def test_describe_a_quantized_checkpoint(folder, plain_tensors, tmp_path) -> None:
    hq.quantize_checkpoint(folder(plain_tensors), tmp_path / "out", "nvfp4", "sylvester:16")
    contents = describe(tmp_path / "out")
    assert contents.layout == "native"
    assert contents.made["asked for"] == "nvfp4, rotation sylvester:16"
    layer = next(layer for layer in contents.layers if layer.name == "layers.0.up")
    assert (layer.shape, layer.format, layer.rotation) == ((96, 64), "nvfp4", "sylvester:16")
    assert layer.nbytes == hq.get_format("nvfp4").nbytes((96, 64))
    assert layer.bits == pytest.approx(4.5, abs=0.01)
    total = sum(x.nbytes for x in contents.layers) + sum(group.nbytes for group in contents.rest)
    assert total < contents.file_bytes


def test_number_free() -> None:
    assert number_free("blocks.10.mlp.0.weight") == "blocks.*.mlp.*.weight"
    assert number_free("conv1.w2.weight") == "conv1.w2.weight"
    assert number_free("3.weight") == "3.weight"
