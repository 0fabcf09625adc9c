"""The pictures of a study, as PNG bytes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from hadaquant.checkpoint.contents import number_free
from hadaquant.errors import MissingExtra
from hadaquant.study.layers import LayerResult
from hadaquant.study.perplexity import Comparison
from hadaquant.study.trials import FULL, Trial

INK, FAINT, BEFORE, AFTER = "#1c2430", "#8a94a3", "#d1495b", "#2274a5"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c8ced6",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#4a5462",
    "ytick.color": "#4a5462",
}
_WIDTH, _DPI = 11.0, 150


@contextmanager
def _pyplot() -> Iterator[Any]:
    """matplotlib's pyplot, in our style and without a window."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra(what="the report's pictures", package="matplotlib", extra="report") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        yield pyplot
        pyplot.close("all")


def _png(figure: Any) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=_DPI, metadata={"Software": None})
    return data.getvalue()


def kind_of(layer: str) -> str:
    """What a layer is, whichever block it is in: its name from the last number on."""
    return re.split(r"\d+\.", layer)[-1] if re.search(r"\d+\.", layer) else number_free(layer)


def by_kind(results: Sequence[LayerResult]) -> list[LayerResult]:
    """Layers of one kind together, kinds in the order in which they come first."""
    kinds = list(dict.fromkeys(kind_of(r.name) for r in results))
    return sorted(results, key=lambda r: kinds.index(kind_of(r.name)))


def heat_map(results: Sequence[LayerResult]) -> bytes:
    """Every layer × rotation, a panel a format: by how many decibels the output's noise falls."""
    results = by_kind([r for r in results if r.cells])
    formats = list(dict.fromkeys(f for r in results for f in r.formats))
    asked = list(dict.fromkeys(a for r in results for c in r.cells for a in c.asked if a != "none"))
    grids = {
        f: [[cell.gain_db if (cell := r.under(f, a)) else math.nan for r in results] for a in asked] for f in formats
    }
    spread = sorted(abs(v) for grid in grids.values() for row in grid for v in row if not math.isnan(v))
    limit = max(1.0, spread[int(0.97 * (len(spread) - 1))]) if spread else 1.0
    height = 1.0 + len(formats) * (0.55 + 0.24 * max(1, len(asked)))
    with _pyplot() as pyplot:
        from matplotlib.colors import SymLogNorm

        # linear to one decibel: both two and ten are to be seen
        norm = SymLogNorm(linthresh=1, linscale=0.7, vmin=-limit, vmax=limit, base=10)
        figure, axes = pyplot.subplots(len(formats), 1, figsize=(_WIDTH, height), sharex=True, squeeze=False)
        image = None
        for i, (axis, format) in enumerate(zip(axes[:, 0], formats, strict=True)):
            image = axis.imshow(grids[format], cmap="RdBu", norm=norm, aspect="auto", interpolation="nearest")
            axis.set_title(format, pad=18 if i == 0 else 6)
            axis.set_yticks(range(len(asked)), asked, fontsize=8)
            axis.set_facecolor("#e9ecf0")
            axis.tick_params(length=0)
            _sections(axis, results, labels=i == 0)
        axes[-1, 0].set_xticks([])
        axes[-1, 0].set_xlabel("layers of each kind, first block to last", fontsize=8)
        if image is not None:
            marks = [v for v in (-20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20) if abs(v) <= limit]
            bar = figure.colorbar(image, ax=axes[:, 0], fraction=0.03, pad=0.012, extend="both", ticks=marks)
            bar.ax.set_yticklabels([f"{v:+d}" if v else "0" for v in marks])
            bar.ax.minorticks_off()
            bar.set_label("gain over no rotation, dB", fontsize=8)
            bar.outline.set_visible(False)
        return _png(figure)


def _sections(axis: Any, results: Sequence[LayerResult], *, labels: bool) -> None:
    start = 0
    for kind, group in groupby(results, key=lambda r: kind_of(r.name)):
        count = len(list(group))
        if start:
            axis.axvline(start - 0.5, color="white", linewidth=2)
        if labels:
            axis.text(start + count / 2 - 0.5, -0.7, kind, ha="center", va="bottom", fontsize=7.5, color="#4a5462")
        start += count


