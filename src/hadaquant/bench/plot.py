"""Results as pictures: speed-up bars, shares of a copy's speed, and a roofline."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hadaquant.bench.report import size
from hadaquant.bench.results import Result, places
from hadaquant.errors import MissingExtra

COLOURS = {
    "ours": "#0b6e4f",
    "ours_front_ends": "#54b38a",
    "ours_compile": "#95d5b2",
    "torch_bf16": "#8d99ae",
    "copy": "#8d99ae",
    "torch_compile": "#e09f3e",
    "torch_then_ours": "#e9c46a",
    "plain_triton": "#bc6c25",
    "plain_triton_tuned": "#dda15e",
    "plain_triton_fused": "#dda15e",
    "cublas": "#7b2d26",
    "comfy": "#6a4c93",
    "sgl": "#3d5a80",
}
LABELS = {
    "ours": "hadaquant",
    "ours_dynamic": "ours, dynamic global scale",
    "ours_tiled": "ours, tiled scales",
    "ours_full": "ours, inputs in full",
    "ours_front_ends": "hadaquant, front ends fused",
    "ours_compile": "hadaquant, front ends and torch.compile",
    "torch_bf16": "torch bfloat16",
    "torch_compile": "torch.compile",
    "torch_then_ours": "torch, then hadaquant's quantize",
    "plain_triton": "plain Triton",
    "plain_triton_tuned": "plain Triton, best tile",
    "plain_triton_fused": "plain Triton, one kernel",
    "cublas": "cuBLASLt and torch",
    "comfy": "comfy-kitchen",
    "sgl": "CUTLASS (sgl_kernel)",
}
#: Variants that are no contestant of their own: other settings of ours.
SETTINGS = ("ours_dynamic", "ours_tiled", "ours_full")


def draw(found: Sequence[Result], folder: Path) -> list[Path]:
    """Draw the newest results into ``folder`` as PNG files, one for each format family and kind of op.

    Returns:
        The files written; none for ops that were not measured.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtra(what="a plot", package="matplotlib", extra="report") from error
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for family in ("int8", "fp4"):
        mine = [result for result in found if (result.case.format == "int8") == (family == "int8")]
        for name, ops, function in (
            ("products", ("linear", "gemm", "block", "block_linears"), _speed_ups),
            ("rows", ("rotate_quantize", "front_end"), _shares),
            ("roofline", ("linear", "gemm", "rotate_quantize"), _roofline),
        ):
            chosen = _best_timed([result for result in mine if result.case.op in ops])
            path = folder / f"speed-{family}-{name}.png"
            if chosen and function(chosen, family.upper(), path):
                written.append(path)
    return written


def _best_timed(found: Sequence[Result]) -> list[Result]:
    """One result a case: by graph where there is one."""
    order = ("do_bench", "wall", "graph")
    best = {result.case: result for result in sorted(found, key=lambda result: order.index(result.timing))}
    return [best[case] for case in dict.fromkeys(result.case for result in found)]


def _words(result: Result) -> tuple[str, ...]:
    case = result.case
    words = (case.format, case.front_end, None if case.rotation == "none" else case.rotation)
    return tuple(word for word in words if word)


def _labels(found: Sequence[Result]) -> tuple[list[str], str]:
    """A label for each result, and the words that all have in common."""
    common = [word for word in _words(found[0]) if all(word in _words(result) for result in found)]
    own = [", ".join(word for word in _words(result) if word not in common) for result in found]
    labels = [f"{size(result.case.shape)}\n{text}".strip() for result, text in zip(found, own, strict=True)]
    return labels, ", ".join(common)


def _bars(axes: Any, part: Sequence[tuple[Result, dict[str, float]]], widest: float) -> None:
    """Horizontal bars, a group for each result, one colour a variant; the number at the end of each bar."""
    at, ticks = 0.0, []
    for _, values in part:
        start = at
        for name, value in values.items():
            axes.barh(at, value, height=0.82, color=COLOURS.get(name, "#444444"), zorder=2)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            weight = "bold" if name.startswith("ours") else "normal"
            place = {"va": "center", "fontsize": 7.5, "fontweight": weight, "bbox": box, "zorder": 4}
            axes.text(value + widest * 0.008, at, f"{value:.2f}", **place)
            at += 1
        ticks.append((start + at - 1) / 2)
        at += 0.7
    found = [result for result, _ in part]
    labels, common = _labels(found)
    op = found[0].op
    axes.set_title(", ".join(filter(None, (f"{op.title}: {op.axes}", common))), fontsize=10, loc="left")
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True)
    axes.set_ylim(at - 0.2, -0.8)
    axes.set_xlim(0, widest * 1.09)
    axes.axvline(1, color="#222222", linewidth=1, linestyle="--", zorder=3)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _where(found: Sequence[Result]) -> str:
    return textwrap.fill("; ".join(places(found)), 150)


def _speed_ups(found: Sequence[Result], family: str, path: Path) -> bool:
    title = f"{family}: how many times as fast as torch in bfloat16"
    return _ratios(found, title, "torch bfloat16's time over the variant's, timed in turns (dashed: equal)", path)


