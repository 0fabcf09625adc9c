"""Reads a quantized checkpoint into a model, which stays as it was until everything has been read."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hadaquant.checkpoint import hf
from hadaquant.checkpoint.files import StoredTensor
from hadaquant.checkpoint.layouts import StoredLayer, layout_of
from hadaquant.checkpoint.record import Origin
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.contract import Contract
from hadaquant.errors import CheckpointError, HadaquantError, LayerError
from hadaquant.nn.linear import RotatedLinear, why_not
from hadaquant.ops.checks import check_global_number
from hadaquant.rotation import Rotation

_CPU = torch.device("cpu")


def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    rotation: str | None = None,
) -> nn.Module:
    """Load a quantized checkpoint.

    Args:
        path: a folder or a .safetensors file, in the native, ComfyUI or HyperFlow layout.
        model: the unquantized model, whose linears named in the checkpoint are replaced in place; or one
            quantized in the same way. Left out, the transformers model that config.json names is built.
        device: where to put everything; left out, where the given model is, or the CPU.
        dtype: of all floating tensors but scales and rotations; left out, the given model's, or as stored.
        rotation: for the HyperFlow layout alone, which does not say it: ``"regular:256"``.

    Returns:
        The model, tied tensors tied again; it knows the folder for :func:`save`. A model that was built is in eval
        mode.

    Raises:
        CheckpointError: nothing quantized there, damaged, from a future version, or no config.json.
        LayerError: a layer that is damaged or has no counterpart, or tensors too few or too many.
    """
    checkpoint = Checkpoint.open(path)
    layout = layout_of(checkpoint)
    if layout is None:
        raise CheckpointError(path=path, rule="holds nothing quantized", fix="quantize it with 'hadaquant quantize'")
    stored = layout.layers(checkpoint, rotation)
    built = model is None
    if model is None:
        model = hf.build(checkpoint.folder or checkpoint.path, checkpoint.config, dtype)
    names = _names(model, checkpoint, stored)
    layers, state = _read_layers(model, stored, names, dtype)
    expected = _expected(model, layers)
    tied = _tied(expected, checkpoint, names)
    plain = _plain(model, checkpoint, names, expected)
    _check_names(expected, state.keys() | plain.keys(), tied)
    state |= {name: tensor.read() for name, tensor in plain.items()}

    for name, tensor in state.items():
        owner = layers.get(name.rpartition(".")[0])
        target = expected[name]
        wanted = dtype or (None if built else target.dtype)
        if not tensor.is_floating_point() or (owner is not None and not name.endswith(".bias")):
            wanted = None  # codes, scales and rotations keep their dtype
        home = owner.nominal.device if owner is not None else target.device
        state[name] = tensor.to(device or (_CPU if home.type == "meta" else home), wanted or tensor.dtype)

    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    for alias, name in tied.items():
        if name not in state and alias in state:
            state[name] = state.pop(alias)
    model.load_state_dict(state, strict=False, assign=True)
    for alias, name in tied.items():
        _put(model, alias, _get(model, name))
    _check_data(model)
    record = next(iter(checkpoint.records.values()), None)
    folder = None if checkpoint.folder is None else checkpoint.folder.resolve()
    calibration = None if record is None else record.calibration
    origin = Origin(folder=folder, files=tuple(checkpoint.other_files()[0]), calibration=calibration)
    setattr(model, Origin.KEY, origin)
    return model if device is None else model.to(device)


def _names(model: nn.Module, checkpoint: Checkpoint, stored: dict[str, StoredLayer]) -> dict[str, str]:
    """The model's name of each layer and of each tensor that is no part of one."""
    keys = frozenset[str]().union(*(layer.keys for layer in stored.values()))
    tensors = [name for name in checkpoint.tensors if name not in keys]
    if any(record.source is None for record in checkpoint.records.values()):  # saved under the model's own names
        return {name: name for name in (*tensors, *stored)}
    found = hf.model_names(model, [*tensors, *(f"{layer}.weight" for layer in stored)])
    for name, target in found.items():
        if target is None:
            raise CheckpointError(
                path=checkpoint.path,
                rule=f"{type(model).__name__} computes its parameters from {name!r} and others, which is not done here",
                fix="load the original into a model, use hq.quantize_ on it, then hq.save",
            )
    names = {name: str(found[name]) for name in tensors}
    return names | {layer: str(found[f"{layer}.weight"]).removesuffix(".weight") for layer in stored}


