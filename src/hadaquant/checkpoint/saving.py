"""Writes a model in memory that holds RotatedLinear layers, in the native layout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hadaquant._version import __version__
from hadaquant.checkpoint.atomic import new_output
from hadaquant.checkpoint.files import SafetensorsWriter, TensorSpec
from hadaquant.checkpoint.record import METADATA_KEY, Origin, Record
from hadaquant.checkpoint.source import STEM, SUFFIX, write_json
from hadaquant.contract import Contract
from hadaquant.errors import CheckpointError, LayerError
from hadaquant.nn.linear import RotatedLinear


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model that holds :class:`RotatedLinear` layers; :func:`load` reads it.

    Args:
        model: any module. Names that share one tensor are stored once and stay tied when loaded.
        path: what to write, which must not exist: one .safetensors file if named so, else a folder
            with the weights and, where the model has a ``config``, its config.json. A model that :func:`load` read
            from a folder brings that folder's other files, such as the tokenizer's, if they are still there.

    Raises:
        LayerError: the model holds no RotatedLinear, or a tensor without data.
        CheckpointError: the output exists or cannot be written.
    """
    layers = {
        name: Contract.from_tensor(module.contract, name)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, RotatedLinear)
    }
    if not layers:
        raise LayerError(layer=type(model).__name__, rule="it holds no RotatedLinear", fix="use hq.quantize_ first")
    if "" in layers:
        raise LayerError(layer=type(model).__name__, rule="it has no name", fix="put it into a module, and save that")
    tensors, tied = _tensors(model)
    kept = {
        name: "was not quantized"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    }
    origin: Origin | None = getattr(model, Origin.KEY, None)
    made = None if origin is None else origin.calibration
    record = Record(tool=__version__, layout="native", layers=layers, kept=kept, tied=tied, calibration=made)
    path = Path(path)
    with new_output(path) as temporary:
        file = temporary
        if path.suffix != SUFFIX:
            temporary.mkdir()
            file = temporary / (STEM + SUFFIX)
            _write_configs(model, temporary, record)
            if origin is not None:
                origin.copy_files(temporary)
        specs = {name: TensorSpec.of(tensor, name) for name, tensor in tensors.items()}
        with SafetensorsWriter(file, specs, {"format": "pt", METADATA_KEY: record.to_json()}) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to store, and the names that are tied to one of them."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise LayerError(
                layer=name, rule=f"its extra state is {type(value).__name__}, not a tensor", fix="use torch.save"
            )
        if value.is_meta:
            raise LayerError(layer=name, rule="it is on the meta device, without data", fix="load the model first")
        place = (value.device, value.untyped_storage().data_ptr(), value.storage_offset(), value.dtype)
        first = names.setdefault((*place, value.shape, value.stride()), name) if value.numel() else name
        if first == name:
            tensors[name] = value
        else:
            tied[name] = first
    return tensors, tied


def _write_configs(model: nn.Module, folder: Path, record: Record) -> None:
    for attribute in ("config", "generation_config"):
        config = _as_dict(getattr(model, attribute, None))
        if config is None:
            continue
        if attribute == "config":
            if "model_type" in config:
                config["architectures"] = [type(model).__name__]
            config["quantization_config"] = record.to_config()
        write_json(folder / f"{attribute}.json", config)


def _as_dict(config: Any) -> dict[str, Any] | None:
    """A config of transformers, or any mapping, as JSON would have it; None for anything else."""
    if hasattr(config, "to_json_string"):
        return json.loads(config.to_json_string())
    if isinstance(config, dict):
        try:
            return json.loads(json.dumps(dict(config)))
        except TypeError as error:
            raise CheckpointError(
                path="config.json", rule=f"the model's config is not JSON ({error})", fix="remove what is not"
            ) from error
    return None
