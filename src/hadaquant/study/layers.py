"""The error of one linear's output under each format and rotation, in the library's own arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hadaquant.formats import Format, get_format
from hadaquant.ops import quantize, rotate, scaled_mm
from hadaquant.rotation import Rotation
from hadaquant.study.bootstrap import interval, resampled_sums
from hadaquant.study.metrics import MARGIN_DB, Helps
from hadaquant.study.outliers import Spread
from hadaquant.study.rotations import fitted

#: What no noise at all is called.
MOST_DB = 200.0
_LEAST = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One linear in one format under one rotation.

    Decibels are of signal over noise of the output, 10·log10(Σy² / Σ(ŷ − y)²), y the exact output and ŷ what the
    quantized linear gives, over the sampled rows.

    Attributes:
        format: its name.
        rotation: the one that was measured, whose group divides K.
        asked: the rotations asked for that it stands for: of two with too large a group, both may end at one.
        bits: that the stored weight takes an element, scales included.
        db: over all output channels.
        quiet_db: over the quieter half of them, whose errors the loud ones hide.
        weights_db, inputs_db: with only the weights, or only the inputs, quantized.
        gain_db: db less that of the same format without rotation; 0 there.
        low_db, high_db: interval of the gain, a bootstrap over rows, wide enough for all rotations of the format.
    """

    format: str
    rotation: str
    asked: tuple[str, ...]
    bits: float
    db: float
    quiet_db: float
    weights_db: float
    inputs_db: float
    gain_db: float = 0.0
    low_db: float = 0.0
    high_db: float = 0.0

    @property
    def noise(self) -> float:
        """Noise over signal."""
        return 10 ** (-self.db / 10)

    @property
    def helps(self) -> Helps:
        """Whether the rotation helps: by more than :data:`MARGIN_DB`, the whole interval on one side of zero."""
        if self.gain_db > MARGIN_DB and self.low_db > 0:
            return "yes"
        return "no" if self.gain_db < -MARGIN_DB and self.high_db < 0 else "no difference"


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """What was measured of one linear.

    Attributes:
        name, shape: of the layer, [N, K].
        reads: the first of the layers that read the same tensor; itself, if it is that.
        tokens, nonfinite: rows that were seen, and those of them that hold NaN or Inf, which are left out.
        ratio: largest over median channel, by each channel's largest magnitude in all finite rows that were seen.
        rows: of the sample that the errors are over.
        inputs: the sample's outliers by rotation, ``none`` first.
        cells: in the order asked for; a rotation or format that fits no group or block of this K is absent.
        notes: why, by format.
        skipped: why nothing was measured, or nothing.
    """

    name: str
    shape: tuple[int, int]
    reads: str
    tokens: int = 0
    nonfinite: int = 0
    ratio: float = 0.0
    rows: int = 0
    inputs: dict[str, Spread] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    skipped: str = ""

    @property
    def formats(self) -> list[str]:
        """Formats that were measured."""
        return list(dict.fromkeys(cell.format for cell in self.cells))

    def of(self, format: str) -> list[Cell]:
        """The cells of a format, without rotation first."""
        return [cell for cell in self.cells if cell.format == format]

    def under(self, format: str, asked: str) -> Cell | None:
        """The cell of a format that stands for a rotation that was asked for; None where that fits no group."""
        return next((cell for cell in self.of(format) if asked in cell.asked), None)

    def best(self, format: str) -> Cell | None:
        """The cell of the rotation that errs least, also where none helps; None where none was measured."""
        return max((c for c in self.of(format) if c.rotation != "none"), key=lambda c: c.db, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> LayerResult:
        """Inverse of :meth:`to_dict`."""
        inputs = {name: Spread(**{**s, "profile": tuple(s["profile"])}) for name, s in fields["inputs"].items()}
        cells = tuple(Cell(**{**cell, "asked": tuple(cell["asked"])}) for cell in fields["cells"])
        return cls(**{**fields, "shape": tuple(fields["shape"]), "inputs": inputs, "cells": cells})


def measure(
    name: str, x: Tensor, weight: Tensor, formats: Sequence[str], rotations: Sequence[str], **fields: Any
) -> LayerResult:
    """Measure a linear on sampled inputs.

    Args:
        x: [rows, K], finite.
        weight: [N, K]; the bias makes no difference.
        formats: names.
        rotations: specs as in :mod:`hadaquant.study.rotations`. ``none`` is measured in any case.
        fields: of the result: ``reads``, ``tokens``, ``nonfinite``, ``ratio``.
    """
    n, k = weight.shape
    result = LayerResult(name=name, shape=(n, k), rows=x.shape[0], **fields)
    if not torch.isfinite(weight).all():
        return replace(result, skipped="its weight holds NaN or Inf")
    exact = x.to(torch.float64) @ weight.to(torch.float64).T
    if not exact.any():
        return replace(result, skipped="its outputs are all zero")
    quiet = exact.square().sum(0).argsort()[: max(1, n // 2)]
    inputs: dict[str, Spread] = {}
    cells: list[Cell] = []
    notes: dict[str, str] = {}
    for f in map(get_format, formats):
        of_format: list[tuple[Cell, Tensor]] = []
        for rotation, asked in _fitting(f, rotations, k, notes):
            if str(rotation) not in inputs:
                inputs[str(rotation)] = Spread.of(rotate(x.float(), rotation))
            of_format.append(_cell(x, weight, f, rotation, asked, exact, quiet))
        cells += _with_gains(of_format)
    skipped = "" if cells else "; ".join(notes.values())
    return replace(result, inputs=inputs, cells=tuple(cells), notes=notes, skipped=skipped)


def _fitting(
    f: Format, rotations: Sequence[str], k: int, notes: dict[str, str]
) -> list[tuple[Rotation, tuple[str, ...]]]:
    """Each rotation that fits K, once, with what it stands for; ``none`` first."""
    found: list[tuple[Rotation, tuple[str, ...]]] = []
    for asked in dict.fromkeys(("none", *rotations)):
        rotation, note = fitted(asked, f, k)
        if rotation is None:
            notes[f.name] = note
            continue
        known = next((i for i, (other, _) in enumerate(found) if other == rotation), None)
        if known is None:
            found.append((rotation, (asked,)))
        else:
            found[known] = rotation, (*found[known][1], asked)
    return found


def _cell(
    x: Tensor, weight: Tensor, f: Format, rotation: Rotation, asked: tuple[str, ...], exact: Tensor, quiet: Tensor
) -> tuple[Cell, Tensor]:
    """The cell, gain left out, and its noise by row, float64 [rows]."""
    rotation = rotation.to(x.device)
    qx, qw = quantize(x, f, rotation=rotation), quantize(weight, f, rotation=rotation)
    noise = (scaled_mm(qx, qw, out_dtype=torch.float32) - exact).square()

    def db(noise: Tensor, signal: Tensor = exact) -> float:
        return min(-10 * math.log10((noise.sum() / signal.square().sum()).clamp_min(_LEAST)), MOST_DB)

    cell = Cell(
        format=f.name,
        rotation=str(rotation),
        asked=asked,
        bits=8 * f.nbytes(tuple(weight.shape)) / weight.numel(),
        db=db(noise),
        quiet_db=db(noise[:, quiet], exact[:, quiet]),
        weights_db=db((x.float() @ qw.dequantize().T - exact).square()),
        inputs_db=db((qx.dequantize() @ weight.float().T - exact).square()),
    )
    return cell, noise.sum(1)


def _with_gains(measured: list[tuple[Cell, Tensor]]) -> list[Cell]:
    """The cells of a format, each rotated one compared with the first, which is unrotated."""
    if len(measured) < 2:
        return [cell for cell, _ in measured]
    plain = measured[0][0]
    sums = resampled_sums(torch.stack([noise for _, noise in measured], 1)).clamp_min(_LEAST)
    found = [plain]
    for i, (cell, _) in enumerate(measured[1:], 1):
        low, high = interval(10 * torch.log10(sums[:, 0] / sums[:, i]), comparisons=len(measured) - 1)
        found.append(replace(cell, gain_db=cell.db - plain.db, low_db=low, high_db=high))
    return found
