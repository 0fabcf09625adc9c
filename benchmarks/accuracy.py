"""Perplexity of a language model under every choice of codes: one line of accuracy.jsonl a cell.

    python benchmarks/accuracy.py demo/smollm2 --text demo/enwiki.txt --calibration demo/news.txt \\
        --formats nvfp4 --rotations none sylvester:16 --weights rtn gptq+search --activations coded full

A cell is a format, a rotation, how the weights' codes are chosen and whether the activations are coded. All
linears but lm_head are quantized. Weights or activations that are "full" stay in float32, so that what each side
costs is seen. A rotation that ends in "+signs" has random signs; weights that end in "+gains" have the norms' gains
fitted too. A calibration text may start at a token: demo/enwiki.txt@100000. Several share the windows.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import hadaquant as hq
from hadaquant.bench.record import RESULTS, append
from hadaquant.calibrate import METHODS, Recipe, calibrate_, fit_gains_, token_batches
from hadaquant.nn.convert import decide, linears_of
from hadaquant.rotation import parse
from hadaquant.study.perplexity import Perplexity, perplexity, read_tokens

WINDOW = 512
SKIP = ("lm_head",)
#: Windows a step, and steps, of the norms' gains.
GAINS_BATCH, GAINS_STEPS = 1, 48


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the table.

    ``weights`` is ``full`` or a method of calibration; ``recipe`` holds what else it takes. ``gains``: steps that the
    norms' gains are fitted for.
    """

    format: str
    rotation: str
    weights: str
    activations: str
    recipe: tuple[tuple[str, object], ...] = ()
    gains: int = 0


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
    full, model = model, copy.deepcopy(model)
    make(model, cell, batches, backend)
    if cell.gains:
        fit_gains_(model, full, torch.cat(batches).split(GAINS_BATCH), steps=cell.gains)
    found = perplexity(model, ids, WINDOW)
    low, high = found.interval
    row: dict[str, object] = {
        "tokens": found.losses.numel(),
        "format": cell.format,
        "rotation": cell.rotation,
        "weights": cell.weights,
        "activations": cell.activations,
        "perplexity": round(found.perplexity, 4),
        "low": round(low, 4),
        "high": round(high, 4),
    }
    if cell.weights not in ("full", "rtn"):
        row |= {"windows": len(batches) * batches[0].shape[0], **asdict(Recipe()), **dict(cell.recipe)}
        del row["method"]
    if cell.gains:
        row["gains"] = cell.gains
    return row | {"pieces": [round(nats, 3) for nats in found.pieces[0].tolist()]}, found


def cells(
    formats: Iterable[str], rotations: Iterable[str], weights: Iterable[str], activations: Iterable[str]
) -> Iterator[Cell]:
    """All combinations, the model in full precision once."""
    rotations, weights, activations = list(rotations), list(weights), list(activations)
    if "full" in weights and "full" in activations:
        yield Cell(format="float32", rotation="none", weights="full", activations="full")
    for f, r, w, a in itertools.product(formats, rotations, weights, activations):
        method, plus, _ = w.partition("+gains")
        if (w, a) != ("full", "full"):
            yield Cell(format=f, rotation=r, weights=method, activations=a, gains=GAINS_STEPS if plus else 0)


def calibration(texts: list[str], tokenizer: object, windows: int, batch: int) -> list[Tensor]:
    """Batches of windows spread evenly over texts, which share them; a text may start at a token."""
    rows = []
    for text in texts:
        path, _, start = text.partition("@")
        ids = read_tokens(Path(path), tokenizer, WINDOW)[int(start or 0) :]
        rows += token_batches(ids, WINDOW, windows // len(texts), 1)
    return list(torch.cat(rows).split(batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", help="of the model, in the records; its folder's unless given")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", nargs="+", required=True, help="never what is evaluated; TEXT or TEXT@TOKEN")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=64, help="of the calibration text")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--formats", nargs="+", default=["int8", "nvfp4", "mxfp4"])
    parser.add_argument("--rotations", nargs="+", default=["none", "sylvester:16", "sylvester:64"])
    parser.add_argument("--weights", nargs="+", default=["full", *METHODS], help="full, a method, METHOD+gains")
    parser.add_argument("--activations", nargs="+", default=["full", "coded"], choices=["full", "coded"])
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(arguments.device)
    ids = read_tokens(arguments.text, tokenizer, WINDOW, arguments.tokens)
    batches = calibration(arguments.calibration, tokenizer, arguments.windows, arguments.batch)
    batches = [batch.to(arguments.device) for batch in batches]
    names = {
        "model": arguments.name or arguments.model.name,
        "text": arguments.text.stem,
        "calibration": "+".join(text.replace(".txt", "").rpartition("/")[2] for text in arguments.calibration),
    }
    for cell in cells(arguments.formats, arguments.rotations, arguments.weights, arguments.activations):
        row, _ = measure(model, cell, ids, batches)
        append(RESULTS / "accuracy.jsonl", [names | row])
        print(row, flush=True)


if __name__ == "__main__":
    main()
