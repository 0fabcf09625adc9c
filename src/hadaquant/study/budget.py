"""A format and rotation for each linear: the least error for a number of bits, or the fewest bits for an error.

A layer's error is the noise of its output over its signal, as measured; the model's is the mean over layers.
Layers that read one tensor get one choice, so that it can be quantized once for all of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hadaquant.errors import PlanError
from hadaquant.formats import get_format
from hadaquant.nn.convert import fit
from hadaquant.rotation import parse
from hadaquant.study.layers import Cell, LayerResult
from hadaquant.study.metrics import MARGIN_DB

#: Rotations that a plan may use of a format: any (None), or only those asked for by these specs.
Allowed = Mapping[str, Sequence[str] | None]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One choice for the layers that read one tensor: a cell for each of them."""

    cells: tuple[Cell, ...]
    bits: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What was chosen.

    ``cells``: by layer. ``bits``: a weight, the mean over all weights of these layers. ``db``: of the mean noise.
    """

    cells: dict[str, Cell]
    bits: float
    db: float


def select(
    results: Sequence[LayerResult],
    *,
    bits: float | None = None,
    target_db: float | None = None,
    allowed: Allowed | None = None,
) -> Selection:
    """Choose for all layers that were measured.

    Starts with the fewest bits everywhere and buys, again and again, what takes most noise away for its bits, until
    the bits are spent or the target is reached. With neither, each layer gets its least noise.

    Args:
        bits: at most so many a weight, on average.
        target_db: at least so much signal over the mean noise.
        allowed: the formats to choose from and their rotations; all that were measured, if left out.

    Raises:
        PlanError: even the least is too much, or no choice is left for a layer.
    """
    measured = [r for r in results if r.cells]
    groups: dict[str, list[LayerResult]] = {}
    for result in measured:
        groups.setdefault(result.reads, []).append(result)
    options = {reads: _frontier(_options(layers, allowed)) for reads, layers in groups.items()}
    weights = sum(math.prod(r.shape) for r in measured)
    chosen = dict.fromkeys(groups, 0)

    def total(what: str) -> float:
        return sum(getattr(options[reads][i], what) for reads, i in chosen.items())

    wanted = 0.0 if target_db is None else len(measured) * 10 ** (-target_db / 10)
    budget = math.inf if bits is None else bits * weights
    spent, noise = total("bits"), total("noise")
    if bits is not None and spent > budget:
        raise _too_few(bits, spent / weights)
    offers = [offer for reads in groups for offer in _offers(options, reads, 0)]
    heapq.heapify(offers)
    while offers and (target_db is None or noise > wanted):
        _, reads, i = heapq.heappop(offers)
        old, new = options[reads][i - 1], options[reads][i]
        if spent + new.bits - old.bits > budget:
            continue
        spent, noise = spent + new.bits - old.bits, noise + new.noise - old.noise
        chosen[reads] = i
        for offer in _offers(options, reads, i):
            heapq.heappush(offers, offer)
    reached = _db(noise / len(measured))
    if target_db is not None and noise > wanted:
        rule = f"{target_db:g} dB are out of reach: the best is {reached:.1f} dB"
        raise PlanError(plan="the plan", rule=rule, fix="lower --target-db, or study a larger format")
    cells = {
        layer.name: cell
        for reads, layers in groups.items()
        for layer, cell in zip(layers, options[reads][chosen[reads]].cells, strict=True)
    }
    return Selection(cells={r.name: cells[r.name] for r in measured}, bits=spent / weights, db=reached)


def check_bits(shapes: Iterable[tuple[int, int]], formats: Iterable[str], bits: float) -> None:
    """Refuse a limit that no choice of formats can keep, before anything is measured.

    Args:
        shapes: [N, K] of each weight.
        formats: to choose from.
        bits: as :func:`select` takes them.

    Raises:
        PlanError: even the smallest format of each weight is too much.
    """
    choices, plain = [get_format(format) for format in formats], parse("none")
    weights = need = 0
    for shape in shapes:
        fitting = [8 * f.nbytes(shape) for f in choices if fit(f, plain, shape[1])[0] is not None]
        if fitting:  # else it stays as it is, outside of the plan
            weights, need = weights + math.prod(shape), need + min(fitting)
    if need > bits * weights:
        raise _too_few(bits, need / weights)


def _too_few(bits: float, need: float) -> PlanError:
    rule = f"{bits:g} bits a weight are too few: these formats need {need:.3f}"
    return PlanError(plan="the plan", rule=rule, fix="raise --bits, or study a smaller format")


def _db(noise: float) -> float:
    return -10 * math.log10(noise) if noise > 0 else math.inf


def _options(layers: Sequence[LayerResult], allowed: Allowed | None) -> list[Option]:
    """Each format with its best rotation, if that beats none by more than :data:`MARGIN_DB`."""
    found = []
    for format in allowed or layers[0].formats:
        asked = allowed[format] if allowed else None
        of_format = []
        for cell in layers[0].of(format):
            same = [next((c for c in r.of(format) if c.rotation == cell.rotation), None) for r in layers]
            cells = tuple(c for c in same if c is not None)
            # a matrix has no place in a plan
            if len(cells) < len(layers) or cell.rotation.startswith("matrix"):
                continue
            if asked is None or not {*asked, "none"}.isdisjoint(cell.asked):
                of_format.append(_option(cells, layers))
        if of_format:
            best = min(of_format, key=lambda o: o.noise)
            plain = next((o for o in of_format if o.cells[0].rotation == "none"), best)
            found.append(best if best.noise < plain.noise * 10 ** (-MARGIN_DB / 10) else plain)
    if not found:
        names, formats = ", ".join(layer.name for layer in layers), ", ".join(allowed or ())
        raise PlanError(plan="the plan", rule=f"no format of {formats} fits {names}", fix="allow another format")
    return found


def _option(cells: tuple[Cell, ...], layers: Sequence[LayerResult]) -> Option:
    bits = sum(cell.bits * math.prod(layer.shape) for cell, layer in zip(cells, layers, strict=True))
    return Option(cells=cells, bits=bits, noise=sum(cell.noise for cell in cells))


def _frontier(options: list[Option]) -> list[Option]:
    """Options worth taking, by bits: each step's noise saved a bit is less than the step's before it."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bits, o.noise)):
        if hull and option.noise >= hull[-1].noise:
            continue
        while len(hull) > 1 and _worth(hull[-2], hull[-1]) <= _worth(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _worth(old: Option, new: Option) -> float:
    return (old.noise - new.noise) / (new.bits - old.bits)


def _offers(options: Mapping[str, list[Option]], reads: str, i: int) -> list[tuple[float, str, int]]:
    """The next step of a group, as a heap wants it: the best first."""
    mine = options[reads]
    return [(-_worth(mine[i], mine[i + 1]), reads, i + 1)] if i + 1 < len(mine) else []
