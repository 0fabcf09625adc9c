"""The tables of docs/calibration.md, from benchmarks/results/accuracy.jsonl.

The page is written by hand but for what stands between ``<!-- accuracy: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from study_tables import filled, table

from hadaquant.study.bootstrap import mean_interval

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.jsonl"
PAGE = ROOT / "docs" / "calibration.md"

METHODS = ("rtn", "search", "gptq", "gptq+search")
#: Predicted tokens of the text and of a longer piece of it, in windows of so many.
TOKENS, LONG, WINDOW = 2044, 16352, 511

Line = dict[str, Any]


def lines() -> list[Line]:
    """The newest line of each cell that has its interval."""
    keys = ("library", "tokens", "format", "rotation", "weights", "activations", "gains")
    calibrated = ("calibration", "windows", "damping", "coded_inputs", "stepwise", "act_order")
    found: dict[tuple[Any, ...], Line] = {}
    for text in RESULTS.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["low"] is None:
            continue
        needed = "windows" in line or "gains" in line
        found[tuple(line.get(key) for key in (keys + calibrated if needed else keys))] = line
    return list(found.values())


def pick(found: list[Line], **fields: Any) -> Line | None:
    """The line that has these fields, and no library or gains unless given; the newest of several."""
    fields = {"library": None, "gains": None, **fields}
    return next((x for x in reversed(found) if all(x.get(key) == value for key, value in fields.items())), None)


def number(line: Line | None) -> str:
    """A perplexity."""
    return "–" if line is None else f"{line['perplexity']:.2f}"


def basis(line: Line) -> tuple[str, str]:
    """Format and rotation."""
    return (f"`{line['format']}`", "none" if line["rotation"] == "none" else f"`{line['rotation']}`")


def gain(before: Line | None, after: Line | None) -> str:
    """By how many nats a token the second line's loss is less, paired over pieces of the text."""
    if before is None or after is None or "pieces" not in before or "pieces" not in after:
        return "–"
    windows = before["tokens"] // WINDOW
    sizes = [len(part) for part in torch.arange(WINDOW).tensor_split(len(before["pieces"]) // windows)]
    counts = torch.tensor([size for size in sizes for _ in range(windows)])
    less = torch.tensor(before["pieces"], dtype=torch.float64) - torch.tensor(after["pieces"], dtype=torch.float64)
    low, high = mean_interval(less, counts)
    return f"{less.sum().item() / before['tokens']:+.3f} [{low:+.3f}, {high:+.3f}]"


BASES = (
    ("int8", "none"),
    ("int8", "sylvester:64"),
    ("nvfp4", "none"),
    ("nvfp4", "sylvester:64"),
    ("mxfp4", "none"),
    ("mxfp4", "sylvester:64"),
    ("mxfp4-even", "none"),
    ("mxfp4-even", "sylvester:64"),
)


def cells() -> str:
    """Every cell; of those calibrated on news the newest."""
    found, rows = lines(), []
    for format, rotation in BASES:
        key = {"format": format, "rotation": rotation, "tokens": TOKENS}
        row = [pick(found, **key, weights="full", activations="coded")]
        for activations, method in product(("full", "coded"), METHODS):
            text = {} if method == "rtn" else {"calibration": "news"}
            row.append(pick(found, **key, **text, weights=method, activations=activations))
        rows.append((*basis(key), *map(number, row)))
    head = ("format", "rotation", "inputs alone")
    return table((*head, *(f"weights alone, {m}" for m in METHODS), *(f"both, {m}" for m in METHODS)), rows)


def recipes() -> str:
    """Each calibrated cell of coded weights and inputs with its recipe, beside round-to-nearest."""
    found, rows = lines(), []
    for line in found:
        if line["tokens"] != TOKENS or line.get("library") or not ("windows" in line or line.get("gains")):
            continue
        if line["activations"] != "coded":
            continue
        key = {name: line[name] for name in ("format", "rotation", "tokens", "activations")}
        rtn = pick(found, **key, weights="rtn")
        options = [f"{line['windows']} windows of {line['calibration']}"] if "windows" in line else []
        options += [f"damping {line['damping']}"] if line.get("damping", 0.1) != 0.1 else []
        options += ["inputs as coded"] if line.get("coded_inputs") else []
        method = line["weights"] + (f" and gains, {line['gains']} steps" if line.get("gains") else "")
        ends = f"{line['low']:.1f} … {line['high']:.1f}"
        recipe = ("calibration", "windows", "gains", "damping", "coded_inputs", "gpu")
        long = pick(found, **{**key, "tokens": LONG}, weights=line["weights"], **{r: line.get(r) for r in recipe})
        figures = (number(line), ends, gain(rtn, line), number(long))
        rows.append((*basis(line), method, ", ".join(options), "GPU" if line["gpu"] else "CPU", *figures))
    rows.sort(key=lambda row: (row[0], row[1], row[2], row[5]))
    head = (
        "format",
        "rotation",
        "weights",
        "recipe",
        "on",
        "perplexity",
        "95 %",
        "less loss than rtn",
        f"of {LONG}",
    )
    return table(head, rows)


def others() -> str:
    """Another library's perplexities, and what ours gain over them, piece by piece of the text."""
    found, rows = lines(), []
    for line in found:
        if not line.get("library"):
            continue
        family = line["format"].partition("-")[0]
        ours = [x for x in found if not x.get("library") and "pieces" in x and x["tokens"] == line["tokens"]]
        ours = [x for x in ours if x["activations"] == "coded" and x["weights"] != "full"]
        ours = [x for x in ours if x["format"].partition("-")[0] == family]
        same = {name: line[name] for name in ("format", "rotation", "weights", "tokens", "activations")}
        alike = pick(found, **same, **({"windows": line["windows"]} if "windows" in line else {}), calibration="news")
        plain = min((x for x in ours if not x.get("gains")), key=lambda x: x["perplexity"], default=None)
        fitted = min((x for x in ours if x.get("gains")), key=lambda x: x["perplexity"], default=None)
        theirs = (line["library"], f"`{line['format']}`, {line['rotation']}, {line['weights']}", number(line))
        rows.append((*theirs, *(f"{number(x)}: {gain(line, x)}" if x else "–" for x in (alike, plain, fitted))))
    return table(("library", "what", "perplexity", "ours alike", "our best without gains", "our best with gains"), rows)


TABLES: dict[str, Callable[[], str]] = {"cells": cells, "recipes": recipes, "others": others}


def page() -> str:
    """docs/calibration.md with its tables as they should be."""
    return filled(PAGE, "accuracy", TABLES)
