"""What hadaquant quantize needs for better codes than the nearest: the model in memory, and a text to run it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from torch import Tensor, nn

from hadaquant.calibrate import CalibratedLayer, Recipe, calibrate_, check_finite, fit_gains_, gains_of, token_batches
from hadaquant.checkpoint import hf
from hadaquant.checkpoint.model_plan import Choice
from hadaquant.checkpoint.record import CalibrationRecord
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.errors import LayerError
from hadaquant.nn import Report, RotatedLinear
from hadaquant.study.models import ModelFolder
from hadaquant.study.perplexity import read_tokens
from hadaquant.study.report import counted
from hadaquant.study.run import digest
from hadaquant.tensor import QuantizedTensor

#: Tokens a window, and windows a batch.
WINDOW, BATCH = 512, 4


class Calibration:
    """Codes for a checkpoint's layers that fit what a text makes them read.

    Args:
        source: the model's folder, with its tokenizer.
        text: UTF-8, of one window or more.
        method: as in :class:`hadaquant.calibrate.Recipe`.
        windows: of the text, spread over it; fewer if it holds fewer.
        device: where each block is calibrated.
        activations: what the blocks before one are run with, ``coded`` or ``full``.
        gains: steps that the norms' gains are fitted for, see :func:`hadaquant.calibrate.fit_gains_`.
        progress: told of each layer that is done.

    Raises:
        CheckpointError: no model or tokenizer there, or a text that cannot be read or is too short.
        MissingExtra: transformers is not installed.
    """

    def __init__(
        self,
        source: str,
        text: Path,
        method: str,
        windows: int,
        device: str,
        activations: str,
        gains: int = 0,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.recipe, self.device, self.progress = Recipe(method=method), device, progress
        self.activations, self.gains = activations, gains
        self.losses: list[float] = []
        self.folder = ModelFolder.open(Path(source))
        ids = read_tokens(text, self.folder.tokenizer(), WINDOW, longer="give a longer text")
        self.batches = token_batches(ids, WINDOW, windows, BATCH)
        self.text, self.digest = text.name, digest(ids)
        self.report = Report()

    def __call__(self, choices: Mapping[str, Choice]) -> dict[str, QuantizedTensor | Tensor]:
        """Quantized weights and gains by their names in the checkpoint, as ``quantize_checkpoint`` asks for them.

        Raises:
            LayerError: transformers merges or splits a layer's weight when it loads the model; or see
                :func:`hadaquant.calibrate.calibrate_` and :func:`hadaquant.calibrate.fit_gains_`.
        """
        model = self.folder.load()
        if self.gains:
            check_finite(model)
        names = hf.model_names(model, [f"{layer}.weight" for layer in choices])
        targets: dict[str, str] = {}
        for layer in choices:
            target = names[f"{layer}.weight"]
            if target is None:
                rule = (
                    "transformers computes the model's weight from this one and others, so it has no layer of its own"
                )
                raise LayerError(layer=layer, rule=rule, fix="skip it, or use --weights rtn")
            targets[layer] = target.removesuffix(".weight")
        by_target = {targets[layer]: choice for layer, choice in choices.items()}
        first = next(iter(choices.values()))
        self.report = calibrate_(
            model,
            *first,
            self.batches,
            self.recipe,
            skip=(),
            choices=by_target,
            activations=self.activations,
            device=self.device,
            progress=self.progress,
        )
        gains = self._fitted(model) if self.gains else {}
        modules = {layer: model.get_submodule(target) for layer, target in targets.items()}
        weights = {n: m.quantized_weight().to("cpu") for n, m in modules.items() if isinstance(m, RotatedLinear)}
        return {**weights, **gains}

    def _fitted(self, model: nn.Module) -> dict[str, Tensor]:
        """Fit the gains of a quantized model; they, by their names in the checkpoint."""
        stored = hf.model_names(model, Checkpoint.open(self.folder.path).tensors)
        there = {target: name for name, target in stored.items() if target is not None}
        missing = sorted(gains_of(model).keys() - there.keys())
        if missing:
            rule = "transformers computes its gain from other tensors, so a fitted one has no place in the checkpoint"
            raise LayerError(layer=missing[0], rule=rule, fix="leave --gains out")
        model, full = model.to(self.device), self.folder.load().to(self.device)
        batches = [window[None].to(self.device) for batch in self.batches for window in batch]

        def progress(step: int, _: float) -> None:
            if self.progress is not None:
                self.progress("gains", step + 1, self.gains)

        self.losses = fit_gains_(model, full, batches, steps=self.gains, progress=progress)
        return {there[name]: gain.detach().to("cpu") for name, gain in gains_of(model).items()}

    def record(self) -> CalibrationRecord:
        """What the checkpoint says of it."""
        recipe = {f.name: getattr(self.recipe, f.name) for f in fields(Recipe) if f.name != "method"}
        defaults = Recipe()
        return CalibrationRecord(
            method=self.recipe.method,
            options={name: value for name, value in recipe.items() if value != getattr(defaults, name)},
            text=self.text,
            digest=self.digest,
            windows=sum(batch.shape[0] for batch in self.batches),
            window=WINDOW,
            gains=self.gains,
        )

    def summary(self) -> str:
        """One line: what the text was and what the calibration gained."""
        layers = [layer for layer in self.report.quantized if isinstance(layer, CalibratedLayer)]
        errors = [(m.output_error, m.nearest_error) for m in layers if m.output_error is not None]
        text = f"{self.recipe.method} on {counted(self.record().windows, 'window')} of {WINDOW} tokens"
        if errors:
            found, nearest = (sum(e or 0.0 for e in column) / len(errors) for column in zip(*errors, strict=True))
            text += f": mean error of the outputs {found:.4f}, rounded to nearest {nearest:.4f}"
        if self.losses:
            part = -(-len(self.losses) // 4)
            first, last = (sum(losses) / part for losses in (self.losses[:part], self.losses[-part:]))
            text += f"; gains: KL from the full model {first:.4f} → {last:.4f} over {len(self.losses)} steps"
        return text

    def warnings(self) -> list[str]:
        """Layers that could not be calibrated as asked, each with the reason."""
        return [
            f"{layer.name} {layer.reason}"
            for layer in self.report.quantized
            if isinstance(layer, CalibratedLayer)
            and ("rounded to nearest" in layer.reason or "left out" in layer.reason)
        ]
