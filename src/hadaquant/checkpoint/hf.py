"""The model that a config.json of transformers describes, built without memory for its weights."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hadaquant.errors import CheckpointError, MissingExtra


def build(folder: Path, config: dict[str, Any] | None, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of ``folder/config.json``: parameters on the meta device, buffers computed.

    Code that comes with a checkpoint is never run.

    Raises:
        MissingExtra: transformers is not installed.
        CheckpointError: no config.json, or transformers does not know or cannot build its model.
    """

    def refuse(rule: str) -> CheckpointError:
        return CheckpointError(path=folder, rule=rule, fix="give the model: hq.load(path, model=...)")

    if config is None:
        raise refuse("holds no config.json that would say what model this is")
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtra(what="building a model from its config.json", package="transformers", extra="models")
    import transformers

    name = next(iter(config.get("architectures") or ()), None)
    model_class = getattr(transformers, str(name), None)
    if config.get("model_type") not in transformers.CONFIG_MAPPING or model_class is None:
        known = f"model_type {config.get('model_type')!r}, architecture {name!r}"
        raise refuse(f"transformers {transformers.__version__} does not know the model of its config.json ({known})")
    try:
        settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # ours says how the files are written; to transformers it would be a method it does not know
        settings.__dict__.pop("quantization_config", None)
        with _parameters_on_meta():
            model = model_class._from_config(settings, dtype=dtype or settings.dtype)
        if (folder / "generation_config.json").exists() and model.can_generate():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, TypeError, AttributeError, ImportError, RuntimeError, OSError) as error:
        raise refuse(f"transformers cannot build {name} from its config.json ({error})") from error
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters of modules that are built inside get no memory. Buffers do, because nothing stores them all."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def model_names(model: nn.Module, names: Iterable[str]) -> dict[str, str | None]:
    """Where each tensor of a checkpoint goes in a model of transformers: its name there.

    None for a tensor that transformers computes with when it loads (merging experts, for one), so
    that it is not a parameter as it is. A model that is not of transformers uses the names as they are.
    """
    if not hasattr(model, "base_model_prefix"):
        return {name: name for name in names}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    prefix, state = str(model.base_model_prefix), model.state_dict()
    found: dict[str, str | None] = {}
    for name in names:
        target, conversion = rename_source_key(name, renamings, converters, prefix, state)
        found[name] = target if conversion is None else None
    return found


def is_ignored(model: nn.Module, name: str) -> bool:
    """Whether a model of transformers says that it does not need a tensor that old checkpoints hold."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
