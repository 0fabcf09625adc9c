"""Quantizing a checkpoint: the right layers, the right bytes, everything else untouched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_support import read_all, same_bits
from safetensors.torch import load_file
from torch import Tensor

import hadaquant as hq
from hadaquant.checkpoint import quantizer, stream
from hadaquant.checkpoint.model_plan import fingerprint
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.contract import Contract
from hadaquant.errors import CheckpointError, MismatchError

LINEARS = [f"layers.{i}.{name}" for i in range(2) for name in ("up", "down")]


def assert_layer(out: dict[str, Tensor], layer: str, weight: Tensor, format: str, rotation: str | hq.Rotation) -> None:
    """The file's layer is hq.quantize of the weight, bit for bit."""
    q = hq.quantize(weight, format, rotation=rotation)
    assert same_bits(out[f"{layer}.codes"], q.codes)
    assert same_bits(out[f"{layer}.scales"], q.scales)
    assert (f"{layer}.global_scale" in out) == (q.global_scale is not None)
    if q.global_scale is not None:
        assert same_bits(out[f"{layer}.global_scale"], q.global_scale)
    contract = Contract.from_tensor(out[f"{layer}.contract"], layer)
    assert contract == Contract.of(q.format, q.rotation, (weight.shape[0], weight.shape[1]))
    assert f"{layer}.weight" not in out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("format", "rotation"),
    [
        ("int8", "regular:16"),
        ("int8", "none"),
        ("nvfp4", "sylvester:16"),
        ("mxfp4", "sylvester:32"),
        ("mxfp4-ceil", "none"),
        ("mxfp4-even", "regular:16"),
    ],
)
def test_every_format_from_every_dtype(folder, plain_tensors, tmp_path, format, rotation, dtype) -> None:
    source = {name: t.to(dtype) for name, t in plain_tensors.items()}
    report = hq.quantize_checkpoint(folder(source), tmp_path / "out", format, rotation)
    out = read_all(tmp_path / "out")
    for layer in LINEARS:
        assert_layer(out, layer, source[f"{layer}.weight"], format, rotation)
    kept = {name: t for name, t in source.items() if name.removesuffix(".weight") not in LINEARS}
    assert all(same_bits(out[name], t) for name, t in kept.items())
    assert {name for name in out if name.rpartition(".")[0] not in LINEARS or name.endswith("bias")} == set(kept)
    assert sorted(layer.name for layer in report.quantized) == sorted(LINEARS)
    for layer in report.quantized:
        w = source[f"{layer.name}.weight"].float()
        restored = hq.quantize(source[f"{layer.name}.weight"], format, rotation=rotation).dequantize()
        assert layer.error == pytest.approx(((restored - w).norm() / w.norm()).item(), rel=1e-5)
        assert layer.bytes_before == w.numel() * dtype.itemsize


@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("kind", ["none", "sylvester", "signs", "matrix"])
def test_p2_chunks_of_rows_give_the_bytes_of_the_whole(folder, tmp_path, monkeypatch, format, kind) -> None:
    gen = torch.Generator().manual_seed(1)
    w = torch.randn(4099, 64, generator=gen)
    w[4098, 3] = 40.0  # the amax of nvfp4's global scale is in the last chunk
    rotation: Any = "none" if kind == "none" else "sylvester:32"
    if kind == "signs":
        rotation = hq.Rotation("sylvester", 32, signs=torch.randint(0, 2, (32,), generator=gen) * 2 - 1)
    if kind == "matrix":
        rotation = hq.Rotation("matrix", matrix=torch.linalg.qr(torch.randn(32, 32, generator=gen)).Q)
    monkeypatch.setattr(stream, "CHUNK", 1)
    monkeypatch.setattr("hadaquant.reference.CHUNK", 64 * 500)
    hq.quantize_checkpoint(folder({"a.weight": w}), tmp_path / "out", format, rotation)
    out = read_all(tmp_path / "out")
    assert_layer(out, "a", w, format, rotation)
    if kind in ("signs", "matrix"):
        assert same_bits(out[f"a.{kind}"], getattr(rotation, kind))


