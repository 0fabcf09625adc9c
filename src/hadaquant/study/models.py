"""Perplexity of model folders side by side: each source once, then what was quantized from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hadaquant.checkpoint.layouts import layout_of
from hadaquant.checkpoint.model_plan import fingerprint
from hadaquant.checkpoint.record import CalibrationRecord
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.errors import CheckpointError, LayerError, MissingExtra, PredictionError
from hadaquant.nn import RotatedLinear
from hadaquant.study.metrics import Helps
from hadaquant.study.perplexity import Comparison, Full, Perplexity, logits_of, perplexity, read_tokens
from hadaquant.study.run import digest

#: What is needed where a model is to be run.
_FOLDER = "give a folder with config.json, tokenizer and weights, as running a model needs all three"


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A folder with config.json and weights.

    ``source`` is the folder a quantized one says it was made from, and ``source_fingerprint`` of which weights, where
    it says so; ``nbytes`` the size of the weights; ``calibration`` how its codes were made, where they are not the
    nearest.
    """

    path: Path
    quantized: bool
    source: Path | None
    nbytes: int
    calibration: CalibrationRecord | None = None
    source_fingerprint: str | None = None

    @classmethod
    def open(cls, path: Path) -> ModelFolder:
        """Read a folder's headers.

        Raises:
            CheckpointError: no folder but a file or nothing, no config.json, no weights.
        """
        if not path.is_dir():
            rule = "is a file, not a folder" if path.exists() else "no such folder"
            raise CheckpointError(path=path, rule=rule, fix=_FOLDER)
        checkpoint = Checkpoint.open(path)
        if checkpoint.config is None:
            raise CheckpointError(path=path, rule="holds no config.json", fix="give a folder of a language model")
        record = next(iter(checkpoint.records.values()), None)
        recorded = None if record is None else record.source
        return cls(
            path=path,
            quantized=layout_of(checkpoint) is not None,
            source=None if recorded is None else Path(recorded),
            nbytes=checkpoint.nbytes,
            calibration=None if record is None else record.calibration,
            source_fingerprint=None if record is None else record.source_fingerprint,
        )

    def load(self, device: str = "cpu") -> nn.Module:
        """The model, in float32 where it is not quantized.

        Raises:
            CheckpointError, LayerError: the weights cannot be read as what they say they are.
            MissingExtra: transformers is not installed.
        """
        if self.quantized:
            from hadaquant.checkpoint import load

            return load(self.path, device=device, dtype=torch.float32)
        auto = _transformers().AutoModelForCausalLM
        return auto.from_pretrained(self.path, dtype=torch.float32, local_files_only=True).to(device)

    def tokenizer(self) -> Any:
        """The folder's tokenizer.

        Raises:
            CheckpointError: there is none.
            MissingExtra: transformers is not installed.
        """
        auto = _transformers().AutoTokenizer
        try:
            return auto.from_pretrained(self.path, local_files_only=True)
        except (OSError, ValueError) as error:
            rule = "holds no tokenizer that transformers can read"
            fix = "copy tokenizer.json, tokenizer_config.json and what else its source has into it"
            raise CheckpointError(path=self.path, rule=rule, fix=fix) from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra(what="loading a model folder", package="transformers", extra="models") from error
    # what is loading shows in the caller's table, not as bars across it
    transformers.utils.logging.disable_progress_bar()
    return transformers


def with_sources(folders: Iterable[Path], source: Path | None = None) -> list[ModelFolder]:
    """The folders, each quantized one after its source. No folder comes twice.

    Args:
        folders: quantized or plain.
        source: of all quantized ones, instead of what they say.

    Raises:
        CheckpointError: a folder cannot be read, or a source is not where the quantized folder says.
    """
    found: dict[Path, ModelFolder] = {}
    if source is not None:
        ModelFolder.open(source)
    for path in folders:
        folder = ModelFolder.open(path)
        origin = source if source is not None else folder.source
        if folder.quantized and origin is not None and origin.resolve() not in found:
            if not origin.is_dir():
                what, fix = "is not there", "say where it is with --source"
                if origin.exists():
                    what, fix = "is a file, not a folder", f"by --source, {_FOLDER}"
                raise CheckpointError(path=path, rule=f"its source {str(origin)!r} {what}", fix=fix)
            found[origin.resolve()] = ModelFolder.open(origin)
        found.setdefault(path.resolve(), replace(folder, source=origin))
    return list(found.values())


def check_sources(folders: Iterable[ModelFolder]) -> None:
    """Refuse a source with other weights than a folder was quantized from. Reads each source's weights once.

    A folder that does not say from which weights it was made is taken as it is.

    Raises:
        CheckpointError.
    """
    weights = cache(lambda path: fingerprint(Checkpoint.open(path)))
    for folder in folders:
        made_from, source = folder.source_fingerprint, folder.source
        if made_from is not None and source is not None and weights(source.resolve()) != made_from:
            rule = f"was quantized from other weights than those that {str(source)!r} holds"
            fix = "give the model that it was made from by --source, or quantize this one again"
            raise CheckpointError(path=folder.path, rule=rule, fix=fix)


