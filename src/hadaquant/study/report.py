"""Rows of a study as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from hadaquant.errors import CheckpointError
from hadaquant.study.cases import Case
from hadaquant.study.metrics import MARGIN_DB
from hadaquant.study.models import ModelRow
from hadaquant.study.perplexity import UNITS, Comparison
from hadaquant.study.sweep import Row
from hadaquant.study.trials import Outcome, Trial
from hadaquant.study.verdict import FormatVerdict

#: Why a layer's part of a plan may differ from what it says itself.
SHARED = (
    "Linears that read one tensor (q, k and v; gate and up) share one choice, so that it is rotated and quantized "
    "once: one of them may say yes, and still be left without a rotation."
)
_COLOURS = {"yes": "green", "no": "red", "no difference": "dim"}


def interval_note(windows: int) -> str:
    """What the intervals of figures over so many windows of a text say."""
    if windows == 1:
        return (
            "One window gives no interval over windows: […] hold 95 % of what resampled pieces of it give, and say "
            "nothing of other text."
        )
    text = "[…] hold 95 % of what other windows of the text would give"
    return f"{text}, by resampling pieces of these {windows}." if windows < UNITS else f"{text}."


def short_names(paths: Sequence[Path]) -> list[str]:
    """Paths by as few of their last parts as tell them apart.

    >>> short_names([Path("/a/models/int8"), Path("/b/models/int8"), Path("/b/models/full")])
    ['…/a/models/int8', '…/b/models/int8', 'full']
    """

    def last(path: Path, parts: int) -> Path:
        return Path(*path.parts[-parts:])

    found = []
    for path in paths:
        others = {p for p in paths if p != path}
        parts = next((n for n in range(1, len(path.parts)) if last(path, n) not in {last(p, n) for p in others}), None)
        found.append(str(path) if parts is None else f"{'…/' if parts > 1 else ''}{last(path, parts)}")
    return found


def counted(number: int, thing: str) -> str:
    """A number of things.

    >>> counted(1, "window"), counted(2, "window")
    ('1 window', '2 windows')
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"


def coloured(verdict: str) -> str:
    """A verdict in rich markup."""
    return f"[{_COLOURS[verdict]}]{verdict}[/]"


def error_table(rows: Iterable[Row], cases: Iterable[Case]) -> Table:
    """One table of all rows, a section for each case; ``cases`` say how each was drawn."""
    notes = [
        "Errors are ‖x − x̂‖ / ‖x‖, over all channels and over those that are no outliers. "
        f"A rotation helps when the SQNR rises by more than {MARGIN_DB} dB.",
        *(f"{case.name}: {case.origin}." for case in cases),
    ]
    table = Table(
        title="Quantization error, plain → rotated",
        box=box.SIMPLE_HEAD,
        caption="\n".join(notes),
        caption_justify="left",
    )
    for heading in ("format", "rotation"):
        table.add_column(heading)
    for heading in ("error", "quiet channels", "SQNR dB", "code + scale bytes"):
        table.add_column(heading, justify="right")
    table.add_column("rotation helps")
    for name, section in groupby(rows, key=lambda row: row.case):
        table.add_section()
        table.add_row(f"[bold]{name}[/]")
        for row in section:
            table.add_row(
                row.format,
                row.rotation,
                f"{row.plain_error:.4f} → {row.rotated_error:.4f}",
                "" if row.plain_quiet is None else f"{row.plain_quiet:.4f} → {row.rotated_quiet:.4f}",
                f"{row.plain_db:.1f} → {row.rotated_db:.1f}",
                f"{row.code_bytes} + {row.scale_bytes}",
                coloured(row.helps),
            )
    return table