@pytest.mark.parametrize("shards", [0, 1, 4])
@pytest.mark.parametrize("single", [True, False])
def test_p2_shards_and_files_hold_the_same(folder, plain_tensors, tmp_path, shards, single) -> None:
    out = tmp_path / ("out.safetensors" if single else "out")
    source = folder(plain_tensors, shards)
    report = hq.quantize_checkpoint(source, out, "int8", "regular:16")
    tensors = read_all(out)
    for layer in LINEARS:
        assert_layer(tensors, layer, plain_tensors[f"{layer}.weight"], "int8", "regular:16")
        assert same_bits(tensors[f"{layer}.bias"], plain_tensors[f"{layer}.bias"]) if "up" in layer else True
    files = [out] if single else sorted(out.glob("*.safetensors"))
    assert len(files) == (1 if single else max(1, shards))
    assert report.file_bytes_after == sum(file.stat().st_size for file in files)
    if shards > 1 and not single:
        index = json.loads((out / "hadaquant.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: f.name for f in files for name in load_file(f)}
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    Checkpoint.open(out)


def test_a_file_gives_what_its_folder_gives(folder, plain_tensors, tmp_path) -> None:
    source = folder(plain_tensors)
    hq.quantize_checkpoint(source / "model.safetensors", tmp_path / "a.safetensors", "nvfp4", "sylvester:16")
    hq.quantize_checkpoint(source, tmp_path / "b", "nvfp4", "sylvester:16")
    a, b = read_all(tmp_path / "a.safetensors"), read_all(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64])
def test_c3_fp8_without_scales_is_converted_from_its_values(folder, tmp_path, dtype) -> None:
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensors = {"a.weight": w, "keep.norm.weight": torch.ones(64).to(dtype)}
    hq.quantize_checkpoint(folder(tensors), tmp_path / "out", "int8", "regular:16")
    out = read_all(tmp_path / "out")
    assert_layer(out, "a", w.to(torch.float32), "int8", "regular:16")
    assert same_bits(out["keep.norm.weight"], tensors["keep.norm.weight"])


def test_c3_unicode_names_and_string_metadata(folder, tmp_path) -> None:
    tensors = {"блок.層.weight": torch.randn(16, 32), "naïve norm.weight": torch.ones(4)}
    source = folder(tensors, name="modèle")
    hq.quantize_checkpoint(source, tmp_path / "выход", "mxfp4", "sylvester:32")
    assert_layer(read_all(tmp_path / "выход"), "блок.層", tensors["блок.層.weight"], "mxfp4", "sylvester:32")
    metadata = Checkpoint.open(tmp_path / "выход").files[0].metadata
    assert metadata["format"] == "pt"
    assert all(isinstance(value, str) for value in metadata.values())
    assert json.loads(metadata["hadaquant"])["source"] == os.fspath(source)


@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4"])
def test_s4_group_that_does_not_divide(folder, tmp_path, format) -> None:
    """The largest legal group that divides K, else the layer stays; the file and the report say so."""
    sizes = (1, 8, 12, 32, 96, 100, 3420, 4304)
    tensors = {f"k{k}.weight": torch.randn(4, k) * 0.1 for k in sizes}
    block = hq.get_format(format).multiple
    expected = {k: hq.Rotation("regular", 256).fit(k, block) for k in sizes}
    report = hq.quantize_checkpoint(folder(tensors), tmp_path / "out", format, "regular:256")
    out = read_all(tmp_path / "out")
    record = Checkpoint.open(tmp_path / "out").records[tmp_path / "out" / "hadaquant.safetensors"]
    by_name = {layer.name: layer for layer in report.layers}
    for k, rotation in expected.items():
        layer = by_name[f"k{k}"]
        if rotation is None:
            assert not layer.quantized
            assert str(k) in layer.reason
            assert same_bits(out[f"k{k}.weight"], tensors[f"k{k}.weight"])
            assert record.kept[f"k{k}"] == layer.reason
        else:
            assert_layer(out, f"k{k}", tensors[f"k{k}.weight"], format, rotation)
            assert layer.rotation == record.layers[f"k{k}"].rotation == str(rotation)
            assert "fitted" in layer.reason
    assert [k for k, r in expected.items() if r is None] == {"int8": [1], "nvfp4": [1, 8, 12, 100, 3420]}.get(
        format, [1, 8, 12, 100, 3420, 4304]
    )


def test_copies_small_files_and_leaves_weights_out(llama_folder, tmp_path) -> None:
    (llama_folder / "pytorch_model.bin").write_bytes(b"x")
    (llama_folder / "consolidated.safetensors").write_bytes(b"x")
    (llama_folder / "sub").mkdir()
    (llama_folder / "sub" / "vocab.txt").write_bytes(b"a\r\nb")
    (llama_folder / ".git").mkdir()
    (llama_folder / ".git" / "HEAD").write_bytes(b"x")
    report = hq.quantize_checkpoint(llama_folder, tmp_path / "out", "int8", "regular:16")
    found = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert found == ["config.json", "hadaquant.safetensors", "sub/vocab.txt", "tokenizer.json"]
    for name in ("sub/vocab.txt", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (llama_folder / name).read_bytes()
    assert report.left_out == ["consolidated.safetensors", "pytorch_model.bin"]
    before, after = (json.loads((p / "config.json").read_text()) for p in (llama_folder, tmp_path / "out"))
    said = after.pop("quantization_config")
    assert after == before
    assert (said["quant_method"], said["tool"], said["source"]) == (
        "hadaquant",
        hq.__version__,
        os.fspath(llama_folder),
    )
    assert (said["format"], said["rotation"], said["skip"]) == ("int8", "regular:16", ["lm_head"])
    assert len(said["layers"]) == 14
    assert "model.norm" in said["kept"]


def test_the_record_says_where_the_source_is_and_which_weights_it_held(
    folder, plain_tensors, tmp_path, monkeypatch
) -> None:
    source = folder(plain_tensors, shards=2)
    weights = fingerprint(Checkpoint.open(source))
    (tmp_path / "linked.safetensors").symlink_to(source / "model-00001-of-00002.safetensors")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for typed in ("../model", "../link", "../link/../model"):
        report = hq.quantize_checkpoint(typed, "out", "int8")
        records = Checkpoint.open("out").records.values()
        assert {(r.source, r.source_fingerprint) for r in records} == {(str(source), weights)}
        assert (len(records), report.record["source_fingerprint"]) == (2, weights)
        shutil.rmtree("out")
    # a file keeps its name: what it links to may have no suffix
    hq.quantize_checkpoint("../linked.safetensors", "out.safetensors", "int8")
    (record,) = Checkpoint.open("out.safetensors").records.values()
    assert record.source == str(tmp_path / "linked.safetensors")
    assert record.source_fingerprint == fingerprint(Checkpoint.open(tmp_path / "linked.safetensors")) != weights


def test_output_inside_the_source(llama_folder) -> None:
    hq.quantize_checkpoint(llama_folder, llama_folder / "int8", "int8", "regular:16")
    names = sorted(p.name for p in (llama_folder / "int8").iterdir())
    assert names == ["config.json", "hadaquant.safetensors", "tokenizer.json"]


def test_existing_output_is_refused(folder, plain_tensors, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        hq.quantize_checkpoint(folder(plain_tensors), tmp_path / "out", "int8")


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_a_failed_run_leaves_nothing(folder, plain_tensors, tmp_path, monkeypatch, name, error) -> None:
    source, calls = folder(plain_tensors, 2), []
    quantize = stream.quantize

    def fail_late(*args: Any, **kwargs: Any) -> Any:
        if args[0].device.type == "cpu":
            calls.append(args)
        if len(calls) == 3:
            raise error
        return quantize(*args, **kwargs)

    monkeypatch.setattr(stream, "quantize", fail_late)
    with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)):
        hq.quantize_checkpoint(source, tmp_path / name, "int8")
    assert len(calls) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_weights_with_nan_are_told(folder, tmp_path) -> None:
    w = torch.randn(8, 32)
    w[2, 5] = float("nan")
    report = hq.quantize_checkpoint(folder({"a.weight": w}), tmp_path / "out", "int8", "regular:16")
    (layer,) = report.quantized
    assert "NaN or Inf" in layer.reason
    assert report.to_dict()["layers"][0]["error"] is None
    json.dumps(report.to_dict(), allow_nan=False)
    assert_layer(read_all(tmp_path / "out"), "a", w, "int8", "regular:16")


def test_zero_weight_and_no_rows(folder, tmp_path) -> None:
    tensors = {"zero.weight": torch.zeros(4, 32), "none.weight": torch.zeros(0, 32), "real.weight": torch.randn(4, 32)}
    report = hq.quantize_checkpoint(folder(tensors), tmp_path / "out", "nvfp4", "sylvester:16")
    assert {layer.name: layer.error for layer in report.quantized}["zero"] == 0.0
    for layer in ("zero", "real"):
        assert_layer(read_all(tmp_path / "out"), layer, tensors[f"{layer}.weight"], "nvfp4", "sylvester:16")
    assert "none" not in [layer.name for layer in report.quantized]


def test_progress_reaches_the_end(folder, plain_tensors, tmp_path) -> None:
    seen: list[tuple[str, int, int]] = []
    quantizer.quantize_checkpoint(
        folder(plain_tensors, 2), tmp_path / "out", "int8", progress=lambda *args: seen.append(args)
    )
    assert seen[-1][1] == seen[-1][2] == sum(t.nbytes for t in plain_tensors.values())
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_i1_no_driver_no_triton(folder, plain_tensors, tmp_path: Path) -> None:
    """Import, offline quantize and CPU forward in a process where Triton cannot be imported."""
    code = f"""
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch, hadaquant as hq
for name in ("transformers", "matplotlib"):
    assert name not in sys.modules, name
hq.quantize_checkpoint({os.fspath(folder(plain_tensors))!r}, {os.fspath(tmp_path / "out")!r}, "nvfp4", "sylvester:16")
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 96), torch.nn.Linear(96, 64, bias=False)
        self.norm = torch.nn.RMSNorm(64)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.norm = torch.nn.Embedding(50, 64), torch.nn.RMSNorm(64)
        self.lm_head = torch.nn.Linear(64, 50, bias=False)
        self.layers = torch.nn.ModuleList([Block(), Block()])
model = hq.load({os.fspath(tmp_path / "out")!r}, Model())
y = model.layers[0].down(model.layers[0].up(torch.ones(2, 64)))
assert y.shape == (2, 64) and y.isfinite().all()
try:
    hq.quantize(torch.ones(2, 64), "int8", backend="triton")
except hq.HadaquantError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("layout", ["native", "comfy"])
def test_a_gpu_writes_the_same_file(folder, tmp_path, format, layout) -> None:
    if layout == "comfy" and format != "int8":
        pytest.skip("the comfy layout holds int8 only")
    source = folder({f"a{k}.weight": torch.randn(3000, k) for k in (64, 1024, 4096)})
    for device in ("cpu", "cuda"):
        hq.quantize_checkpoint(
            source, tmp_path / f"{device}.safetensors", format, "regular:64", layout=layout, device=device
        )
    assert (tmp_path / "cpu.safetensors").read_bytes() == (tmp_path / "cuda.safetensors").read_bytes()
    model = torch.nn.Sequential(torch.nn.Linear(64, 3000, bias=False))
    hq.quantize_checkpoint(folder({"0.weight": torch.ones(3000, 64)}, name="b"), tmp_path / "b", format, layout=layout)
    assert hq.load(tmp_path / "b", model, device="cuda")(torch.ones(2, 64, device="cuda")).device.type == "cuda"


def test_other_tensors_can_be_changed(folder, plain_tensors, tmp_path) -> None:
    """What is not quantized may be written anew, in its own dtype; nothing else may."""
    source = folder(plain_tensors)
    stored = Checkpoint.open(source).tensors
    name = next(name for name, tensor in stored.items() if len(tensor.shape) == 1)
    new = torch.arange(stored[name].shape[0], dtype=torch.float64)
    hq.quantize_checkpoint(source, tmp_path / "out", "int8", codes=lambda _: {name: new})
    found = read_all(tmp_path / "out")[name]
    assert found.dtype == stored[name].torch_dtype and torch.equal(found, new.to(found.dtype))
    for wrong in ({name: new[1:]}, {"nothing": new}, {f"{LINEARS[0]}.weight": torch.ones(1)}):
        with pytest.raises(MismatchError, match="the shape of"):
            hq.quantize_checkpoint(source, tmp_path / "no", "int8", codes=lambda _, wrong=wrong: wrong)
    assert not (tmp_path / "no").exists()
