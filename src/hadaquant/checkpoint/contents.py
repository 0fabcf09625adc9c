"""What a checkpoint holds, from its headers alone."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hadaquant.checkpoint.layouts import layout_of
from hadaquant.checkpoint.source import Checkpoint


@dataclass(frozen=True, kw_only=True)
class LayerContents:
    """One quantized layer. ``bits`` is per element of the weight, scales and all."""

    name: str
    shape: tuple[int, int]
    format: str
    rotation: str
    activations: str
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits for each element of the weight."""
        return 8 * self.nbytes / max(1, self.shape[0] * self.shape[1])


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Tensors that are not quantized, of one dtype and shape, whose names differ in numbers only."""

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds. ``layout`` and ``made`` are None where nothing is quantized or said."""

    path: str
    files: int
    file_bytes: int
    layout: str | None
    made: dict[str, str]
    layers: list[LayerContents]
    rest: list[TensorGroup]


def describe(path: str | os.PathLike[str], rotation: str | None = None) -> Contents:
    """What a file or folder holds, quantized or not. Reads headers, and the contract of each layer.

    ``rotation`` is for the HyperFlow layout, which does not say it.

    Raises:
        CheckpointError, LayerError: it cannot be read, or is damaged.
    """
    checkpoint = Checkpoint.open(path)
    layout = layout_of(checkpoint)
    stored = layout.layers(checkpoint, rotation) if layout is not None else {}
    layers = [
        LayerContents(
            name=name,
            shape=s.contract.shape,
            format=s.contract.format,
            rotation=s.contract.rotation + ("+signs" if s.contract.signs else ""),
            activations=s.contract.activations,
            nbytes=s.nbytes,
        )
        for name, s in sorted(stored.items(), key=lambda item: _natural(item[0]))
    ]
    inside = frozenset[str]().union(*(s.keys for s in stored.values()))
    groups: dict[tuple[str, str, tuple[int, ...]], TensorGroup] = {}
    for name, tensor in checkpoint.tensors.items():
        if name in inside:
            continue
        key = (number_free(name), tensor.dtype, tensor.shape)
        before = groups.get(key)
        groups[key] = TensorGroup(
            pattern=key[0],
            dtype=key[1],
            shape=key[2],
            count=1 + (before.count if before else 0),
            nbytes=tensor.nbytes + (before.nbytes if before else 0),
        )
    return Contents(
        path=os.fspath(path),
        files=len(checkpoint.files),
        file_bytes=checkpoint.nbytes,
        layout=layout.name if layout is not None else None,
        made=_made(checkpoint),
        layers=layers,
        rest=list(groups.values()),
    )


def number_free(name: str) -> str:
    """A name with its numbers replaced, so that the same layer of every block has the same one.

    >>> number_free("model.layers.10.mlp.up_proj")
    'model.layers.*.mlp.up_proj'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _natural(name: str) -> list[tuple[int, str]]:
    """What to sort names by, so that block 2 comes before block 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _made(checkpoint: Checkpoint) -> dict[str, str]:
    """Who wrote it, and how, as the record says."""
    record = next(iter(checkpoint.records.values()), None)
    if record is None:
        return {}
    said = {
        "written by": f"hadaquant {record.tool}, file layout version {record.version}",
        "source": record.source,
        "asked for": record.format and f"{record.format}, rotation {record.rotation}",
        "skip": None if record.skip is None else ", ".join(record.skip) or "nothing",
        "calibration": None if record.calibration is None else str(record.calibration),
    }
    return {key: value for key, value in said.items() if value is not None}
