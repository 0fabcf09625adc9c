"""The tables of docs/does-rotation-help.md, from benchmarks/results/study.jsonl.

The page is written by hand but for what stands between ``<!-- study: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "study.jsonl"
PAGE = ROOT / "docs" / "does-rotation-help.md"

Line = dict[str, Any]


def latest(kind: str) -> list[Line]:
    """The lines of a kind, of the last time it was recorded."""
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line["kind"] == kind]
    keys = ("case", "model", "layer", "format", "rotation", "bits")
    return list({tuple(line.get(key) for key in keys): line for line in found}.values())


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in (head, ["---"] * len(head), *rows))


def cases() -> str:
    """Decibels of the known tensors, plain and rotated."""
    lines = {(x["case"], x["format"], x["rotation"]): x for x in latest("case")}
    formats = ("nvfp4", "mxfp4", "int8")

    def cell(case: str, format: str, rotation: str) -> str:
        line = lines[case, format, rotation]
        return f"{line['plain_db']:.1f} → {line['rotated_db']:.1f}, {line['helps']}"

    shown = dict.fromkeys((case, r) for case, _, r in lines if r != "matrix:16")
    return table(("input", "rotation", *formats), ((c, f"`{r}`", *(cell(c, f, r) for f in formats)) for c, r in shown))


def maxima() -> str:
    """How well the largest number of a block is coded, and the others."""
    rows = [
        (
            x["case"],
            x["format"],
            f"`{x['rotation']}`",
            f"{x['share']:.0%}",
            *(f"{x[key]:.1%}" for key in ("largest_error", "others_error", "error")),
        )
        for x in latest("maxima")
        if x["case"] != "laplace" and x["format"] != "mxfp4-even"
    ]
    head = ("input", "format", "rotation", "energy in the blocks' largest", "their error", "error of the others")
    return table((*head, "in all"), rows)


def layers() -> str:
    """Decibels of a model's layers, the mean over them."""
    keys = ("db", "quiet_db", "weights_db", "inputs_db")
    rows = [(x["format"], f"`{x['rotation']}`", *(f"{x[key]:.1f}" for key in keys)) for x in latest("layers")]
    return table(("format", "rotation", "output", "its quieter half", "weights only", "inputs only"), rows)


def verdicts() -> str:
    """What layers and model say."""
    rows = [
        (
            x["format"],
            *(x["layers"][answer] for answer in ("yes", "no", "no difference")),
            f"`{x['rotation']}`",
            f"{-x['gain_db']:+.1f}",
            x["helps"],
            f"{x['model_helps']}: {x['status']}",
        )
        for x in latest("verdict")
    ]
    head = ("format", "layers: yes", "no", "no difference", "best for all", "noise, dB", "so the layers", "the model")
    return table(head, rows)


def trials() -> str:
    """Perplexity and KL of a model's variants."""
    rows = []
    for x in latest("trial"):
        gain = x["gain"]["loss"] if x["gain"] else None
        paired = f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]" if gain else ""
        kl, same = (f"{x['divergence']:.4f}", f"{x['agreement']:.1%}") if "divergence" in x else ("", "")
        name = f"plan, {x['bits']:.2f} bits" if x["bits"] else x["format"]
        rotation = x["rotation"] if " " in x["rotation"] else f"`{x['rotation']}`"
        rows.append((name, rotation, f"{x['perplexity']:.2f}", kl, same, paired))
    return table(("format", "rotation", "perplexity", "KL", "same token", "gain in loss over no rotation"), rows)


def outliers() -> str:
    """Largest over median channel of the worst inputs: of all tokens, of the sample, and rotated."""
    rows = []
    for x in latest("outliers"):
        plain, *rotated = x["sample"].items()
        even = min(rotated, key=lambda item: item[1]["ratio"])
        rows.append(
            (x["layer"], *(f"{r:.0f}" for r in (x["ratio"], plain[1]["ratio"])), f"{even[1]['ratio']:.1f}, `{even[0]}`")
        )
    return table(("input of", "all tokens", "sample", "sample, rotated"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "cases": cases,
    "maxima": maxima,
    "layers": layers,
    "verdicts": verdicts,
    "trials": trials,
    "outliers": outliers,
}


def page() -> str:
    """docs/does-rotation-help.md with its tables as they should be."""
    return filled(PAGE, "study", TABLES)


def filled(path: Path, of: str, tables: dict[str, Callable[[], str]]) -> str:
    """A page with its tables as they should be, each between ``<!-- OF: NAME -->`` and ``<!-- end of NAME -->``."""
    text = path.read_text(encoding="utf-8")
    for name, make in tables.items():
        begin, end = f"<!-- {of}: {name} -->\n", f"<!-- end of {name} -->"
        text = re.sub(f"{begin}.*?{end}", lambda _, b=begin, e=end, m=make: b + m() + e, text, flags=re.DOTALL)
    return text
