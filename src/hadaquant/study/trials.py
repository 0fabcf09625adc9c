"""The layers' verdict put to the test: perplexity of plain, rotated and planned variants of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hadaquant.checkpoint.model_plan import Choice
from hadaquant.errors import PlanError, PredictionError
from hadaquant.formats import get_format
from hadaquant.nn import RotatedLinear
from hadaquant.study.budget import Allowed, Selection, select
from hadaquant.study.layers import Cell, LayerResult
from hadaquant.study.metrics import Helps
from hadaquant.study.perplexity import Comparison, Perplexity, logits_of, perplexity
from hadaquant.study.rotations import of_name
from hadaquant.study.run import Linears, StudyFolder, digest
from hadaquant.study.verdict import FormatVerdict, verdicts

FULL, PER_LAYER, PLAN = "full precision", "per layer", "plan"
_FILE = "models.jsonl"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One variant of the model on the text.

    ``format``: its name, or ``plan`` or ``full precision``. ``rotation``: a spec, ``none`` or ``per layer``.
    """

    format: str
    rotation: str
    result: Perplexity

    def to_dict(self) -> dict[str, Any]:
        """Figures for JSON."""
        return {"format": self.format, "rotation": self.rotation, **self.result.to_dict()}


@dataclass(frozen=True, kw_only=True)
class FormatTrial:
    """What the model says of one format, beside what the layers said.

    Attributes:
        verdict: of the layers.
        gains: over no rotation, by rotation: the layers' favourite, and each layer's own.
    """

    verdict: FormatVerdict
    gains: Mapping[str, Comparison]

    @property
    def best(self) -> str:
        """The rotation that brings the model nearest to the full one, of those that help for sure; or ``none``."""
        sure = [rotation for rotation, gain in self.gains.items() if gain.helps == "yes"]
        return max(sure, key=lambda rotation: self.gains[rotation].divergence.mean, default="none")  # type: ignore[union-attr]

    @property
    def helps(self) -> Helps:
        """Whether rotating helps the model; no, if the layers' favourite makes it worse for sure."""
        if self.best != "none":
            return "yes"
        return "no" if self.gains[self.verdict.rotation].helps == "no" else "no difference"

    @property
    def status(self) -> Literal["confirmed", "not confirmed", "withdrawn"]:
        """What becomes of the layers' verdict: the model says the same, cannot tell, or says something else."""
        if self.helps == self.verdict.helps:
            return "confirmed"
        return "not confirmed" if self.helps == "no difference" else "withdrawn"

    @property
    def allowed(self) -> Sequence[str] | None:
        """The rotations that a plan may use, as :func:`select` takes them: all, where the model cannot tell."""
        return None if self.best == PER_LAYER or self.helps == "no difference" else [self.best]

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON."""
        gains = {name: gain.to_dict() for name, gain in self.gains.items()}
        return {"format": self.verdict.format, "helps": self.helps, "status": self.status, "gains": gains}


class Bench:
    """A model, a text that it was not calibrated on, and the trials made so far.

    Args:
        folder: where each trial is written down, so that a killed run goes on.
        model: unquantized; whole again after each trial.
        linears: those to replace.
        ids: int64 [T].
        window: tokens a window.
        tell: hears which variant comes next.
    """

    def __init__(
        self,
        folder: StudyFolder,
        model: nn.Module,
        linears: Linears,
        ids: Tensor,
        window: int,
        tell: Callable[[str], None] = lambda variant: None,
    ) -> None:
        self.folder, self.model, self.linears, self.ids, self.window = folder, model, linears, ids, window
        self.tell = tell
        self.text = f"{digest(ids[: len(ids) // window * window])}:{window}"
        self._done = {line["key"]: _perplexity(line) for line in folder.lines(_FILE) if line["text"] == self.text}

    def full(self) -> Trial:
        """The model as it is."""
        return self._trial(FULL, "none", {})

    def trial(self, format: str, rotation: str, cells: Mapping[str, Cell]) -> Trial:
        """The model with the linears that ``cells`` name quantized as these say."""
        return self._trial(format, rotation, {layer: choice_of(cell) for layer, cell in cells.items()})

    def _trial(self, format: str, rotation: str, choices: Mapping[str, Choice]) -> Trial:
        key = _key(choices)
        if key not in self._done:
            self.tell(f"{format}, {rotation}" if choices else format)
            try:
                self._done[key] = result = self._measure(choices)
            except PredictionError as error:
                raise PredictionError(**{**error.fields, "model": f"the model in {format}, {rotation}"}) from error
            line = {"key": key, "text": self.text, "format": format, "rotation": rotation, **_stored(result)}
            self.folder.append(_FILE, line)
        return Trial(format=format, rotation=rotation, result=self._done[key])

    def _measure(self, choices: Mapping[str, Choice]) -> Perplexity:
        if not choices:
            return perplexity(self.model, self.ids, self.window)
        plain = {self.linears.names[layer]: self.model.get_submodule(self.linears.names[layer]) for layer in choices}
        quantized = {
            self.linears.names[layer]: RotatedLinear.from_linear(plain[self.linears.names[layer]], *choice)  # type: ignore[arg-type]
            for layer, choice in choices.items()
        }

        def full(tokens: Tensor) -> Tensor:
            with _swapped(self.model, plain):
                return logits_of(self.model, tokens)

        with _swapped(self.model, quantized):
            return perplexity(self.model, self.ids, self.window, full)


@contextmanager
def _swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within, the model has other modules under these names."""
    before = {name: model.get_submodule(name) for name in modules}
    try:
        _put(model, modules)
        yield
    finally:
        _put(model, before)


