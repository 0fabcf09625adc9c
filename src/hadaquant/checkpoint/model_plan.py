"""A plan: which format and rotation each linear of one model gets. A readable JSON file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hadaquant._version import __version__
from hadaquant.checkpoint.source import Checkpoint, write_json
from hadaquant.errors import HadaquantError, PlanError
from hadaquant.formats import Format, get_format
from hadaquant.rotation import Rotation, parse

#: Version of the file's own fields. A reader refuses another one.
PLAN_VERSION = 1
_SIGNED = "+signs"
#: What a fingerprint starts with. Plans of before looked at some bytes of each tensor only.
_HASH, _SAMPLED = "blake2b:", "sha256:"


class Choice(NamedTuple):
    """What one linear gets."""

    format: Format
    rotation: Rotation


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """A choice for each linear of a model that is to be quantized.

    Attributes:
        model: name of the model, for people.
        fingerprint: of the model's weights; see :func:`fingerprint`.
        layers: by the layer's name in the checkpoint.
        kept: why each other layer that was looked at stays as it is.
        about: how the plan was found: settings, measured figures, versions. Never read back.
    """

    model: str
    fingerprint: str
    layers: Mapping[str, Choice]
    kept: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def check_activations(self, activations: str) -> None:
        """Refuse full activations: what a plan rests on was measured with coded ones.

        Raises:
            PlanError.
        """
        if activations != "coded":
            rule = f"its choices were measured with coded activations, and {activations!r} are asked for"
            fix = "leave activations out, or give a format and a rotation instead of the plan"
            raise PlanError(plan=f"the plan for {self.model}", rule=rule, fix=fix)

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint that the plan was not made for.

        Raises:
            PlanError: a layer is missing, or the weights are others, or cannot be told from others.
        """
        missing = [name for name in self.layers if f"{name}.weight" not in checkpoint.tensors]
        if missing:
            rule = f"it names {missing[0]!r}, which {checkpoint.path} does not hold"
        elif self.fingerprint.startswith(_SAMPLED):
            rule = "it is of an older version, whose fingerprint saw only a part of the weights"
        elif fingerprint(checkpoint) != self.fingerprint:
            rule = f"the weights of {checkpoint.path} are not those it was made for, though their names are"
        else:
            return
        raise PlanError(plan=f"the plan for {self.model}", rule=rule, fix="study this model and use its own plan")

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        rotations = [choice.rotation for choice in self.layers.values()]
        signs = {str(r.group): _text(r.signs) for r in rotations if r.signs is not None}
        content = {
            "plan": PLAN_VERSION,
            "hadaquant": __version__,
            "model": self.model,
            "fingerprint": self.fingerprint,
            **self.about,
            "signs": signs,
            "layers": {name: f"{c.format.name} {c.rotation}" for name, c in self.layers.items()},
            "kept": dict(self.kept),
        }
        write_json(path, content)

    @classmethod
    def read(cls, path: str | Path) -> ModelPlan:
        """Inverse of :meth:`write`, but for ``about``.

        Raises:
            PlanError: no such file, or not a plan of this version.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(plan=path, rule=f"cannot be read ({error})", fix="give a plan.json of a study") from error
        if not isinstance(content, dict) or content.get("plan") != PLAN_VERSION:
            rule = f"is no plan of version {PLAN_VERSION}, which is what this library reads"
            raise PlanError(plan=path, rule=rule, fix="study the model again, or upgrade hadaquant")
        try:
            signs = {int(group): _signs(text) for group, text in content["signs"].items()}
            layers = {name: _choice(text, signs) for name, text in content["layers"].items()}
            model, weights, kept = str(content["model"]), str(content["fingerprint"]), dict(content["kept"])
            return cls(model=model, fingerprint=weights, layers=layers, kept=kept)
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            rule = str(error) if isinstance(error, HadaquantError) else f"is damaged: {error!r}"
            raise PlanError(plan=path, rule=rule, fix="study the model again") from error


def _choice(text: str, signs: Mapping[int, Tensor]) -> Choice:
    format, _, rotation = text.partition(" ")
    r = parse(rotation.removesuffix(_SIGNED))
    return Choice(get_format(format), parse(r.spec, signs[r.group]) if rotation.endswith(_SIGNED) else r)


def _text(signs: Tensor) -> str:
    return "".join("+" if sign > 0 else "-" for sign in signs.tolist())


def _signs(text: str) -> Tensor:
    return torch.tensor([{"+": 1.0, "-": -1.0}[sign] for sign in text])


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash that tells a model's weights from any others: names, dtypes, shapes and all bytes of each tensor.

    Independent of how the weights are spread over files. Reads them all once, in pieces.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, stored in sorted(checkpoint.tensors.items()):
        found.update(json.dumps([name, stored.dtype, stored.shape]).encode())
        for piece in stored.pieces():
            found.update(piece)
    return _HASH + found.hexdigest()
