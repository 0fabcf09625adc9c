"""What the tests of checkpoints share."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def write_shards(folder: Path, tensors: dict[str, Tensor], count: int) -> None:
    """Write tensors as ``count`` shards with an index, as transformers does."""
    names = sorted(tensors)
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        mine = names[i::count]
        save_file({name: tensors[name] for name in mine}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_all(path: Path) -> dict[str, Tensor]:
    """All tensors of a file or folder, by the safetensors library."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes, NaN and -0.0 included."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