def _shares(found: Sequence[Result], family: str, path: Path) -> bool:
    title = f"{family}: how near to a device copy of the same number of bytes"
    return _ratios(found, title, "the copy's time over the variant's, timed in turns (dashed: the copy)", path)


def _ratios(found: Sequence[Result], title: str, label: str, path: Path) -> bool:
    """Bars of the reference's time over each variant's, axes for each op."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    found = [result for result in found if result.ratio() is not None]
    if not found:
        return False
    ops = dict.fromkeys(result.case.op for result in found)
    parts = [[(result, _values(result)) for result in found if result.case.op == op] for op in ops]
    heights = [sum(len(values) + 0.7 for _, values in part) + 2.2 for part in parts]
    figure = Figure(figsize=(9, 0.185 * sum(heights) + 1.5), layout="constrained", dpi=130)
    all_axes = figure.subplots(len(parts), 1, height_ratios=heights, squeeze=False, sharex=True)[:, 0]
    widest = max(value for part in parts for _, values in part for value in values.values())
    for axes, part in zip(all_axes, parts, strict=True):
        _bars(axes, part, widest)
    all_axes[-1].set_xlabel(label, fontsize=8.5)
    names = dict.fromkeys(name for part in parts for _, values in part for name in values)
    handles = [Patch(color=COLOURS.get(name, "#444444"), label=LABELS.get(name, name)) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(f"{title}\n", fontsize=12, fontweight="bold")
    figure.text(0.5, 0.995, "\n" * 2 + _where(found), ha="center", va="top", fontsize=7.5, color="#555555")
    figure.savefig(path)
    return True


def _values(result: Result) -> dict[str, float]:
    names = (name for name in result.ms if name not in (result.op.reference, *SETTINGS))
    return {name: result.ratio(name) or 0.0 for name in names}


def _roofline(found: Sequence[Result], family: str, path: Path) -> bool:
    """Operations a second over operations a byte, under the fastest copy and the fastest products of these results."""
    from matplotlib.figure import Figure

    copies = [result.bytes / result.ms["copy"] / 1e9 for result in found if result.bytes and "copy" in result.ms]
    products = [result for result in found if result.flops and result.bytes and "ours" in result.ms]
    if not copies or not products:
        return False
    copy = max(copies)  # TB/s
    peaks = {
        name: max((result.flops or 0) / result.ms[name] / 1e9 for result in products if name in result.ms)
        for name in ("ours", "torch_bf16")
        if any(name in result.ms for result in products)
    }
    figure = Figure(figsize=(9, 6.2), layout="constrained", dpi=130)
    axes = figure.subplots()
    intensity = [result.flops / result.bytes for result in products if result.flops and result.bytes]
    left, right = min(intensity) / 1.8, max(intensity) * 1.8
    top = max(peaks.values())
    ridge = top / copy
    axes.plot([left, ridge, right], [left * copy, top, top], color="#222222", linewidth=1.4, zorder=1)
    at = (left * ridge) ** 0.5
    slope = {"rotation": math.degrees(math.atan(copy)), "rotation_mode": "anchor", "transform_rotates_text": True}
    axes.text(at, at * copy * 1.06, f"device copy, {copy:.2f} TB/s", fontsize=8.5, va="bottom", ha="center", **slope)
    for name, peak in peaks.items():
        axes.axhline(peak, color=COLOURS[name], linewidth=1, linestyle=":", zorder=1)
        text = f"fastest product in {family if name == 'ours' else 'bfloat16'}"
        axes.text(left * 1.15, peak * 1.04, f"{text}, {peak:.0f} TOPS", fontsize=8.5, color=COLOURS[name])
    for name, marker in (("torch_bf16", "s"), ("plain_triton", "^"), ("ours", "o")):
        for op, filled in (("gemm", False), ("linear", True)):
            chosen = [r for r in products if r.case.op == op and name in r.ms]
            xs = [(r.flops or 0) / (r.bytes or 1) for r in chosen]
            ys = [(r.flops or 0) / r.ms[name] / 1e9 for r in chosen]
            if xs:
                label = f"{LABELS[name]}, {'whole linear' if filled else 'product alone'}"
                face = COLOURS[name] if filled else "white"
                axes.scatter(
                    xs, ys, s=34, marker=marker, facecolors=face, edgecolors=COLOURS[name], label=label, zorder=3
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(None, top * 1.7)
    axes.set_xlabel(f"operations a byte of {family}'s least traffic: input, weight and output once", fontsize=9)
    axes.set_ylabel("achieved, 10¹² operations a second", fontsize=9)
    axes.grid(which="major", color="#dddddd", linewidth=0.6, zorder=0)
    axes.legend(loc="lower right", fontsize=8.5, frameon=True)
    axes.set_title(f"{family} products under the measured roofs", fontsize=12, fontweight="bold", pad=22)
    axes.text(0.5, 1.015, _where(found), transform=axes.transAxes, ha="center", fontsize=7.5, color="#555555")
    figure.savefig(path)
    return True
