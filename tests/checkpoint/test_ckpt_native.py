"""The native layout: header, contract tensors, shapes and config agree, or the file is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_support import read_all
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import hadaquant as hq
from hadaquant.checkpoint.contents import describe
from hadaquant.contract import Contract
from hadaquant.errors import AlreadyQuantized, HadaquantError


@pytest.fixture
def quantized(folder, plain_tensors, tmp_path) -> Path:
    """A file in nvfp4, with signs."""
    signs = torch.tensor([1, -1] * 8)
    out = tmp_path / "q.safetensors"
    hq.quantize_checkpoint(folder(plain_tensors), out, "nvfp4", hq.Rotation("sylvester", 16, signs=signs))
    return out


#: Changes a file's tensors and metadata in place.
Change = Callable[[dict[str, Tensor], dict[str, str]], object]


def rewrite(path: Path, change: Change) -> None:
    """Change a file's tensors and metadata, as some other program might."""
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    path.unlink()
    change(tensors, metadata)
    save_file(tensors, path, metadata or None)


def edit_record(metadata: dict[str, str], change: Callable[[dict], object]) -> None:
    record = json.loads(metadata["hadaquant"])
    change(record)
    metadata["hadaquant"] = json.dumps(record)


def header(change: Callable[[dict], object]) -> Change:
    return lambda tensors, metadata: edit_record(metadata, change)


