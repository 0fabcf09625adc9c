"""Which tensors of a checkpoint are the weights of plain linears, and why the others are not."""

from __future__ import annotations

import re

from torch import nn

from hadaquant.checkpoint import hf
from hadaquant.checkpoint.files import StoredTensor
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.errors import CheckpointError, MissingExtra
from hadaquant.nn.convert import READ_WEIGHTS_THEMSELVES

#: A part of a name that starts or ends like this is not a linear, or too sensitive to be taken for one
#: by its name alone.
_NOT_A_LINEAR = re.compile(
    r"emb(ed|edder|edding|eddings|eds)?$|^emb|^(wte|wpe|ln|gn|bn)(_|$|\d)|_ln$|norm|^pos(_|$)|position|"
    r"relative_attention_bias|^shared$|codebook|lora|conv"
)
#: GPT-2's Conv1D keeps its weights as [in, out] under these names.
_CONV1D = frozenset(("c_attn", "c_fc", "c_proj", "q_attn"))


def find_linears(checkpoint: Checkpoint) -> tuple[dict[str, str | None], str]:
    """For each tensor None if it is the weight of a plain linear, else why not; and how this was found.

    The model of config.json decides where transformers can build it. Else names and shapes do: a linear
    is a floating ``<name>.weight`` with two dimensions, of which no part is called like an embedding, a
    norm, a position, a convolution or GPT-2's Conv1D.
    """
    if checkpoint.folder is not None and checkpoint.config is not None:
        try:
            model = hf.build(checkpoint.folder, checkpoint.config)
        except (CheckpointError, MissingExtra) as error:
            why = str(error.fields.get("rule", error))
        else:
            return _by_model(checkpoint, model), f"the nn.Linear modules of {type(model).__name__}"
    else:
        why = "there is no config.json"
    return {name: _by_name(t, checkpoint.tensors) for name, t in checkpoint.tensors.items()}, f"names, because {why}"


def _by_model(checkpoint: Checkpoint, model: nn.Module) -> dict[str, str | None]:
    modules, state = dict(model.named_modules(remove_duplicate=False)), model.state_dict()
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)

    def why_not(stored: StoredTensor, target: str | None) -> str | None:
        if target is None:
            return "transformers rebuilds it when it loads the model"
        if target not in state:
            return f"{type(model).__name__} has no such parameter"
        parent, _, attribute = target.rpartition(".")
        module = modules[parent]
        if type(module) is not nn.Linear or attribute != "weight":
            name = type(module).__name__
            article = "an" if name[0] in "AEIOU" else "a"
            return f"the {attribute} of {article} {name}, not the weight of an nn.Linear"
        others = [name for name in names_of[id(module.weight)] if name != target]
        if others:
            return f"tied to {', '.join(others)}"
        reader = modules[parent.rpartition(".")[0]]
        if isinstance(reader, READ_WEIGHTS_THEMSELVES):
            return f"its parent {type(reader).__name__} reads the weight itself"
        if tuple(state[target].shape) != stored.shape:
            return f"its shape {list(stored.shape)} is not the model's, {list(state[target].shape)}"
        return _not_floating(stored)

    targets = hf.model_names(model, checkpoint.tensors)
    return {name: why_not(stored, targets[name]) for name, stored in checkpoint.tensors.items()}


def _by_name(stored: StoredTensor, tensors: dict[str, StoredTensor]) -> str | None:
    layer, _, attribute = stored.name.rpartition(".")
    if attribute != "weight" or not layer:
        return "not named <layer>.weight"
    if len(stored.shape) != 2:
        return f"{len(stored.shape)} dimensions, a linear has two"
    for part in layer.split("."):
        if _NOT_A_LINEAR.search(part.lower()):
            return f"named like an embedding, norm, position or convolution: {part!r}"
        if part in _CONV1D:
            return f"{part!r} may be a transposed Conv1D"
    bias = tensors.get(f"{layer}.bias")
    if bias is not None and bias.shape != stored.shape[:1]:
        return f"its bias has shape {list(bias.shape)}, not [{stored.shape[0]}]"
    return _not_floating(stored)


def _not_floating(stored: StoredTensor) -> str | None:
    return None if stored.is_floating else f"dtype {stored.dtype}"
