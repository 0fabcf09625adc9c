"""What hadaquant quantize needs for better codes than the nearest: the model in memory, and a text to run it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hadaquant.calibrate import CalibratedLayer, Recipe, calibrate_, token_batches
from hadaquant.checkpoint import hf
from hadaquant.checkpoint.model_plan import Choice
from hadaquant.errors import LayerError
from hadaquant.nn import Report, RotatedLinear
from hadaquant.study.models import ModelFolder
from hadaquant.study.perplexity import read_tokens
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
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.recipe, self.device, self.progress = Recipe(method=method), device, progress
        self.activations = activations
        self.folder = ModelFolder.open(Path(source))
        ids = read_tokens(text, self.folder.tokenizer(), WINDOW)
        self.batches = token_batches(ids, WINDOW, windows, BATCH)
        self.report = Report()

    def __call__(self, choices: Mapping[str, Choice]) -> dict[str, QuantizedTensor]:
        """Quantized weights by their layer's name in the checkpoint, as ``quantize_checkpoint`` asks for them.

        Raises:
            LayerError: transformers merges or splits a layer's weight when it loads the model; or see
                :func:`hadaquant.calibrate.calibrate_`.
        """
        model = self.folder.load()
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
        modules = {layer: model.get_submodule(target) for layer, target in targets.items()}
        return {
            layer: module.quantized_weight().to("cpu")
            for layer, module in modules.items()
            if isinstance(module, RotatedLinear)
        }

    def summary(self) -> str:
        """One line: what the text was and what the calibration gained."""
        layers = [layer for layer in self.report.quantized if isinstance(layer, CalibratedLayer)]
        errors = [(m.output_error, m.nearest_error) for m in layers if m.output_error is not None]
        windows = len(self.batches) * self.batches[0].shape[0]
        text = f"{self.recipe.method} on {windows} windows of {WINDOW} tokens"
        if not errors:
            return text
        found, nearest = (sum(e or 0.0 for e in column) / len(errors) for column in zip(*errors, strict=True))
        return f"{text}: mean error of the outputs {found:.4f}, rounded to nearest {nearest:.4f}"

    def warnings(self) -> list[str]:
        """Layers that could not be calibrated as asked, each with the reason."""
        return [
            f"{layer.name} {layer.reason}"
            for layer in self.report.quantized
            if isinstance(layer, CalibratedLayer)
            and ("rounded to nearest" in layer.reason or "left out" in layer.reason)
        ]