def perplexity_table(rows: Iterable[ModelRow], title: str) -> Table:
    """One table of models, a row each; folders by as few of their last parts as tell them apart."""
    rows = list(rows)
    names = short_names([row.model.resolve() for row in rows])
    notes = [interval_note(rows[0].result.windows)]
    if any(row.result.divergence is not None for row in rows):
        notes.append("KL: nats a token from the source's predictions; same: predictions with its most likely token.")
    if any(row.gain is not None for row in rows):
        notes.append(
            "Gain: nats a token over the same format without rotation, in loss and in KL. A rotation helps when one "
            "interval lies above zero and none below."
        )
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, caption=" ".join(notes), caption_justify="left")
    for heading in ("model", "format", "rotation"):
        table.add_column(heading)
    for heading in ("perplexity", "KL", "same", "weights", "tokens/s", "gain", "KL gain"):
        table.add_column(heading, justify="right")
    table.add_column("rotation helps")
    for name, row in zip(names, rows, strict=True):
        r = row.result
        table.add_row(
            escape(name),
            row.format,
            row.rotation,
            f"{r.perplexity:.2f} {between(r.interval, '.2f')}",
            "" if r.divergence is None else f"{r.divergence.mean():.4f}",
            "" if r.agreement is None else f"{r.agreement.mean():.1%}",
            f"{row.nbytes / 2**20:.1f} MiB",
            f"{r.tokens_per_second:.0f}",
            *gains(row.gain),
            "" if row.helps is None else coloured(row.helps),
        )
    return table


def verdict_table(verdicts: Iterable[FormatVerdict], outcome: Outcome | None) -> Table:
    """What the layers say of each format, and whether the model agrees."""
    table = Table(
        title="Does the rotation help?",
        box=box.SIMPLE_HEAD,
        caption=f"A layer says yes or no of its best rotation when its output's noise changes by more than {MARGIN_DB} "
        "dB, and the whole bootstrap interval lies on that side. Noise: the mean over layers, all of them rotated "
        "so.",
        caption_justify="left",
    )
    for heading in ("format", "rotation"):
        table.add_column(heading)
    for heading in ("layers yes", "no", "no difference", "noise, dB"):
        table.add_column(heading, justify="right")
    for heading in ("by the layers", "by the model"):
        table.add_column(heading)
    tested = {} if outcome is None else {t.verdict.format: t for t in outcome.formats}
    for v in verdicts:
        trial = tested.get(v.format)
        model = "untested" if trial is None else coloured(trial.helps)
        if trial is not None:
            model += f": {trial.status}"
        counts = [str(v.layers[answer]) for answer in ("yes", "no", "no difference")]
        table.add_row(v.format, v.rotation, *counts, f"{-v.gain_db:+.1f}", coloured(v.helps), model)
    return table


def trial_table(trials: Sequence[Trial], text: str) -> Table:
    """Variants of a model on a text, each beside the unquantized one."""
    full = trials[0].result
    table = Table(
        title=f"The model on {escape(text)}: {counted(full.windows, 'window')}, {full.losses.numel()} predicted tokens",
        box=box.SIMPLE_HEAD,
        caption=f"{interval_note(full.windows)} Gain: nats a token over the same format "
        "without rotation, in loss and in KL.",
        caption_justify="left",
    )
    for heading in ("format", "rotation"):
        table.add_column(heading)
    for heading in ("perplexity", "KL", "same", "gain", "KL gain"):
        table.add_column(heading, justify="right")
    plain = {t.format: t.result for t in trials if t.rotation == "none"}
    for trial in trials:
        r, before = trial.result, plain.get(trial.format)
        gain = None if before is None or trial.rotation == "none" else Comparison.of(before, r)
        table.add_row(
            trial.format,
            trial.rotation,
            f"{r.perplexity:.2f} {between(r.interval, '.2f')}",
            "" if r.divergence is None else f"{r.divergence.mean():.4f}",
            "" if r.agreement is None else f"{r.agreement.mean():.1%}",
            *gains(gain),
        )
    return table


def gains(comparison: Comparison | None) -> list[str]:
    """Two cells: the gain in loss and in divergence."""
    both = () if comparison is None else (comparison.loss, comparison.divergence)
    cells = ["" if g is None else f"{g.mean:+.4f} {between((g.low, g.high), '+.4f')}" for g in both]
    return [*cells, "", ""][:2]


def between(ends: tuple[float, float], spec: str) -> str:
    """An interval in rich markup, small."""
    return f"[dim]\\[{ends[0]:{spec}}, {ends[1]:{spec}}][/]"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as JSON; numbers that JSON lacks (inf, NaN) become null.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(path=path, rule=error.strerror or str(error), fix="give a file in a folder") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
