"""Does the rotation help? Of a format, over the layers of a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hadaquant.study.layers import LayerResult
from hadaquant.study.metrics import MARGIN_DB, Helps


@dataclass(frozen=True, kw_only=True)
class FormatVerdict:
    """What the layers say of one format.

    Attributes:
        format: its name.
        layers: how many say yes, no and no difference of their best rotation.
        rotation: the one that leaves least noise if all layers get it (each with the group that fits).
        gain_db: by which it lowers the mean noise over layers; negative where it raises it.
    """

    format: str
    layers: dict[str, int]
    rotation: str
    gain_db: float

    @property
    def helps(self) -> Helps:
        """By the mean noise of all layers."""
        if abs(self.gain_db) <= MARGIN_DB:
            return "no difference"
        return "yes" if self.gain_db > 0 else "no"

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON."""
        return {**asdict(self), "helps": self.helps}


def verdicts(results: Sequence[LayerResult]) -> list[FormatVerdict]:
    """A verdict for each format that was measured with a rotation."""
    measured = [r for r in results if r.cells]
    formats = dict.fromkeys(cell.format for r in measured for cell in r.cells)
    found = []
    for format in formats:
        best = [cell.helps for cell in (r.best(format) for r in measured) if cell is not None]
        asked = dict.fromkeys(a for r in measured for c in r.of(format) if c.rotation != "none" for a in c.asked)
        gains = {spec: uniform_gain(measured, format, spec) for spec in asked}
        if gains:
            rotation = max(gains, key=lambda spec: gains[spec])
            counts = {answer: Counter(best)[answer] for answer in ("yes", "no", "no difference")}
            found.append(FormatVerdict(format=format, layers=counts, rotation=rotation, gain_db=gains[rotation]))
    return found


def uniform_gain(results: Sequence[LayerResult], format: str, asked: str) -> float:
    """Decibels by which the mean noise over layers falls if each gets this rotation where it fits."""
    plain = rotated = 0.0
    for result in results:
        before = result.under(format, "none")
        if before is not None:
            plain += before.noise
            rotated += (result.under(format, asked) or before).noise
    return 10 * math.log10(plain / rotated) if plain and rotated else 0.0