def outliers(results: Sequence[LayerResult], count: int = 4) -> bytes | None:
    """Channel maxima of the inputs with the largest outliers, before and after the rotation that evens them most."""
    found = {r.reads: r for r in reversed(results) if len(r.inputs) > 1}
    worst = sorted(found.values(), key=lambda r: r.inputs["none"].ratio, reverse=True)[:count]
    if not worst:
        return None
    columns = 2 if len(worst) > 1 else 1
    rows = -(-len(worst) // columns)
    with _pyplot() as pyplot:
        figure, axes = pyplot.subplots(rows, columns, figsize=(_WIDTH, 2.7 * rows), squeeze=False)
        for axis in axes.flat[len(worst) :]:
            axis.set_visible(False)
        for axis, result in zip(axes.flat, worst, strict=False):
            before = result.inputs["none"]
            name = min((n for n in result.inputs if n != "none"), key=lambda n: result.inputs[n].ratio)
            after, k = result.inputs[name], result.shape[1]
            for spread, colour, label in ((before, BEFORE, "as it is"), (after, AFTER, name)):
                place = [(i + 0.5) * k / len(spread.profile) for i in range(len(spread.profile))]
                axis.fill_between(place, [max(v, 1e-6) for v in spread.profile], 1e-9, color=colour, alpha=0.16, lw=0)
                text = f"{label}: largest/median {spread.ratio:.3g}, kurtosis {spread.kurtosis:.3g}"
                axis.plot(place, spread.profile, color=colour, linewidth=1.1, label=text)
            positive = [v for v in (*before.profile, *after.profile) if v > 0]
            axis.set_yscale("log")
            axis.set_ylim(min(positive) / 1.6, max(positive) * 8)
            axis.set_xlim(0, k)
            axis.set_title(f"input of {result.name}", fontsize=9)
            axis.legend(loc="upper left", frameon=False, fontsize=7.5)
            axis.set_xlabel("channel", fontsize=8)
        axes[0, 0].set_ylabel("largest magnitude", fontsize=8)
        return _png(figure)


def perplexities(trials: Sequence[Trial]) -> bytes:
    """Perplexity and distance from the full model of each variant."""
    full, others = trials[0], trials[1:]
    labels = [t.format if t.format == FULL else f"{t.format}, {t.rotation}" for t in trials]
    with _pyplot() as pyplot:
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(_WIDTH, 1.1 + 0.3 * len(trials)), sharey=True)
        base = full.result.perplexity
        for i, trial in enumerate(trials):
            value = trial.result.perplexity
            left.barh(i, value, color=_colour(trial), height=0.7)
            end = value
            if trial is not full:
                loss = Comparison.of(full.result, trial.result).loss
                ends = [base * math.exp(-loss.high), base * math.exp(-loss.low)]
                left.plot(ends, [i, i], color=INK, linewidth=1.1, solid_capstyle="butt")
                end = max(value, ends[1])
            left.annotate(f"{value:.2f}", (end, i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        left.axvline(base, color=FAINT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
        left.set_title("perplexity")
        left.set_yticks(range(len(labels)), labels)
        left.set_xlim(0, 1.18 * max(t.result.perplexity for t in trials))
        left.invert_yaxis()
        for i, trial in enumerate(others, 1):
            divergence = trial.result.divergence
            if divergence is not None:
                value, (low, high) = divergence.mean().item(), trial.result.over_windows(divergence)
                right.barh(i, value, color=_colour(trial), height=0.7)
                right.plot([low, high], [i, i], color=INK, linewidth=1.1)
                right.annotate(
                    f"{value:.4f}", (high, i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
                )
        right.set_xscale("log")
        low, high = right.get_xlim()
        right.set_xlim(low, high * 2.5)
        right.set_title("KL from full precision, nats a token")
        for axis in (left, right):
            axis.tick_params(axis="y", length=0)
        return _png(figure)


def _colour(trial: Trial) -> str:
    if trial.format == FULL:
        return "#4a5462"
    if trial.rotation == "none":
        return "#b9c2cd"
    return "#2f9e6e" if trial.format == "plan" else AFTER
