"""Perplexity of a language model under every choice of codes: one line of accuracy.jsonl a cell.

    python benchmarks/accuracy.py demo/smollm2 --text demo/enwiki.txt --calibration demo/news.txt \\
        --formats nvfp4 --rotations none sylvester:16 --weights rtn gptq+search --activations coded full

A cell is a format, a rotation, how the weights' codes are chosen and whether the activations are coded. All
linears but lm_head are quantized. Weights or activations that are "full" stay in float32, so that what each side
costs is seen. A rotation that ends in "+signs" has random signs.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import hadaquant as hq
from hadaquant.bench.record import RESULTS, append
from hadaquant.calibrate import METHODS, Recipe, calibrate_, token_batches
from hadaquant.nn.convert import decide, linears_of
from hadaquant.rotation import parse
from hadaquant.study.perplexity import Perplexity, perplexity, read_tokens

WINDOW = 512
SKIP = ("lm_head",)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the table. ``weights`` is ``full`` or a method of calibration; ``recipe`` holds what else it takes."""

    format: str
    rotation: str
    weights: str
    activations: str
    recipe: tuple[tuple[str, object], ...] = ()

    def name(self) -> str:
        """For a file."""
        options = "".join(f"_{key}={value}" for key, value in self.recipe)
        return f"{self.format}_{self.rotation}_{self.weights}_{self.activations}{options}".replace(":", "")


class CodedInputs(nn.Module):
    """A linear in full precision whose inputs are coded and decoded."""

    def __init__(self, linear: nn.Linear, format: hq.Format, rotation: hq.Rotation, backend: str) -> None:
        super().__init__()
        self.linear, self.format, self.rotation, self.backend = linear, format, rotation, backend

    def forward(self, x: Tensor) -> Tensor:
        coded = hq.quantize(x, self.format, rotation=self.rotation, backend=self.backend).dequantize()
        return functional.linear(coded.to(x.dtype), self.linear.weight, self.linear.bias)


def rotation_of(name: str) -> hq.Rotation:
    """A rotation; ``sylvester:64+signs`` has the signs of a fixed seed."""
    spec, plus, _ = name.partition("+")
    plain = parse(spec)
    if not plus:
        return plain
    signs = torch.randint(0, 2, (plain.group,), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return hq.Rotation(plain.kind, plain.group, signs.to(torch.float32))


def decoded(layer: hq.RotatedLinear) -> nn.Linear:
    """A plain linear of the weights that the codes stand for."""
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    linear.weight = nn.Parameter(layer.dequantized_weight(), requires_grad=False)
    if layer.bias is not None:
        linear.bias = layer.bias
    return linear


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Hang a module where a model has another."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def make(model: nn.Module, cell: Cell, batches: list[Tensor], backend: str) -> None:
    """Turn a model in full precision into a cell's."""
    if cell.weights == cell.activations == "full":
        return
    format, rotation = hq.get_format(cell.format), rotation_of(cell.rotation)
    if cell.weights == "full":
        for linear, places in linears_of(model).items():
            fitted, _ = decide(linear, places, format, rotation, SKIP, None)
            if fitted is not None:
                put(model, places[0].name, CodedInputs(linear, format, fitted.to(linear.weight.device), backend))
        return

    def settle(name: str, done: int, total: int) -> None:
        put(model, name, decoded(model.get_submodule(name)))  # type: ignore[arg-type]

    coded = cell.activations == "coded"
    recipe = Recipe(**{"method": cell.weights, **dict(cell.recipe)})
    calibrate_(model, format, rotation, batches, recipe, SKIP, backend=backend, progress=None if coded else settle)


def measure(
    model: nn.Module, cell: Cell, ids: Tensor, batches: list[Tensor], backend: str = "auto"
) -> tuple[dict[str, object], Perplexity]:
    """A cell's row. The model is copied, not changed."""
    model = copy.deepcopy(model)
    make(model, cell, batches, backend)
    found = perplexity(model, ids, WINDOW)
    low, high = found.interval
    row = {
        "tokens": found.losses.numel(),
        "format": cell.format,
        "rotation": cell.rotation,
        "weights": cell.weights,
        "activations": cell.activations,
        "perplexity": round(found.perplexity, 4),
        "low": round(low, 4),
        "high": round(high, 4),
    }
    calibrated = cell.weights not in ("full", "rtn")
    extra = {"windows": len(batches) * batches[0].shape[0], **dict(cell.recipe)} if calibrated else {}
    return row | extra, found


def cells(
    formats: Iterable[str], rotations: Iterable[str], weights: Iterable[str], activations: Iterable[str]
) -> Iterator[Cell]:
    """All combinations, the model in full precision once."""
    rotations, weights, activations = list(rotations), list(weights), list(activations)
    if "full" in weights and "full" in activations:
        yield Cell(format="float32", rotation="none", weights="full", activations="full")
    for f, r, w, a in itertools.product(formats, rotations, weights, activations):
        if (w, a) != ("full", "full"):
            yield Cell(format=f, rotation=r, weights=w, activations=a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", help="of the model, in the records; its folder's unless given")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True, help="never the text that is evaluated")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=64, help="of the calibration text")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--formats", nargs="+", default=["int8", "nvfp4", "mxfp4"])
    parser.add_argument("--rotations", nargs="+", default=["none", "sylvester:16", "sylvester:64"])
    parser.add_argument("--weights", nargs="+", default=["full", *METHODS], choices=["full", *METHODS])
    parser.add_argument("--activations", nargs="+", default=["full", "coded"], choices=["full", "coded"])
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(arguments.device)
    ids = read_tokens(arguments.text, tokenizer, WINDOW, arguments.tokens)
    calibration = read_tokens(arguments.calibration, tokenizer, WINDOW).to(arguments.device)
    batches = token_batches(calibration, WINDOW, arguments.windows, arguments.batch)
    names = {
        "model": arguments.name or arguments.model.name,
        "text": arguments.text.stem,
        "calibration": arguments.calibration.stem,
    }
    for cell in cells(arguments.formats, arguments.rotations, arguments.weights, arguments.activations):
        row, _ = measure(model, cell, ids, batches)
        append(RESULTS / "accuracy.jsonl", [names | row])
        print(row, flush=True)


if __name__ == "__main__":
    main()