def _put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


def choice_of(cell: Cell) -> Choice:
    """Format and rotation of a cell."""
    return Choice(get_format(cell.format), of_name(cell.rotation))


def _key(choices: Mapping[str, Choice]) -> str:
    """Tells variants apart, however they are called."""
    return digest(torch.tensor(list(repr([(n, str(f), str(r)) for n, (f, r) in sorted(choices.items())]).encode())))


def _stored(result: Perplexity) -> dict[str, Any]:
    fields = {"windows": result.windows, "seconds": result.seconds}
    for name in ("losses", "divergence", "agreement"):
        values: Tensor | None = getattr(result, name)
        fields[name] = None if values is None else [float(f"{v:.7g}") for v in values.tolist()]
    return fields


def _perplexity(line: Mapping[str, Any]) -> Perplexity:
    lists = {
        name: None if line[name] is None else torch.tensor(line[name], dtype=torch.float64)
        for name in ("losses", "divergence", "agreement")
    }
    return Perplexity(**lists, windows=line["windows"], seconds=line["seconds"])  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that a model-level test gives: trials in the order of a table, and what they say of each format."""

    trials: list[Trial]
    formats: list[FormatTrial]

    @property
    def allowed(self) -> Allowed:
        """What a plan may use."""
        return {trial.verdict.format: trial.allowed for trial in self.formats}


def try_formats(bench: Bench, results: Sequence[LayerResult]) -> Outcome:
    """Each format plain, with the rotation that the layers like best, and with each layer's own."""
    trials, formats = [bench.full()], []
    for verdict in verdicts(results):
        trial = partial(bench.trial, verdict.format)
        plain = trial("none", _uniform(results, verdict.format, "none"))
        rotated = trial(verdict.rotation, _uniform(results, verdict.format, verdict.rotation))
        own = trial(PER_LAYER, _own(results, verdict.format))
        trials += [plain, rotated, own]
        gains = {t.rotation: Comparison.of(plain.result, t.result) for t in (rotated, own)}
        formats.append(FormatTrial(verdict=verdict, gains=gains))
    return Outcome(trials=trials, formats=formats)


def _uniform(results: Sequence[LayerResult], format: str, asked: str) -> dict[str, Cell]:
    found = {r.name: r.under(format, asked) or r.under(format, "none") for r in results}
    return {name: cell for name, cell in found.items() if cell is not None}


def _own(results: Sequence[LayerResult], format: str) -> dict[str, Cell]:
    try:
        return select([r for r in results if r.of(format)], allowed={format: None}).cells
    except PlanError:
        return _uniform(results, format, "none")


def try_plan(bench: Bench, selection: Selection) -> Trial:
    """The model quantized as the plan says."""
    return bench.trial(PLAN, PER_LAYER, selection.cells)