def check_never_calibrated_on(folders: Iterable[ModelFolder], text: Path) -> None:
    """Refuse a text that one of the models was calibrated on.

    Raises:
        CheckpointError.
    """
    for folder in folders:
        made = folder.calibration
        if made is not None and digest(read_tokens(text, folder.tokenizer(), 1)) == made.digest:
            rule = f"is the text that {folder.path} was calibrated on"
            raise CheckpointError(path=text, rule=rule, fix="test on text never calibrated on")


def described(model: nn.Module) -> tuple[str, str]:
    """Format and rotations of a model's quantized linears, or its dtype and ``none``.

    Fitted groups show: ``regular:64 (180), regular:256 (30)``.
    """
    layers = {id(m): m for m in model.modules() if isinstance(m, RotatedLinear)}.values()
    if not layers:
        return str(next(model.parameters()).dtype).removeprefix("torch."), "none"
    formats = sorted({layer.format.name for layer in layers})
    rotations = Counter(str(layer.rotation) for layer in layers)
    if len(rotations) == 1:
        return ", ".join(formats), next(iter(rotations))
    return ", ".join(formats), ", ".join(f"{name} ({count})" for name, count in rotations.most_common())


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One model's result.

    ``source``: what it was quantized from, None of a plain model. ``nbytes``: of its weights on the
    disk. ``gain``: against the unrotated model of the same source and format, where there is one.
    """

    model: Path
    source: Path | None
    format: str
    rotation: str
    result: Perplexity
    nbytes: int
    gain: Comparison | None = None

    @property
    def helps(self) -> Helps | None:
        """Whether the rotation helps; None where there is nothing to compare with."""
        return None if self.gain is None else self.gain.helps

    def to_dict(self) -> dict[str, object]:
        """Fields and derived values for JSON, without the single losses."""
        return {
            "model": str(self.model),
            "source": None if self.source is None else str(self.source),
            "format": self.format,
            "rotation": self.rotation,
            **self.result.to_dict(),
            "bytes": self.nbytes,
            "gain": None if self.gain is None else self.gain.to_dict(),
            "helps": self.helps,
        }


def evaluate(
    folder: ModelFolder, ids: Tensor, window: int = 512, device: str = "cpu", full: Full | None = None
) -> ModelRow:
    """Load a folder's model and measure its perplexity, beside its source's predictions if ``full`` gives them.

    Raises:
        CheckpointError, LayerError, MissingExtra: the model cannot be loaded.
        ShapeError, LayerError, PredictionError: it does not go with the tokens, or predicts none; see
            :func:`perplexity`.
    """
    return _evaluate(folder, folder.load(device), ids, window, full)


def evaluate_all(
    folders: Iterable[ModelFolder],
    ids: Tensor,
    window: int = 512,
    device: str = "cpu",
    tell: Callable[[Path], None] = lambda path: None,
) -> Iterator[ModelRow]:
    """:func:`evaluate` of each folder, each quantized one beside its source, which stays loaded for it.

    Memory: a source and one other model. ``tell`` hears which folder comes next.
    """
    source: tuple[Path, Full] | None = None
    for folder in folders:
        tell(folder.path)
        if not folder.quantized:
            source = None  # freed before the next is loaded
            model = folder.load(device)
            source = folder.path.resolve(), partial(logits_of, model)
            yield _evaluate(folder, model, ids, window, None)
            continue
        origin = None if folder.source is None else folder.source.resolve()
        if origin is not None and (source is None or source[0] != origin):
            source = None
            source = origin, partial(logits_of, ModelFolder.open(origin).load(device).eval())
        yield evaluate(folder, ids, window, device, None if origin is None or source is None else source[1])


def _evaluate(folder: ModelFolder, model: nn.Module, ids: Tensor, window: int, full: Full | None) -> ModelRow:
    format, rotation = described(model)
    if folder.quantized and not any(isinstance(m, RotatedLinear) for m in model.modules()):
        raise LayerError(layer=str(folder.path), rule="no linear of it is quantized", fix="quantize it again")
    try:
        result = perplexity(model, ids, window, full)
    except PredictionError as error:
        raise PredictionError(**{**error.fields, "model": folder.path}) from error
    return ModelRow(
        model=folder.path,
        source=folder.source if folder.quantized else None,
        format=format,
        rotation=rotation,
        result=result,
        nbytes=folder.nbytes,
    )


def with_gains(rows: Iterable[ModelRow]) -> list[ModelRow]:
    """The rows, each rotated one compared with the unrotated one of its source and format."""
    rows = list(rows)
    plain = {(row.source, row.format): row.result for row in rows if row.rotation == "none"}

    def gain(row: ModelRow) -> Comparison | None:
        before = plain.get((row.source, row.format))
        return None if before is None or row.rotation == "none" else Comparison.of(before, row.result)

    return [replace(row, gain=gain(row)) for row in rows]
