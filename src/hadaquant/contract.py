"""What a stored layer is: format, rotation and shape, as text that travels with the codes.

Codes without their contract are noise, and codes read under another rotation are silently wrong.
So every layer carries this as a uint8 tensor of JSON, and every reader compares.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from hadaquant.errors import LayerError, UnknownChoice
from hadaquant.formats import FORMATS, Format, get_format
from hadaquant.rotation import Rotation

#: Version of the contract's own fields. A reader refuses a newer one.
CONTRACT_VERSION = 1

#: What becomes of a layer's rotated inputs: ``coded`` in the weight's format, or ``full``, rounded to bfloat16.
ACTIVATIONS = ("coded", "full")


def check_activations(activations: str) -> str:
    """The choice, if it is one.

    Raises:
        UnknownChoice: it is none of ``ACTIVATIONS``.
    """
    if activations not in ACTIVATIONS:
        raise UnknownChoice(what="activations", value=activations, choices=", ".join(ACTIVATIONS))
    return activations


@dataclass(frozen=True, kw_only=True)
class Contract:
    """One layer's contract.

    ``rotation`` is a spec such as ``regular:256``; ``signs`` says that a [group] tensor of signs
    belongs to it (a ``matrix`` always has its tensor). ``activations`` is one of :data:`ACTIVATIONS`; only
    ``full`` is written, so that what has been stored without it still is, byte for byte, what is written now.
    """

    format: str
    format_version: int
    rotation: str
    signs: bool
    shape: tuple[int, int]
    activations: str = "coded"
    version: int = CONTRACT_VERSION

    @classmethod
    def of(cls, format: Format, rotation: Rotation, shape: tuple[int, int], activations: str = "coded") -> Contract:
        """The contract of a weight [N, K] in a format and rotation."""
        return cls(
            format=format.name,
            format_version=format.version,
            rotation=rotation.spec,
            signs=rotation.signs is not None,
            shape=shape,
            activations=activations,
        )

    @classmethod
    def from_dict(cls, fields: object, layer: str) -> Contract:
        """Read fields, refusing what this version does not know.

        Raises:
            LayerError: a field is missing or unknown, or a version is newer than this library's.
        """
        names = set(cls.__dataclass_fields__)
        found = fields if isinstance(fields, dict) else {}
        version = found.get("version", CONTRACT_VERSION)
        if version != CONTRACT_VERSION:
            raise LayerError(
                layer=layer,
                rule=f"its contract has version {version}, this library reads {CONTRACT_VERSION}",
                fix="upgrade hadaquant",
            )
        if set(found) | {"activations"} != names:
            raise LayerError(
                layer=layer,
                rule=f"its contract has fields {sorted(found)}, not {sorted(names - {'activations'})}",
                fix="the file is damaged or of another version; write it again",
            )
        contract = cls(**{**found, "shape": tuple(found["shape"])})
        if contract.format not in FORMATS:
            raise LayerError(
                layer=layer,
                rule=f"its format {contract.format!r} is unknown here (known: {', '.join(sorted(FORMATS))})",
                fix="upgrade hadaquant",
            )
        if contract.activations not in ACTIVATIONS:
            raise LayerError(
                layer=layer,
                rule=f"its activations {contract.activations!r} are unknown here (known: {', '.join(ACTIVATIONS)})",
                fix="upgrade hadaquant",
            )
        known = get_format(contract.format).version
        if contract.format_version != known:
            raise LayerError(
                layer=layer,
                rule=f"format {contract.format!r} has version {contract.format_version}, this library reads {known}",
                fix="use the hadaquant version that wrote it, or quantize again",
            )
        return contract

    def to_dict(self) -> dict[str, object]:
        """Fields for JSON."""
        fields = {**asdict(self), "shape": list(self.shape)}
        if self.activations == "coded":
            del fields["activations"]
        return fields

    def to_tensor(self) -> Tensor:
        """uint8 JSON, the same bytes for equal contracts."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: Tensor, layer: str) -> Contract:
        """Inverse of :meth:`to_tensor`.

        Raises:
            LayerError: not a contract this version reads.
        """
        try:
            fields = json.loads(bytes(tensor.cpu().tolist()))
        except (TypeError, ValueError):  # not bytes, not JSON
            fields = None
        return cls.from_dict(fields, layer)

    def check_same(self, stored: Contract, layer: str) -> None:
        """Refuse a stored contract that differs from this one.

        Raises:
            LayerError: naming the layer and each differing field.
        """
        mine, theirs = ({**c.to_dict(), "activations": c.activations} for c in (self, stored))
        differing = [f"{k}: stored {theirs[k]!r}, expected {mine[k]!r}" for k in mine if mine[k] != theirs[k]]
        if differing:
            raise LayerError(layer=layer, rule="; ".join(differing), fix="convert with the stored format and rotation")
