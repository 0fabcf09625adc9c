"""ComfyUI's int8_tensorwise layout, with its convrot rotation.

``<m>.weight`` int8 [N, K], ``<m>.weight_scale`` float32 [N, 1] (read: also a scalar, for the whole
weight), ``<m>.bias``, and ``<m>.comfy_quant``: uint8 JSON ``{"format": "int8_tensorwise",
"convrot": true, "convrot_groupsize": G}``, without the convrot keys where nothing is rotated. The
header's ``_quantization_metadata`` says the same of each layer; ComfyUI believes it first.

convrot of group G is the rotation ``regular:G``. The mathematics is that of format ``int8``; only the
smallest scale differs, which matters for an all-zero row alone.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from hadaquant.checkpoint.files import StoredTensor
from hadaquant.checkpoint.layouts import StoredLayer, foreign_int8
from hadaquant.checkpoint.record import Record
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.contract import Contract
from hadaquant.errors import CheckpointError, LayerError
from hadaquant.formats import Format
from hadaquant.rotation import Rotation, parse
from hadaquant.tensor import QuantizedTensor

METADATA = "_quantization_metadata"
SETTINGS = ".comfy_quant"
FORMAT = "int8_tensorwise"


class _Comfy:
    name = "comfy"
    written = True

    def check(self, format: Format, rotation: Rotation, activations: str) -> None:
        if activations == "full":
            raise CheckpointError(
                path=f"{format}, full activations",
                rule="ComfyUI quantizes the inputs of int8_tensorwise layers, and the layout cannot say otherwise",
                fix="leave activations coded, or choose layout 'native'",
            )
        if format.name != "int8" or rotation.kind not in ("none", "regular") or rotation.signs is not None:
            raise CheckpointError(
                path=f"{format}, {rotation}",
                rule="the comfy layout holds format int8 with rotation none or regular:G",
                fix="choose these, or layout 'native'",
            )

    def rows(self, q: QuantizedTensor) -> dict[str, Tensor]:
        return {"weight": q.codes, "weight_scale": q.scales.unsqueeze(-1)}

    def once(self, q: QuantizedTensor, contract: Contract) -> dict[str, Tensor]:
        text = json.dumps(_settings(contract))
        return {SETTINGS[1:]: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}

    def metadata(self, record: Record) -> dict[str, str]:
        layers = {name: _settings(contract) for name, contract in record.layers.items()}
        return {METADATA: json.dumps({"format_version": "1.0", "layers": layers}, ensure_ascii=False)}

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return (
            any(record.layout == self.name for record in checkpoint.records.values())
            or any(METADATA in file.metadata for file in checkpoint.files)
            or any(name.endswith(SETTINGS) for name in checkpoint.tensors)
        )

    def layers(self, checkpoint: Checkpoint, rotation: str | None) -> dict[str, StoredLayer]:
        if rotation is not None:
            raise CheckpointError(path=checkpoint.path, rule="says its rotation itself", fix="leave rotation out")
        settings = _read_settings(checkpoint)
        layers = {layer: _stored(layer, s, checkpoint.tensors) for layer, s in settings.items()}
        for name, stored in checkpoint.tensors.items():
            layer = name.removesuffix(".weight")
            if name.endswith(".weight") and stored.dtype == "I8" and layer not in layers:
                raise LayerError(
                    layer=layer,
                    rule=f"its weight is int8, but neither {SETTINGS[1:]} nor {METADATA} says whether it is rotated",
                    fix="use the original file; other programs drop metadata when they save",
                )
        for record in checkpoint.records.values():
            for layer, contract in record.layers.items():
                if layer not in layers:
                    raise LayerError(layer=layer, rule=f"its {SETTINGS[1:]} is missing", fix="write the file again")
                contract.check_same(layers[layer].contract, layer)
        return layers


def _settings(contract: Contract) -> dict[str, Any]:
    rotation = parse(contract.rotation)
    convrot = {} if rotation.kind == "none" else {"convrot": True, "convrot_groupsize": rotation.group}
    return {"format": FORMAT, **convrot}


def _read_settings(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Each layer's settings, from its tensor and from the header; where both speak they must agree."""
    found: dict[str, dict[str, Any]] = {}
    for name, stored in checkpoint.tensors.items():
        if name.endswith(SETTINGS):
            layer = name.removesuffix(SETTINGS)
            found[layer] = _flat(_parse(bytes(stored.read().tolist()), layer), layer)
    for file in checkpoint.files:
        if METADATA in file.metadata:
            said = _parse(file.metadata[METADATA].encode(), str(file.path)).get("layers")
            for layer, settings in (said if isinstance(said, dict) else {}).items():
                flat = _flat(settings, layer)
                if found.setdefault(layer, flat) != flat:
                    rule = f"its {SETTINGS[1:]} says {found[layer]}, the header {flat}"
                    raise LayerError(layer=layer, rule=rule, fix="write the file again")
    return found


def _parse(text: bytes, layer: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise LayerError(layer=layer, rule="its quantization settings are not a JSON object", fix="write it again")
    return settings


def _flat(settings: Any, layer: str) -> dict[str, Any]:
    """What matters of a layer's settings. Some writers nest them under ``params``."""
    if not isinstance(settings, dict) or settings.get("format") != FORMAT:
        found = settings.get("format") if isinstance(settings, dict) else settings
        raise LayerError(
            layer=layer,
            rule=f"has comfy format {found!r}; only {FORMAT!r} is read here",
            fix="use ComfyUI for this file",
        )
    nested = settings.get("params")
    every = settings | (nested if isinstance(nested, dict) else {})
    return {"convrot": every.get("convrot_groupsize", 256)} if every.get("convrot") else {}


def _stored(layer: str, settings: dict[str, Any], tensors: dict[str, StoredTensor]) -> StoredLayer:
    rotation = f"regular:{settings['convrot']}" if settings else "none"
    weight, scale = f"{layer}.weight", f"{layer}.weight_scale"
    keys = frozenset((weight, scale, layer + SETTINGS)) & tensors.keys()
    return foreign_int8(layer, tensors.get(weight), tensors.get(scale), rotation, keys)


LAYOUT = _Comfy()
