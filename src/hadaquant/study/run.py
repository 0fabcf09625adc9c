"""A layer study of a model folder, written layer by layer, so that a killed run goes on where it was.

In the study's folder: ``settings.json``, ``layers.jsonl`` with a :class:`LayerResult` a line, ``models.jsonl`` with a
variant's perplexity a line, and what is made of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hadaquant._version import __version__
from hadaquant.calibrate import InputStatistics, capture, token_batches
from hadaquant.checkpoint import hf
from hadaquant.checkpoint.linears import find_linears
from hadaquant.checkpoint.source import Checkpoint, write_json
from hadaquant.checkpoint.unquantized import check_unquantized
from hadaquant.errors import CheckpointError, LayerError
from hadaquant.nn.select import DEFAULT_SKIP, check_patterns, skipped_by
from hadaquant.study.layers import LayerResult, measure

#: ``progress(layer, done, total)``
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the results of a study depend on.

    ``calibration`` and its ``digest``: the file's name and a hash of its tokens. ``windows`` of ``window`` tokens are
    spread over it (as many as are used, not more than it holds), and ``rows`` inputs of each linear are kept of them.
    """

    model: str
    fingerprint: str
    calibration: str
    digest: str
    formats: tuple[str, ...]
    rotations: tuple[str, ...]
    windows: int = 16
    window: int = 512
    rows: int = 256
    hadaquant: str = __version__
    torch: str = torch.__version__

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON."""
        return json.loads(json.dumps(asdict(self)))


def digest(ids: Tensor) -> str:
    """A short hash of token ids."""
    return hashlib.sha256(ids.to(torch.int64).numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Linears:
    """The linears of a checkpoint to study.

    ``names``: the model's name of each, by its name in the checkpoint, in the model's order. ``kept``: why the
    others are left alone. ``stored``: weights and bits of each of them all, as it is stored.
    """

    names: Mapping[str, str]
    kept: Mapping[str, str]
    stored: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def linears_of(
    checkpoint: Checkpoint, model: nn.Module, skip: Sequence[str] = DEFAULT_SKIP, only: Sequence[str] = ()
) -> Linears:
    """The linears that ``quantize`` would find, less those that ``skip`` matches or ``only`` does not.

    Raises:
        LayerError: there is none.
        PatternError: a pattern matches no linear.
        AlreadyQuantized: the checkpoint is quantized.
    """
    check_unquantized(checkpoint)
    why_not, _ = find_linears(checkpoint)
    linears = [name.removesuffix(".weight") for name, reason in why_not.items() if reason is None]
    check_patterns((*skip, *only), linears)
    kept = {}
    for layer in linears:
        pattern = skipped_by(layer, skip)
        if pattern is not None:
            kept[layer] = f"matches skip pattern '{pattern}'"
        elif only and skipped_by(layer, only) is None:
            kept[layer] = "not among the layers that were studied"
    chosen = [layer for layer in linears if layer not in kept]
    if not chosen:
        reasons = "; ".join(dict.fromkeys((*kept.values(), *(r for r in why_not.values() if r)))) or "it has no weight"
        raise LayerError(layer=checkpoint.path, rule=f"holds no linear to study ({reasons})", fix="give another model")
    targets = hf.model_names(model, [f"{layer}.weight" for layer in chosen])
    names = {layer: str(targets[f"{layer}.weight"]).removesuffix(".weight") for layer in chosen}
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    tensors = {layer: checkpoint.tensors[f"{layer}.weight"] for layer in linears}
    return Linears(
        names=dict(sorted(names.items(), key=lambda item: order.get(item[1], -1))),
        kept=kept,
        stored={layer: (math.prod(tensor.shape), 8 * tensor.nbytes) for layer, tensor in tensors.items()},
    )


@dataclass(frozen=True)
class StudyFolder:
    """The folder of a study."""

    path: Path

    def begin(self, settings: Settings) -> None:
        """Make the folder, or find it as a run with the same settings left it.

        Raises:
            CheckpointError: it belongs to a study with other settings, or is no study's.
        """
        file = self.path / "settings.json"
        if file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            asked = settings.to_dict()
            others = [f"{k} {found.get(k)!r}, now {asked[k]!r}" for k in asked if found.get(k) != asked[k]]
            if others:
                rule = f"holds a study with other settings ({'; '.join(others)})"
                raise CheckpointError(path=self.path, rule=rule, fix="give another --out, or remove the folder")
            return
        if self.path.exists() and any(self.path.iterdir()):
            raise CheckpointError(path=self.path, rule="is not empty and holds no study", fix="give another --out")
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(path=self.path, rule=error.strerror, fix="give a folder in a folder") from error
        write_json(file, settings.to_dict())

    def layers(self) -> dict[str, LayerResult]:
        """The layers that are done, by name."""
        return {line["name"]: LayerResult.from_dict(line) for line in self.lines("layers.jsonl")}

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The lines of a file of results. The end of a line that a killed run left is cut off."""
        file = self.path / name
        if not file.exists():
            return
        text = file.read_text(encoding="utf-8")
        whole, _, rest = text.rpartition("\n")
        if rest:
            file.write_text(whole + "\n" if whole else "", encoding="utf-8")
        for line in whole.splitlines():
            yield json.loads(line)

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Add a line to a file of results."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def study_layers(
    folder: StudyFolder,
    settings: Settings,
    model: nn.Module,
    linears: Linears,
    ids: Tensor,
    progress: Progress = lambda name, done, total: None,
) -> list[LayerResult]:
    """Measure each linear that is not done yet, and write it down; all results, in the model's order.

    Memory: the model, the inputs of one block and a sample of each of its linears.

    Args:
        folder: begun with ``settings``.
        model: unquantized.
        ids: int64 [T] tokens of the calibration text.

    Raises:
        ShapeError: fewer tokens than a window.
        LayerError: no linear could be measured.
    """
    done = folder.layers()
    stored = {target: layer for layer, target in linears.names.items()}
    total = len(stored)
    if any(layer not in done for layer in linears.names):
        batches = token_batches(ids, settings.window, settings.windows)
        for step in capture(model, batches, stored, rows=settings.rows):
            first: dict[int, str] = {}
            for target, seen in step.items():
                layer = stored[target]
                reads = first.setdefault(id(seen), layer)
                if layer not in done:
                    progress(layer, len(done), total)
                    weight = model.get_submodule(target).weight
                    done[layer] = _layer(layer, reads, seen, weight, settings)  # type: ignore[arg-type]
                    folder.append("layers.jsonl", done[layer].to_dict())
                progress(layer, len(done), total)
    results = [done[layer] for layer in linears.names]
    if not any(result.cells for result in results):
        reasons = "; ".join(f"{r.name}: {r.skipped}" for r in results[:4])
        raise LayerError(layer=settings.model, rule=f"no linear could be measured ({reasons})", fix="see the reasons")
    return results


def _layer(name: str, reads: str, seen: InputStatistics, weight: Tensor, settings: Settings) -> LayerResult:
    weight = weight.detach().to(torch.float32)
    median = seen.absmax.median().item()
    ratio = seen.absmax.max().item() / median if median else 0.0
    fields = {"reads": reads, "tokens": seen.count + seen.nonfinite, "nonfinite": seen.nonfinite, "ratio": ratio}
    if seen.count:
        return measure(name, seen.sample, weight, settings.formats, settings.rotations, **fields)
    why = f"all of its {seen.nonfinite} inputs hold NaN or Inf" if seen.nonfinite else "the text never calls it"
    return LayerResult(name=name, shape=(weight.shape[0], weight.shape[1]), skipped=why, **fields)
