"""Record what a study found: its figures as lines of study.jsonl, those of the known tensors with them.

    hadaquant study demo/smollm2 --calibration demo/news.txt --text demo/enwiki.txt --tokens 4096 --bits 4.6 --out OUT
    python benchmarks/study.py OUT

Lines have a ``kind``: ``case`` (a known tensor in a format, plain and rotated), ``maxima`` (how well the largest number
of each block is coded, and the others), ``layers`` (a format and rotation, the mean over a model's layers),
``outliers`` (an input of those with the largest), ``verdict`` (a format, by the layers and by the model), ``trial`` (a
variant of the model) and ``plan``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from hadaquant import quantize, reference, rotate
from hadaquant.bench.record import RESULTS, append
from hadaquant.study import all_cases, sweep, wide_cases
from hadaquant.study.layers import LayerResult
from hadaquant.study.page import means, plan_counts


def rounded(value: Any) -> Any:
    """Six digits are more than any figure is sure of."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def cases() -> Iterator[dict[str, Any]]:
    """The known tensors."""
    for row in sweep(all_cases()):
        yield {"kind": "case", **row.to_dict()}


def maxima() -> Iterator[dict[str, Any]]:
    """Energy and error of the largest number of each block, and the others' error, in the rotated basis."""
    for case, format, rotation in product(wide_cases(), ("nvfp4", "mxfp4", "mxfp4-even"), ("none", "sylvester:16")):
        q = quantize(case.x, format, rotation=rotation)
        y = rotate(case.x, rotation)
        decoded = reference.decode(q.codes, q.scales, q.global_scale, q.format)
        signal, noise = (t.double().square().view(-1, q.format.block or y.shape[1]) for t in (y, decoded - y))
        largest = torch.zeros_like(signal, dtype=torch.bool).scatter_(1, signal.argmax(1, keepdim=True), True)
        yield {
            "kind": "maxima",
            "case": case.name,
            "format": format,
            "rotation": rotation,
            "share": (signal[largest].sum() / signal.sum()).item(),
            "largest_error": (noise[largest].sum() / signal[largest].sum()).sqrt().item(),
            "others_error": (noise[~largest].sum() / signal[~largest].sum()).sqrt().item(),
            "error": (noise.sum() / signal.sum()).sqrt().item(),
        }


def study(folder: Path) -> Iterator[dict[str, Any]]:
    """A model's study."""
    found = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    settings = found["settings"]
    names = {"model": settings["model"], "calibration": settings["calibration"], "text": found["text"]}
    results = [LayerResult.from_dict(layer) for layer in found["layers"]]
    for mean in means(results):
        yield {"kind": "layers", **names, **mean}
    inputs = [r for r in results if r.cells and r.reads == r.name]
    for result in sorted(inputs, key=lambda r: r.ratio, reverse=True)[:5]:
        spreads = {name: {"ratio": s.ratio, "kurtosis": s.kurtosis} for name, s in result.inputs.items()}
        yield {"kind": "outliers", **names, "layer": result.name, "ratio": result.ratio, "sample": spreads}
    tested = {line["format"]: line for line in found["tested"] or ()}
    for verdict in found["formats"]:
        model = tested.get(verdict["format"], {})
        yield {"kind": "verdict", **names, **verdict, "model_helps": model.get("helps"), "status": model.get("status")}
    gains = {(f, rotation): gain for f, line in tested.items() for rotation, gain in line["gains"].items()}
    for trial in found["trials"]:
        speed = ("seconds", "tokens_per_second")
        figures = {key: value for key, value in trial.items() if key not in speed}
        gain = gains.get((trial["format"], trial["rotation"]))
        bits = found["plan"]["bits"] if trial["format"] == "plan" else None
        yield {"kind": "trial", **names, **figures, "gain": gain, "bits": bits}
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    yield {"kind": "plan", **names, **found["plan"], "counts": dict(plan_counts(plan["layers"].values()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of studies of models")
    arguments = parser.parse_args()
    rows = [*cases(), *maxima(), *(row for folder in arguments.folders for row in study(folder))]
    append(RESULTS / "study.jsonl", map(rounded, rows))


if __name__ == "__main__":
    main()