def _read_layers(
    model: nn.Module, stored: dict[str, StoredLayer], names: dict[str, str], dtype: torch.dtype | None
) -> tuple[dict[str, RotatedLinear], dict[str, Tensor]]:
    """The layers to put into the model, still empty, by their name there; and their tensors."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers: dict[str, RotatedLinear] = {}
    state: dict[str, Tensor] = {}
    for layer, s in stored.items():
        name = names[layer]
        tensors = s.read()
        layers[name] = _new_layer(modules.get(name), name, s.contract, tensors, dtype)
        state |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        state[f"{name}.contract"] = s.contract.to_tensor()
    # a module with two names stays one module
    shared = {id(modules[name]): layer for name, layer in layers.items()}
    return {name: shared[id(module)] for name, module in modules.items() if id(module) in shared}, state


def _new_layer(
    module: nn.Module | None, name: str, contract: Contract, tensors: dict[str, Tensor], dtype: torch.dtype | None
) -> RotatedLinear:
    """The layer that takes a module's place: an empty one, or the module if it is one already."""

    def refuse(rule: str, fix: str) -> LayerError:
        return LayerError(layer=name, rule=rule, fix=fix)

    if module is None:
        raise refuse("is in the checkpoint but not in the model", "give the model that the checkpoint was made of")
    kind, _, group = contract.rotation.partition(":")
    try:
        rotation = Rotation(kind, int(group or 1), tensors.get("signs"), tensors.get("matrix"))  # type: ignore[arg-type]
        for key in ("global_scale", "input_global_scale"):
            if key in tensors:
                check_global_number(tensors[key].item())
    except HadaquantError as error:
        raise refuse(f"is damaged: {error}", "copy or write the checkpoint again") from error
    if isinstance(module, RotatedLinear):
        Contract.from_tensor(module.contract, name).check_same(contract, name)
        return module
    reason = why_not(module)
    if reason is not None or not isinstance(module, nn.Linear):
        raise refuse(f"cannot be replaced in the model: {reason}", "give the unquantized model")
    if (module.out_features, module.in_features) != contract.shape:
        found = [module.out_features, module.in_features]
        raise refuse(f"has shape {list(contract.shape)}, in the model {found}", "give the model it was made of")
    layer = RotatedLinear(
        module.in_features,
        module.out_features,
        contract.format,
        rotation,
        bias=module.bias is not None,
        input_global_scale=tensors["input_global_scale"].item() if "input_global_scale" in tensors else None,
        activations=contract.activations,
        device="meta",
        dtype=dtype or module.weight.dtype,
    )
    home = _CPU if module.weight.is_meta else module.weight.device
    layer.nominal = torch.empty(0, dtype=layer.nominal.dtype, device=home)
    return layer.train(module.training)


def _expected(model: nn.Module, layers: dict[str, RotatedLinear]) -> dict[str, Tensor]:
    """What the model's state_dict will hold once the layers are in."""
    replaced = {f"{name}.{key}" for name in layers for key in ("weight", "bias")}
    expected = {name: t for name, t in model.state_dict(keep_vars=True).items() if name not in replaced}
    for name, layer in layers.items():
        expected |= {f"{name}.{key}": t for key, t in layer.state_dict(keep_vars=True).items()}
    return expected


def _tied(expected: dict[str, Tensor], checkpoint: Checkpoint, names: dict[str, str]) -> dict[str, str]:
    """Names that are to share the tensor of another name: as in the model, and as the checkpoint says."""
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in expected.items():
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
    for record in checkpoint.records.values():
        said = {names.get(alias, alias): names.get(name, name) for alias, name in record.tied.items()}
        tied |= {alias: name for alias, name in said.items() if alias not in tied and tied.get(name) != alias}
    return tied


def _plain(
    model: nn.Module,
    checkpoint: Checkpoint,
    names: dict[str, str],
    expected: dict[str, Tensor],
) -> dict[str, StoredTensor]:
    """The tensors to read that are no part of a layer, by their name in the model."""
    aliases = {alias for record in checkpoint.records.values() for alias in record.tied}
    plain: dict[str, StoredTensor] = {}
    for key, tensor in checkpoint.tensors.items():
        name = names.get(key)
        if name is None or key in aliases or (name not in expected and hf.is_ignored(model, name)):
            continue
        plain[name] = tensor
        if name in expected and tuple(expected[name].shape) != tensor.shape:
            found = f"has shape {list(tensor.shape)}, in the model {list(expected[name].shape)}"
            raise LayerError(layer=name, rule=found, fix="give the model that the checkpoint was made of")
    return plain


def _check_names(expected: Iterable[str], given: set[str], tied: dict[str, str]) -> None:
    """Refuse tensors that the model has not, and a model that would keep some of its own."""
    present = {tied.get(name, name) for name in given}
    missing = sorted(name for name in expected if tied.get(name, name) not in present)
    for names, where in (
        (sorted(given - set(expected)), "in the checkpoint but not in the model"),
        (missing, "in the model but not in the checkpoint"),
    ):
        if names:
            rest = f", and so are {', '.join(names[1:6])}" + (", …" if len(names) > 6 else "") if names[1:] else ""
            fix = "give the model that the checkpoint was made of"
            raise LayerError(layer=names[0], rule=f"is {where}{rest} ({len(names)} in all)", fix=fix)


def _get(model: nn.Module, name: str) -> Tensor | None:
    parent, _, key = name.rpartition(".")
    return getattr(model.get_submodule(parent), key)


def _put(model: nn.Module, name: str, tensor: Tensor | None) -> None:
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, tensor)


def _check_data(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise LayerError(
                layer=name, rule="is on the meta device, and no checkpoint stores it", fix="build the model on a device"
            )