def contract_tensor(**fields: object) -> Change:
    def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        stored = json.loads(bytes(tensors["layers.0.up.contract"].tolist()))
        text = json.dumps(stored | fields).encode()
        tensors["layers.0.up.contract"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    return change


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Change:
    return lambda tensors, metadata: change(tensors)


UP = "layers.0.up"
DAMAGE = {
    "metadata stripped": (
        lambda t, m: m.clear(),
        r"q\.safetensors: its header metadata 'hadaquant' is missing.*layers\.",
    ),
    "future record": (header(lambda r: r.update(version=99)), r"q\.safetensors: written by .* in version 99"),
    "record damaged": (lambda t, m: m.update(hadaquant="{"), r"q\.safetensors: its 'hadaquant' record is damaged"),
    "record of other fields": (header(lambda r: r.update(new=1)), r"q\.safetensors: its 'hadaquant' record is damaged"),
    "future contract in both": (
        lambda t, m: [
            contract_tensor(version=9)(t, m),
            header(lambda r: r["layers"][UP].update(version=9))(t, m),
        ],
        r"'layers\.0\.up': its contract has version 9",
    ),
    "future format": (
        header(lambda r: r["layers"][UP].update(format_version=9)),
        r"'layers\.0\.up': format 'nvfp4' has version 9",
    ),
    "unknown format": (
        header(lambda r: r["layers"][UP].update(format="nvfp2")),
        r"'layers\.0\.up': its format 'nvfp2' is unknown",
    ),
    "other group in the header": (
        header(lambda r: r["layers"][UP].update(rotation="sylvester:64", signs=False)),
        r"'layers\.0\.up': .*'sylvester:16'",
    ),
    "other group in the tensor": (contract_tensor(rotation="sylvester:64"), r"'layers\.0\.up': rotation: stored"),
    "impossible rotation": (
        header(lambda r: r["layers"][UP].update(rotation="sylvester:48")),
        r"'layers\.0\.up': its contract cannot be",
    ),
    "no such rotation": (
        header(lambda r: r["layers"][UP].update(rotation="matrix:x")),
        r"'layers\.0\.up': its contract cannot be",
    ),
    "codes missing": (tensors(lambda t: t.pop(f"{UP}.codes")), r"'layers\.0\.up': its codes is missing"),
    "scales missing": (tensors(lambda t: t.pop(f"{UP}.scales")), r"'layers\.0\.up': its scales is missing"),
    "global scale missing": (tensors(lambda t: t.pop(f"{UP}.global_scale")), r"'layers\.0\.up': its global_scale is m"),
    "signs missing": (tensors(lambda t: t.pop(f"{UP}.signs")), r"'layers\.0\.up': its signs is missing"),
    "contract missing": (
        tensors(lambda t: t.pop(f"{UP}.contract")),
        r"'layers\.0\.up': its contract tensor is missing",
    ),
    "layer gone from header": (header(lambda r: r["layers"].pop(UP)), r"'layers\.0\.up': is not in its file's header"),
    "codes of another width": (
        tensors(lambda t: t.update({f"{UP}.codes": t[f"{UP}.codes"][:, :-8].clone()})),
        r"'layers\.0\.up': its codes is U8 \[96, 24\], its contract needs torch.uint8 \[96, 32\]",
    ),
    "scales of another dtype": (
        tensors(lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"].float()})),
        r"'layers\.0\.up': its scales is F32",
    ),
    "a plain weight too": (
        tensors(lambda t: t.update({f"{UP}.weight": torch.ones(96, 64)})),
        r"'layers\.0\.up': it has a weight",
    ),
    "a matrix too": (
        tensors(lambda t: t.update({f"{UP}.matrix": torch.eye(16)})),
        r"'layers\.0\.up': it has a matrix",
    ),
    "contract not JSON": (
        tensors(lambda t: t.update({f"{UP}.contract": torch.tensor([1, 2], dtype=torch.uint8)})),
        r"'layers\.0\.up': its contract has fields",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_c4_damage_is_refused_by_name(quantized, damage) -> None:
    change, message = DAMAGE[damage]
    describe(quantized)  # is fine before
    rewrite(quantized, change)
    for use in (describe, lambda path: hq.load(path, torch.nn.Sequential())):
        with pytest.raises(HadaquantError, match=message):
            use(quantized)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_n22_implausible_global_scale_is_refused(quantized, plain_model, value) -> None:
    rewrite(quantized, tensors(lambda t: t.update({f"{UP}.global_scale": torch.tensor(value)})))
    with pytest.raises(HadaquantError, match=r"'layers\.0\.up': is damaged: global_scale .* positive and finite"):
        hq.load(quantized, plain_model)


def test_signs_that_are_no_signs_are_refused(quantized, plain_model) -> None:
    rewrite(quantized, tensors(lambda t: t.update({f"{UP}.signs": torch.zeros(16)})))
    with pytest.raises(HadaquantError, match=r"'layers\.0\.up': is damaged: .*\+1 or -1"):
        hq.load(quantized, plain_model)


class TestFolder:
    @pytest.fixture
    def out(self, llama_folder, tmp_path) -> Path:
        hq.quantize_checkpoint(llama_folder, tmp_path / "out", "int8", "regular:16")
        return tmp_path / "out"

    def change_config(self, out: Path, change: Callable[[dict], object]) -> None:
        config = json.loads((out / "config.json").read_text())
        change(config["quantization_config"])
        (out / "config.json").write_text(json.dumps(config))

    def test_c4_config_of_another_group(self, out) -> None:
        layer = "model.layers.1.mlp.up_proj"
        self.change_config(out, lambda c: c["layers"][layer].update(rotation="regular:64"))
        with pytest.raises(HadaquantError, match=f"{layer!r}: rotation: stored 'regular:64', expected 'regular:16'"):
            hq.load(out)

    def test_c4_config_without_a_layer(self, out) -> None:
        layer = "model.layers.1.mlp.up_proj"
        self.change_config(out, lambda c: c["layers"].pop(layer))
        with pytest.raises(HadaquantError, match=f"{layer!r}: is missing from config.json"):
            hq.load(out)

    def test_c4_config_from_the_future(self, out) -> None:
        self.change_config(out, lambda c: c.update(version=7))
        with pytest.raises(HadaquantError, match=r"config\.json: written by .* in version 7"):
            hq.load(out)

    def test_c4_a_loader_that_does_not_rotate_refuses(self, out) -> None:
        """transformers skips a quantization it does not know, but finds no weights under its own names."""
        transformers = pytest.importorskip("transformers")
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            transformers.AutoModelForCausalLM.from_pretrained(out)

    def test_c4_no_key_is_that_of_a_plain_weight(self, out, llama) -> None:
        linears = {f"{n}.weight" for n, m in llama.named_modules() if isinstance(m, torch.nn.Linear)}
        assert not linears & read_all(out).keys()

    def test_quantizing_again_is_refused(self, out, tmp_path) -> None:
        for source in (out, out / "hadaquant.safetensors"):
            with pytest.raises(AlreadyQuantized, match="is already quantized"):
                hq.quantize_checkpoint(source, tmp_path / "again", "int8")
        assert not (tmp_path / "again").exists()


def test_c4_missing_shard(folder, plain_tensors, tmp_path) -> None:
    out = tmp_path / "out"
    hq.quantize_checkpoint(folder(plain_tensors, 4), out, "int8", "regular:16")
    (out / "hadaquant-00003-of-00004.safetensors").unlink()
    with pytest.raises(
        HadaquantError, match=r"hadaquant-00003-of-00004\.safetensors: this shard is named in .* missing"
    ):
        describe(out)


def test_contracts_are_in_header_and_tensor(quantized) -> None:
    with safe_open(quantized, "pt") as file:
        record = json.loads(file.metadata()["hadaquant"])
    stored = load_file(quantized)
    for layer, fields in record["layers"].items():
        contract = Contract.from_tensor(stored[f"{layer}.contract"], layer)
        assert contract == Contract.from_dict(fields, layer)
        assert (contract.format, contract.rotation, contract.signs) == ("nvfp4", "sylvester:16", True)
    assert len(record["layers"]) == 4


def test_c7_packing(folder, tmp_path) -> None:
    """[0.5, 1, -6, 4] beside scale 1 packs into bytes 21 6F."""
    w = torch.zeros(1, 32)
    w[0, :4] = torch.tensor([0.5, 1.0, -6.0, 4.0])
    hq.quantize_checkpoint(folder({"a.weight": w}), tmp_path / "out", "mxfp4", "none")
    assert read_all(tmp_path / "out")["a.codes"][0, :2].tolist() == [0x21, 0x6F]
