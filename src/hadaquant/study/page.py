"""The report of a study: one HTML page that needs nothing beside it, its pictures as PNG, its figures as JSON."""

from __future__ import annotations

import base64
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hadaquant.errors import MissingExtra
from hadaquant.study import plots
from hadaquant.study.conduct import Answer
from hadaquant.study.layers import Cell, LayerResult
from hadaquant.study.metrics import MARGIN_DB
from hadaquant.study.perplexity import Comparison
from hadaquant.study.report import SHARED, counted, interval_note, write_json
from hadaquant.study.trials import Trial


def write_report(answer: Answer, folder: Path, command: str = "") -> Path:
    """Write report.html, study.json and the pictures into a folder; returns the page.

    Args:
        answer: of a study.
        folder: the study's.
        command: that gives this report again, shown on the page.

    Raises:
        MissingExtra: matplotlib or jinja2 is not installed.
        CheckpointError: a file cannot be written.
    """
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtra(what="the report", package="jinja2", extra="report") from error
    write_json(folder / "study.json", answer.to_dict())
    pictures = {"layers": plots.heat_map(answer.results), "outliers": plots.outliers(answer.results)}
    if answer.trials:
        pictures["perplexity"] = plots.perplexities(answer.trials)
    for name, data in pictures.items():
        if data is not None:
            (folder / f"{name}.png").write_bytes(data)
    template = resources.files("hadaquant.study").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = environment.from_string(template).render(
        answer=answer,
        command=command,
        quantize=quantize_command(answer, folder),
        counted=counted,
        shared=SHARED,
        note=interval_note(answer.trials[0].result.windows) if answer.trials else "",
        margin=MARGIN_DB,
        pictures={name: base64.b64encode(data).decode() for name, data in pictures.items() if data is not None},
        tested={t.verdict.format: t for t in answer.outcome.formats} if answer.outcome else {},
        trials=[_trial(answer, trial) for trial in answer.trials],
        means=list(means(answer.results)),
        layers=[(r, {f: r.best(f) for f in r.formats}) for r in answer.results if r.cells],
        counts=plan_counts(f"{c.format} {c.rotation}" for c in answer.selection.cells.values()),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def quantize_command(answer: Answer, folder: Path) -> str:
    """What obeys the plan, to be typed into a shell; OUT is left to fill in."""
    return shlex.join(("hadaquant", "quantize", str(answer.model), "OUT", "--plan", str(folder / "plan.json")))


def _trial(answer: Answer, trial: Trial) -> dict[str, Any]:
    plain = next((t for t in answer.trials if t.format == trial.format and t.rotation == "none"), None)
    gain = None if plain is None or plain is trial else Comparison.of(plain.result, trial.result)
    return {"format": trial.format, "rotation": trial.rotation, "gain": gain, **trial.result.to_dict()}


def means(results: Sequence[LayerResult]) -> Iterator[dict[str, Any]]:
    """For each format and rotation: decibels of each kind of error, the mean over the layers that it fits."""
    measured = [r for r in results if r.cells]
    asked = dict.fromkeys(a for r in measured for c in r.cells for a in c.asked)
    for format in dict.fromkeys(f for r in measured for f in r.formats):
        for rotation in asked:
            cells = [cell for r in measured if (cell := r.under(format, rotation)) is not None]
            if cells:
                yield {"format": format, "rotation": rotation, "layers": len(cells), **_mean(cells)}


def _mean(cells: Sequence[Cell]) -> dict[str, float]:
    names = ("db", "quiet_db", "weights_db", "inputs_db")
    return {name: sum(getattr(cell, name) for cell in cells) / len(cells) for name in names}


def plan_counts(choices: Iterable[str]) -> list[tuple[str, int]]:
    """How many layers a plan gives each format and rotation, most first."""
    return Counter(choices).most_common()
