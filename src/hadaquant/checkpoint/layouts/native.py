"""The native layout: the keys of RotatedLinear's state_dict, and the contract in two places.

``<m>.codes``, ``<m>.scales``, ``<m>.global_scale`` (nvfp4), ``<m>.signs`` or ``<m>.matrix``,
``<m>.input_global_scale`` (a static input scale), ``<m>.contract`` (uint8 JSON) and ``<m>.bias``.
There is no ``<m>.weight``, so that no plain loader can take rotated codes for a weight. The record in
each file's header holds the contract of each layer in that file once more; header, contract tensor,
shapes and config.json must agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadaquant.checkpoint.files import StoredTensor
from hadaquant.checkpoint.layouts import StoredLayer
from hadaquant.checkpoint.record import METADATA_KEY, Record
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.contract import Contract
from hadaquant.errors import CheckpointError, LayerError
from hadaquant.formats import Format, get_format
from hadaquant.rotation import Rotation, parse
from hadaquant.tensor import QuantizedTensor

_CONTRACT = ".contract"


class _Native:
    name = "native"
    written = True

    def check(self, format: Format, rotation: Rotation, activations: str) -> None:
        """It holds everything."""

    def rows(self, q: QuantizedTensor) -> dict[str, Tensor]:
        return {"codes": q.codes, "scales": q.scales}

    def once(self, q: QuantizedTensor, contract: Contract) -> dict[str, Tensor]:
        tensors = {"global_scale": q.global_scale, "signs": q.rotation.signs, "matrix": q.rotation.matrix}
        return {"contract": contract.to_tensor(), **{name: t for name, t in tensors.items() if t is not None}}

    def metadata(self, record: Record) -> dict[str, str]:
        return {}

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        if any(record.layout == self.name for record in checkpoint.records.values()):
            return True
        names = checkpoint.tensors.keys()
        return any(n.endswith(_CONTRACT) or (n.endswith(".codes") and n[:-5] + "scales" in names) for n in names)

    def layers(self, checkpoint: Checkpoint, rotation: str | None) -> dict[str, StoredLayer]:
        if rotation is not None:
            raise CheckpointError(path=checkpoint.path, rule="says its rotation itself", fix="leave rotation out")
        contracts = _recorded(checkpoint)
        for name in checkpoint.tensors:
            layer = name.removesuffix(_CONTRACT)
            if name.endswith(_CONTRACT) and layer not in contracts:
                raise LayerError(layer=layer, rule="is not in its file's header metadata", fix="write the file again")
        return {layer: _stored(layer, contract, checkpoint.tensors) for layer, contract in contracts.items()}


def _recorded(checkpoint: Checkpoint) -> dict[str, Contract]:
    """The contracts of all headers; config.json, where there is one, must name the same."""
    contracts: dict[str, Contract] = {}
    for file in checkpoint.files:
        if file.path not in checkpoint.records:
            raise CheckpointError(
                path=file.path,
                rule=f"its header metadata {METADATA_KEY!r} is missing: without it nothing says how the codes of "
                f"{_first_layer(file.tensors)!r} are rotated",
                fix="use the original file; other programs drop metadata when they save",
            )
        contracts |= checkpoint.records[file.path].layers
    config = (checkpoint.config or {}).get("quantization_config")
    if isinstance(config, dict) and config.get("quant_method") == METADATA_KEY and checkpoint.folder is not None:
        path = checkpoint.folder / "config.json"
        said = Record.from_dict({k: v for k, v in config.items() if k != "quant_method"}, path).layers
        for layer in sorted(said.keys() ^ contracts.keys()):
            where = "the weight files" if layer in said else "config.json"
            raise LayerError(layer=layer, rule=f"is missing from {where}", fix="copy the checkpoint again, completely")
        for layer, contract in contracts.items():
            contract.check_same(said[layer], layer)
    return contracts


def _first_layer(tensors: dict[str, StoredTensor]) -> str:
    return min((n.rpartition(".")[0] for n in tensors if n.endswith((_CONTRACT, ".codes"))), default="its layers")


def _stored(layer: str, contract: Contract, tensors: dict[str, StoredTensor]) -> StoredLayer:
    """A layer's tensors, all there and none too many, in the shapes and dtypes of its contract."""

    def refuse(rule: str) -> LayerError:
        return LayerError(layer=layer, rule=rule, fix="the checkpoint is damaged; copy or write it again")

    try:
        expected = _expected(contract)
    except ValueError as error:
        raise refuse(f"its contract cannot be: {error}") from error
    parameters: dict[str, StoredTensor] = {}
    for name, (dtype, shape) in expected.items():
        stored = tensors.get(f"{layer}.{name}")
        if stored is None:
            if name == "input_global_scale":
                continue
            raise refuse(f"its {name} is missing")
        if (stored.torch_dtype, stored.shape) != (dtype, shape):
            raise refuse(f"its {name} is {stored.dtype} {list(stored.shape)}, its contract needs {dtype} {list(shape)}")
        parameters[name] = stored
    stored = tensors.get(layer + _CONTRACT)
    if stored is None:
        raise refuse("its contract tensor is missing")
    contract.check_same(Contract.from_tensor(stored.read(), layer), layer)
    for name in ("weight", "global_scale", "input_global_scale", "signs", "matrix"):
        if f"{layer}.{name}" in tensors and name not in parameters:
            raise refuse(f"it has a {name}, which its contract does not")
    keys = frozenset(f"{layer}.{name}" for name in (*parameters, "contract"))
    return StoredLayer(contract=contract, parameters=parameters, keys=keys)


def _expected(contract: Contract) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of each parameter that a contract needs; input_global_scale may be absent."""
    f = get_format(contract.format)
    kind, _, group = contract.rotation.partition(":")
    g = int(group) if kind == "matrix" else parse(contract.rotation).group
    float32: dict[str, tuple[int, ...]] = {}
    if f.has_global_scale:
        float32["global_scale"] = ()
    if f.has_global_scale and contract.activations == "coded":
        float32["input_global_scale"] = ()
    if contract.signs:
        float32["signs"] = (g,)
    if kind == "matrix":
        float32["matrix"] = (g, g)
    return {
        "codes": (f.element.codes_dtype, f.codes_shape(contract.shape)),
        "scales": (f.scale.dtype, f.scales_shape(contract.shape)),
        **{name: (torch.float32, shape) for name, shape in float32.items()},
    }


LAYOUT = _Native()
