"""The whole study of a model folder: layers, verdict, test on the model, plan, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hadaquant.checkpoint.model_plan import ModelPlan, fingerprint
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.errors import CheckpointError, PredictionError
from hadaquant.formats import get_format
from hadaquant.nn.select import DEFAULT_SKIP
from hadaquant.study.budget import Selection, check_bits, select
from hadaquant.study.layers import LayerResult
from hadaquant.study.models import ModelFolder
from hadaquant.study.perplexity import perplexity, read_tokens
from hadaquant.study.rotations import as_rotation, of_name
from hadaquant.study.run import Linears, Progress, Settings, StudyFolder, digest, linears_of, study_layers
from hadaquant.study.trials import Bench, Outcome, Trial, choice_of, try_formats, try_plan
from hadaquant.study.verdict import FormatVerdict, verdicts

FORMATS = ("int8", "nvfp4", "mxfp4")
ROTATIONS = ("none", "sylvester:16", "sylvester:64", "regular:64", "regular:256", "random:64")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a model.

    Attributes:
        model: its folder.
        calibration: UTF-8 text whose inputs the linears are measured on.
        out: the study's folder; a run that was killed goes on in it.
        text: another text, to test the verdict on; None leaves it untested.
        tokens: use only the first tokens of ``text``.
        formats, rotations: to measure.
        bits, target_db: limits of the plan; see :func:`hadaquant.study.budget.select`.
        windows: see :class:`Settings`; a text that holds fewer gives what it holds.
        window, rows: see :class:`Settings`.
        skip, only: patterns of linears to leave alone, and to study if given.
        device: where the model is.
    """

    model: Path
    calibration: Path
    out: Path
    text: Path | None = None
    tokens: int | None = None
    formats: Sequence[str] = FORMATS
    rotations: Sequence[str] = ROTATIONS
    bits: float | None = None
    target_db: float | None = None
    windows: int = 16
    window: int = 512
    rows: int = 256
    skip: Sequence[str] = DEFAULT_SKIP
    only: Sequence[str] = ()
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found.

    ``model``: its folder. ``outcome`` and ``planned`` are None where there was no text to test on. ``stored``: weights
    and bits, as it is stored, of every linear of the model, studied or not.
    """

    model: Path
    settings: Settings
    text: str | None
    results: list[LayerResult]
    verdicts: list[FormatVerdict]
    outcome: Outcome | None
    selection: Selection
    limits: dict[str, float]
    planned: Trial | None
    kept: dict[str, str]
    stored: Mapping[str, tuple[int, int]]

    @property
    def all_bits(self) -> float:
        """Bits a weight over all linears under the plan, those that it keeps as they are stored among them."""
        cells = self.selection.cells
        bits = (cells[name].bits * count if name in cells else kept for name, (count, kept) in self.stored.items())
        return sum(bits) / sum(count for count, _ in self.stored.values())

    @property
    def scope(self) -> str:
        """Which linears the plan is for, and what becomes of the others."""
        planned, linears = len(self.selection.cells), len(self.stored)
        if planned == linears:
            return f"all {linears} linears"
        others = f"the other {linears - planned} stay as they are, {self.all_bits:.3f} bits a weight over all"
        return f"{planned} of {linears} linears; {others}"

    @property
    def smaller_groups(self) -> list[str]:
        """Where the plan has a smaller group than the verdict names, and why."""
        named = {v.format: v.rotation for v in self.verdicts}
        shapes = {r.name: r.shape for r in self.results}
        found: dict[tuple[str, str], set[int]] = {}
        for name, cell in self.selection.cells.items():
            asked = named.get(cell.format)
            if asked in cell.asked and of_name(cell.rotation) != as_rotation(asked):
                found.setdefault((asked, cell.rotation), set()).add(shapes[name][1])
        return [
            f"{asked} is {rotation} in linears of {_and([f'{k:,}' for k in sorted(sizes)])} inputs, the largest group "
            "that divides them"
            for (asked, rotation), sizes in found.items()
        ]

    @property
    def trials(self) -> list[Trial]:
        """All variants of the model that were tried."""
        return [] if self.outcome is None else [*self.outcome.trials, *([self.planned] if self.planned else [])]

    @property
    def sentence(self) -> str:
        """The verdict, in one sentence."""
        said = {t.verdict.format: (t.helps, t.best) for t in self.outcome.formats} if self.outcome else {}
        said = {v.format: said.get(v.format, (v.helps, v.rotation)) for v in self.verdicts}
        rotated = [f"{format} ({rotation})" for format, (helps, rotation) in said.items() if helps == "yes"]
        plain = [format for format, (helps, _) in said.items() if helps == "no"]
        even = [format for format, (helps, _) in said.items() if helps == "no difference"]
        clauses = [
            *([f"rotate {_and(rotated)}"] if rotated else []),
            *([f"do not rotate {_and(plain)}"] if plain else []),
            *([f"no difference was seen for {_and(even)}"] if even else []),
        ]
        text = "; ".join(clauses) or "no rotation was measured"
        return f"{text[0].upper()}{text[1:]}{'' if self.outcome else ' (by the layers; untested on the model)'}."

    def evidence(self, verdict: FormatVerdict) -> str:
        """What the verdict on a format rests on."""
        layers = f"{verdict.rotation} changes the noise of the layers' outputs by {-verdict.gain_db:+.1f} dB"
        trial = next((t for t in self.outcome.formats if t.verdict is verdict), None) if self.outcome else None
        if trial is None:
            return layers
        found = {t.rotation: t.result for t in self.trials if t.format == verdict.format}
        rotation = trial.best if trial.helps == "yes" else verdict.rotation
        before, after = found["none"], found[rotation]
        losses = f"from {before.perplexity:.2f} to {after.perplexity:.2f}"
        if before.divergence is None or after.divergence is None:
            return f"{rotation} takes perplexity {losses}"
        ends = before.divergence.mean().item(), after.divergence.mean().item()
        spec = ".4f" if min(ends) >= 0.001 else ".3g"
        divergences = f"from {ends[0]:{spec}} to {ends[1]:{spec}}"
        gain = trial.gains[rotation]
        if gain.helps != "no difference" and gain.loss.helps == "no difference":
            return f"{rotation} takes KL {divergences}; perplexity, {losses}, cannot tell"
        return f"{rotation} takes perplexity {losses} and KL {divergences}"

    def to_dict(self) -> dict[str, Any]:
        """Everything for JSON."""
        return {
            "verdict": self.sentence,
            "settings": self.settings.to_dict(),
            "text": self.text,
            "formats": [v.to_dict() for v in self.verdicts],
            "tested": None if self.outcome is None else [t.to_dict() for t in self.outcome.formats],
            "trials": [t.to_dict() for t in self.trials],
            "plan": {
                "bits": self.selection.bits,
                "db": self.selection.db,
                "limits": self.limits,
                "layers": len(self.selection.cells),
                "all_linears": len(self.stored),
                "bits_of_all": self.all_bits,
            },
            "layers": [r.to_dict() for r in self.results],
            "kept": self.kept,
        }

    def plan(self) -> ModelPlan:
        """The plan, for ``quantize``."""
        about = {
            "verdict": self.sentence,
            "limits": self.limits,
            "bits": round(self.selection.bits, 4),
            "bits_of_all": round(self.all_bits, 4),
            "db": round(self.selection.db, 2),
            "settings": self.settings.to_dict(),
        }
        layers = {name: choice_of(cell) for name, cell in self.selection.cells.items()}
        names = {"model": self.settings.model, "fingerprint": self.settings.fingerprint}
        return ModelPlan(**names, layers=layers, kept=self.kept, about=about)


def _and(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def conduct(
    question: Question,
    progress: Progress = lambda name, done, total: None,
    tell: Callable[[str], None] = lambda what: None,
) -> Answer:
    """Run what is left of a study, and write its plan.

    Args:
        question: what is asked.
        progress: hears each layer.
        tell: hears what else is done.

    Raises:
        CheckpointError: a folder or text that cannot be used, or a text that is too short.
        UnknownChoice, RotationError, PatternError: a name that means nothing.
        LayerError: nothing to study.
        PredictionError: the model gives NaN.
        PlanError: the limits cannot be met.
        MissingExtra: transformers is not installed.
    """
    q = question
    for format in q.formats:
        get_format(format)
    for rotation in q.rotations:
        as_rotation(rotation)
    tell(f"loading {q.model}")
    source = ModelFolder.open(q.model)
    checkpoint, tokenizer = Checkpoint.open(q.model), source.tokenizer()
    ids = read_tokens(q.calibration, tokenizer, q.window)
    text = None if q.text is None else read_tokens(q.text, tokenizer, q.window, q.tokens)
    if q.text is not None and q.text.read_bytes() == q.calibration.read_bytes():
        raise CheckpointError(path=q.text, rule="is the calibration text too", fix="test on text never calibrated on")
    settings = Settings(
        model=q.model.resolve().name,
        fingerprint=fingerprint(checkpoint),
        calibration=q.calibration.name,
        digest=digest(ids),
        formats=tuple(q.formats),
        rotations=tuple(q.rotations),
        windows=min(q.windows, len(ids) // q.window),
        window=q.window,
        rows=q.rows,
    )
    folder = StudyFolder(q.out)
    model = source.load(q.device)
    linears = linears_of(checkpoint, model, q.skip, q.only)
    if q.bits is not None:
        check_bits((_shape(model, target) for target in linears.names.values()), q.formats, q.bits)
    for words in (ids, text):
        if words is not None:
            _check_predictions(model, q.model, words[: q.window])
    folder.begin(settings)
    results = study_layers(folder, settings, model, linears, ids, progress)
    bench = None if text is None else Bench(folder, model, linears, text, q.window, tell)
    answer = _answer(q, settings, linears, results, bench)
    answer.plan().write(q.out / "plan.json")
    return answer


def _shape(model: nn.Module, linear: str) -> tuple[int, int]:
    n, k = model.get_parameter(f"{linear}.weight").shape
    return n, k


def _check_predictions(model: nn.Module, path: Path, ids: Tensor) -> None:
    """Refuse a model that gives NaN before hours are spent on it."""
    try:
        perplexity(model, ids, len(ids))
    except PredictionError as error:
        raise PredictionError(**{**error.fields, "model": path}) from error


def _answer(
    q: Question, settings: Settings, linears: Linears, results: list[LayerResult], bench: Bench | None
) -> Answer:
    outcome = None if bench is None else try_formats(bench, results)
    limits = {name: value for name, value in (("bits", q.bits), ("target_db", q.target_db)) if value is not None}
    measured = dict.fromkeys(f for r in results for f in r.formats)
    allowed = None if outcome is None else {**{f: ["none"] for f in measured}, **outcome.allowed}
    selection = select(results, **limits, allowed=allowed)
    return Answer(
        model=q.model,
        settings=settings,
        text=None if q.text is None else q.text.name,
        results=results,
        verdicts=[t.verdict for t in outcome.formats] if outcome else verdicts(results),
        outcome=outcome,
        selection=selection,
        limits=limits,
        planned=None if bench is None else try_plan(bench, selection),
        kept={**linears.kept, **{r.name: r.skipped for r in results if r.skipped}},
        stored=linears.stored,
    )
