"""The safetensors reader and writer, against the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ckpt_support import same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hadaquant.checkpoint.atomic import new_output
from hadaquant.checkpoint.files import DTYPES, SafetensorsFile, SafetensorsWriter, TensorSpec
from hadaquant.errors import CheckpointError


def every_dtype() -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        size = torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(0, 2 if name == "BOOL" else 256, (3 * 5 * size,), generator=gen, dtype=torch.uint8)
        tensors[f"層.{name}"] = raw.view(dtype).view(3, 5)
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}


@pytest.mark.parametrize("backward", [False, True])
def test_c3_writes_what_safetensors_reads(tmp_path: Path, backward: bool) -> None:
    """Every dtype, unicode names, rows in any order; metadata values are strings."""
    tensors, path = every_dtype(), tmp_path / "x.safetensors"
    specs = {name: TensorSpec.of(t, name) for name, t in tensors.items()}
    with SafetensorsWriter(path, specs, {"schlüssel": "wert"}) as writer:
        for name, t in reversed(tensors.items()) if backward else tensors.items():
            if t.dim() == 2 and t.shape[0]:
                writer.write(name, t[1:], 1)
                writer.write(name, t[:1])
            else:
                writer.write(name, t)
    back = load_file(path)
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], t) for name, t in tensors.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"schlüssel": "wert"}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors, path = every_dtype(), tmp_path / "x.safetensors"
    save_file(tensors, path, {"format": "pt"})
    file = SafetensorsFile.open(path)
    assert file.metadata == {"format": "pt"}
    assert file.tensors.keys() == tensors.keys()
    for name, t in tensors.items():
        stored = file.tensors[name]
        assert same_bits(stored.read(), t)
        assert b"".join(stored.pieces()) == t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if t.dim() and t.shape[0]:
            assert same_bits(stored.read(1, 3), t[1:3])
            assert stored.read(2, 2).shape == (0, *t.shape[1:])


def test_copies_a_dtype_torch_does_not_know(tmp_path: Path) -> None:
    """Six-bit floats: safetensors has a name for them, torch has not."""
    path, out = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4, 4], "data_offsets": [0, 12]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(12)))
    stored = SafetensorsFile.open(path).tensors["a"]
    with pytest.raises(CheckpointError, match="'a' has dtype F6_E2M3"):
        stored.read()
    with SafetensorsWriter(out, {"a": stored}, {}) as writer:
        writer.copy("a", stored)
    assert out.read_bytes()[-12:] == bytes(range(12))
    assert SafetensorsFile.open(out).tensors["a"].dtype == "F6_E2M3"


def test_tensors_are_aligned(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(3), "c": torch.zeros(1, dtype=torch.float64)}
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, {n: TensorSpec.of(t, n) for n, t in tensors.items()}, {}) as writer:
        for name, t in tensors.items():
            writer.write(name, t)
    for name, stored in SafetensorsFile.open(path).tensors.items():
        assert stored.start % tensors[name].element_size() == 0


def test_an_unfinished_file_is_refused(tmp_path: Path) -> None:
    spec = TensorSpec.of(torch.zeros(4, 2), "a")
    with (
        pytest.raises(CheckpointError, match=r"not written in full: \['a'\]"),
        SafetensorsWriter(tmp_path / "x.safetensors", {"a": spec}, {}) as writer,
    ):
        writer.write("a", torch.zeros(3, 2))


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="exists"):
        SafetensorsWriter(path, {}, {})
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "missing"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"truncated": path.read_bytes()[:-1], "text": b"version https://git-lfs", "empty": b""}[damage]
        )
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        SafetensorsFile.open(path)


class TestNewOutput:
    def test_appears_at_the_end(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with new_output(out) as temporary:
            temporary.mkdir()
            (temporary / "a").write_text("1")
            assert not out.exists()
        assert [p.name for p in tmp_path.iterdir()] == ["out"]
        assert (out / "a").read_text() == "1"

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
    @pytest.mark.parametrize("folder", [True, False])
    def test_failure_leaves_nothing(self, tmp_path: Path, error: type[BaseException], folder: bool) -> None:
        raised = CheckpointError if error is OSError else error
        with pytest.raises(raised), new_output(tmp_path / "out") as temporary:
            if folder:
                temporary.mkdir()
                (temporary / "a").write_text("1")
            else:
                temporary.write_text("1")
            raise error("no")
        assert list(tmp_path.iterdir()) == []

    def test_refuses_what_exists(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        for name, rule in (("empty", "exists"), ("dangling", "exists"), ("a/b", "parent folder does not exist")):
            with pytest.raises(CheckpointError, match=rule), new_output(tmp_path / name):
                raise RuntimeError("unreachable")

    def test_refuses_what_came_into_being_meanwhile(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with pytest.raises(CheckpointError, match="exists"), new_output(out) as temporary:
            temporary.write_text("ours")
            out.write_text("theirs")
        assert out.read_text() == "theirs"
        assert [p.name for p in tmp_path.iterdir()] == ["out"]
