"""A checkpoint on the disk: one .safetensors file, or a folder in the style of Hugging Face."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hadaquant.checkpoint.files import SafetensorsFile, StoredTensor
from hadaquant.checkpoint.record import METADATA_KEY, Record
from hadaquant.errors import CheckpointError

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

#: What our own weight files are called in a folder. It is not a name that transformers or diffusers
#: look for: they skip a quantization method they do not know, and would go on with random weights.
STEM = "hadaquant"

#: In a folder, these are the weights, whatever other .safetensors files lie beside them.
_WHOLE = ("model.safetensors", "diffusion_pytorch_model.safetensors", f"{STEM}.safetensors")

#: Files that hold weights in some form, and indexes of such: never copied as they are.
_WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|onnx_data|ot)$"
    r"|\.(safetensors|bin|h5|msgpack)\.index(\.[^.]+)?\.json$"
)


@dataclass
class Checkpoint:
    """The weight files of a checkpoint, their tensors by name, and its config.

    ``tensors`` holds each tensor under all its names: tied names share one :class:`StoredTensor`.
    """

    path: Path
    files: list[SafetensorsFile]
    folder: Path | None = None
    index: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    tensors: dict[str, StoredTensor] = field(init=False)
    records: dict[Path, Record] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors, self.records = {}, {}
        for file in self.files:
            twice = sorted(self.tensors.keys() & file.tensors.keys())
            if twice:
                where = self.tensors[twice[0]].path.name
                raise CheckpointError(path=file.path, rule=f"{twice[0]!r} is in {where} too", fix="keep one of them")
            self.tensors |= file.tensors
            if METADATA_KEY in file.metadata:
                self.records[file.path] = Record.from_json(file.metadata[METADATA_KEY], file.path)
        for path, record in self.records.items():
            for alias, name in record.tied.items():
                if name not in self.tensors:
                    raise CheckpointError(
                        path=path, rule=f"{alias!r} is tied to {name!r}, which is missing", fix=_AGAIN
                    )
                self.tensors[alias] = self.tensors[name]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the headers of a file, or of a folder's weight files.

        Raises:
            CheckpointError: nothing there, no or several candidates, a shard missing, a damaged file.
        """
        path = Path(path)
        if path.is_dir():
            return cls._open_folder(path)
        if not path.exists():
            raise CheckpointError(path=path, rule="no such file or folder", fix="check the path, or download it first")
        if path.suffix != SUFFIX:
            raise CheckpointError(
                path=path, rule=f"not a {SUFFIX} file", fix=f"save the weights as {SUFFIX}; other formats are not read"
            )
        return cls(path, [SafetensorsFile.open(path)])

    @classmethod
    def _open_folder(cls, folder: Path) -> Checkpoint:
        weights = sorted(p for p in folder.glob(f"*{SUFFIX}") if not p.name.startswith("."))
        indexes = sorted(p for p in folder.glob(f"*{INDEX_SUFFIX}") if not p.name.startswith("."))
        whole = [folder / name for name in _WHOLE if (folder / name) in weights]
        config = _read_json(folder / "config.json") if (folder / "config.json").exists() else None
        if whole:
            return cls(whole[0], [SafetensorsFile.open(whole[0])], folder, None, config)
        if len(indexes) == 1:
            index = _read_json(indexes[0])
            return cls(indexes[0], _open_shards(indexes[0], index), folder, index, config)
        if len(weights) == 1:
            return cls(weights[0], [SafetensorsFile.open(weights[0])], folder, None, config)
        if not weights:
            raise CheckpointError(
                path=folder, rule=f"holds no {SUFFIX} file", fix="give the folder that does, or save the model as such"
            )
        found = ", ".join(p.name for p in indexes or weights)
        rule = "holds several indexes" if indexes else f"holds several {SUFFIX} files and no index"
        raise CheckpointError(path=folder, rule=f"{rule}: {found}", fix="give one file, or add the index")

    @property
    def nbytes(self) -> int:
        """Size of the weight files."""
        return sum(file.path.stat().st_size for file in self.files)

    def other_files(self) -> tuple[list[Path], list[Path]]:
        """The folder's other files, relative to it: those to copy, and weights that are left out."""
        copied, left_out = list[Path](), list[Path]()
        if self.folder is None:
            return copied, left_out
        ours = {file.path.name for file in self.files} | {self.path.name, "config.json"}
        for root, folders, files in os.walk(self.folder):
            folders[:] = sorted(f for f in folders if not f.startswith("."))
            for name in sorted(files):
                path = (Path(root) / name).relative_to(self.folder)
                if name.startswith(".") or str(path) in ours:
                    continue
                (left_out if _WEIGHTS.search(name) else copied).append(path)
        return copied, left_out

    def copy_others(self, paths: list[Path], out: Path) -> None:
        """Copy files of the folder, bit for bit."""
        for path in paths if self.folder else ():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / path, out / path)  # type: ignore[operator]


_AGAIN = "copy the checkpoint again, completely"


def _open_shards(path: Path, index: dict[str, Any]) -> list[SafetensorsFile]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path=path, rule="holds no weight_map", fix=_AGAIN)
    files: dict[str, SafetensorsFile] = {}
    for name in sorted(set(weight_map.values())):
        shard = path.parent / name
        if Path(name).name != name or not shard.is_file():
            raise CheckpointError(path=shard, rule=f"this shard is named in {path.name} but missing", fix=_AGAIN)
        files[name] = SafetensorsFile.open(shard)
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            raise CheckpointError(path=path.parent / shard, rule=f"{path.name} says it holds {name!r}", fix=_AGAIN)
    return list(files.values())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(path=path, rule=f"not valid JSON ({error})", fix=_AGAIN) from error
    if not isinstance(content, dict):
        raise CheckpointError(path=path, rule="not a JSON object", fix=_AGAIN)
    return content


def write_json(path: Path, content: object) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
