"""Whole-model conversion in place, with codes that fit the inputs of a calibration text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hadaquant.calibrate.blocks import Forward, causal_lm
from hadaquant.calibrate.capture import capture
from hadaquant.calibrate.gptq import Curvature, gptq, output_error
from hadaquant.calibrate.inputs import InputStatistics
from hadaquant.calibrate.search import search_scales
from hadaquant.contract import check_activations
from hadaquant.errors import LayerError, UnknownChoice
from hadaquant.formats import Format, get_format
from hadaquant.nn.convert import FilterFn, Place, decide, holds_nonfinite, linears_of, relative_error
from hadaquant.nn.linear import RotatedLinear
from hadaquant.nn.report import LayerReport, Report
from hadaquant.nn.select import DEFAULT_SKIP, check_patterns
from hadaquant.ops import quantize
from hadaquant.rotation import Rotation, parse
from hadaquant.tensor import QuantizedTensor

#: How the codes of weights are chosen: nearest; scales searched; errors made up for; both.
METHODS = ("rtn", "search", "gptq", "gptq+search")

#: ``progress(name, done, total)``: linears that are done.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class CalibratedLayer(LayerReport):
    """A layer's report with what its calibration gave.

    ``method`` is ``rtn`` where the layer could not be calibrated, for the reason given. ``rows`` of inputs were
    seen; ``output_error`` is over them, see :func:`output_error`, and ``nearest_error`` that of round-to-nearest.
    """

    method: str = "rtn"
    rows: int = 0
    output_error: float | None = None
    nearest_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How :func:`calibrate_` chooses codes.

    Attributes:
        method: one of :data:`METHODS`.
        coded_inputs: let GPTQ see the inputs as the layer codes them, not as they come.
        stepwise: quantize q, k, v before the inputs of the next projection are looked at, and so on.
        damping, act_order: see :func:`gptq`.
    """

    method: str = "gptq+search"
    coded_inputs: bool = False
    stepwise: bool = True
    damping: float = 0.1
    act_order: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UnknownChoice(what="method", value=self.method, choices=", ".join(METHODS))


class _Job(NamedTuple):
    """A linear to replace, where it hangs, and what it becomes."""

    linear: nn.Linear
    places: list[Place]
    format: Format
    rotation: Rotation
    note: str


def calibrate_(
    model: nn.Module,
    format: str | Format,
    rotation: str | Rotation = "none",
    batches: Iterable[Any] = (),
    recipe: Recipe | str = "gptq+search",
    skip: str | Sequence[str] = DEFAULT_SKIP,
    filter_fn: FilterFn | None = None,
    *,
    choices: Mapping[str, tuple[Format, Rotation]] | None = None,
    activations: str = "coded",
    backend: str = "auto",
    device: torch.device | str | None = None,
    forward: Forward = causal_lm,
    progress: Progress | None = None,
) -> Report:
    """Replace a model's linears by :class:`RotatedLinear`, in place, with better codes than the nearest.

    Goes through the model block by block, each with the blocks before it already quantized. A layer that the
    batches never reach, or whose weight holds NaN or Inf, is rounded to nearest; its report says so. An error
    in the middle leaves the layers before it replaced.

    Args:
        model: a causal language model of transformers, or any module that ``forward`` runs.
        format, rotation, skip, filter_fn, activations, backend: as in :func:`hadaquant.quantize_`.
        batches: what the model is run on, of one shape: see :func:`token_batches`. Not needed for ``rtn``.
        recipe: a :class:`Recipe`, or its method.
        choices: format and rotation of each linear by its name, in place of ``format`` and ``rotation``; linears
            that are not named are left alone.
        device: where a block is during its turn; left out, it stays where it is.
        forward: runs the model on a batch; left out, as a language model of transformers on token ids.
        progress: called after each linear.

    Returns:
        A report whose quantized layers are :class:`CalibratedLayer`.

    Raises:
        UnknownChoice: an unknown method.
        AlreadyQuantized, PatternError, LayerError: as :func:`hadaquant.quantize_`.
        LayerError: no batches, no ``forward`` for a model that needs one, or memory was too small for a layer.
    """
    recipe = Recipe(method=recipe) if isinstance(recipe, str) else recipe
    check_activations(activations)
    batches = list(batches)
    if not batches and recipe.method != "rtn":
        rule = f"there are no batches, which method {recipe.method!r} needs"
        raise LayerError(layer=type(model).__name__, rule=rule, fix="give token_batches of a text, or use quantize_")
    jobs, report = _jobs(model, get_format(format), parse(rotation), skip, filter_fn, choices)
    order = list(jobs)

    def kind(name: str) -> object:
        return str(jobs[name].format), jobs[name].rotation

    def coded(name: str, x: Tensor) -> Tensor:
        job = jobs[name]
        return quantize(x, job.format, rotation=job.rotation, backend=backend).dequantize()

    if recipe.method == "rtn":
        steps = (step for step in [dict.fromkeys(jobs)])
    else:
        use_coded = recipe.coded_inputs and activations == "coded" and recipe.method != "search"
        steps = capture(
            model,
            batches,
            order,
            gram=True,
            coded=coded if use_coded else None,
            kind=kind,
            stepwise=recipe.stepwise,
            device=device,
            forward=forward,
        )
    done, name = 0, type(model).__name__
    try:
        with closing(steps):  # on an error too the model gets back its mode
            for step in steps:
                curvatures: dict[int, Curvature] = {}
                for name, inputs in step.items():
                    report.layers.append(_replace(jobs.pop(name), inputs, recipe, curvatures, activations, backend))
                    done += 1
                    if progress is not None:
                        progress(name, done, len(order))
    except torch.OutOfMemoryError as error:
        fix = "give smaller batches or fewer windows, or calibrate on the CPU"
        raise LayerError(layer=name, rule=f"memory was too small at or after it ({error})", fix=fix) from error
    return report


def _jobs(
    model: nn.Module,
    format: Format,
    rotation: Rotation,
    skip: str | Sequence[str],
    filter_fn: FilterFn | None,
    choices: Mapping[str, tuple[Format, Rotation]] | None,
) -> tuple[dict[str, _Job], Report]:
    """What to do with each linear, by name; the report holds those that are kept."""
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    linears = linears_of(model)
    check_patterns(skip, [place.name for places in linears.values() for place in places])
    jobs: dict[str, _Job] = {}
    report = Report()
    for linear, places in linears.items():
        f, r = format, rotation
        name = places[0].name
        if choices is not None and name not in choices:
            fitted, note = None, "not among the choices"
        else:
            f, r = (format, rotation) if choices is None else choices[name]
            fitted, note = decide(linear, places, f, r, skip, filter_fn)
        if fitted is not None:
            jobs[name] = _Job(linear, places, f, fitted, note)
            continue
        shape, nbytes = tuple(linear.weight.shape), sum(p.nbytes for p in linear.parameters(recurse=False))
        kept = LayerReport(name=name, shape=shape, reason=note, bytes_before=nbytes, bytes_after=nbytes)
        report.layers.append(kept)
    return jobs, report


def _replace(
    job: _Job,
    inputs: InputStatistics | None,
    recipe: Recipe,
    curvatures: dict[int, Curvature],
    activations: str,
    backend: str,
) -> CalibratedLayer:
    """Put the quantized layer in a linear's place."""
    weight = job.linear.weight.detach()
    layer = RotatedLinear.from_linear(job.linear, job.format, job.rotation, activations=activations, backend=backend)
    why = _why_nearest(weight, inputs, recipe)
    notes = [job.note] if job.note else []
    better: dict[str, Any] = {}
    if why:
        notes.append(f"({why}: rounded to nearest)")
    elif holds_nonfinite(weight):
        notes.append("(it holds NaN or Inf)")
    if inputs is not None and inputs.nonfinite and inputs.count:
        seen = inputs.count + inputs.nonfinite
        notes.append(f"({inputs.nonfinite} of {seen} input rows hold NaN or Inf and were left out)")
    if not why and inputs is not None and inputs.gram is not None:
        if id(inputs) not in curvatures:
            curvatures[id(inputs)] = Curvature.of(
                inputs.gram,
                job.format,
                job.rotation,
                damping=recipe.damping,
                act_order=recipe.act_order,
            )
        curvature = curvatures[id(inputs)]
        nearest = output_error(weight, layer.quantized_weight(), curvature)
        q = _better(weight, curvature, job, recipe.method)
        layer.set_weight(q)
        better = {
            "method": recipe.method,
            "rows": inputs.count,
            "output_error": output_error(weight, q, curvature),
            "nearest_error": nearest,
        }
    for place in job.places:
        setattr(place.parent, place.child, layer)
    return CalibratedLayer(
        name=job.places[0].name,
        shape=tuple(weight.shape),
        format=job.format.name,
        rotation=str(job.rotation),
        reason=" ".join(notes),
        bytes_before=weight.nbytes,
        bytes_after=layer.quantized_weight().nbytes,
        error=relative_error(weight, layer.dequantized_weight()),
        **better,
    )


def _why_nearest(weight: Tensor, inputs: InputStatistics | None, recipe: Recipe) -> str:
    """Why a layer cannot be calibrated; empty if it can, or is not to be."""
    if inputs is None or recipe.method == "rtn":
        return ""
    if holds_nonfinite(weight):
        return "its weight holds NaN or Inf"
    if inputs.count:
        return ""
    return f"all {inputs.nonfinite} input rows hold NaN or Inf" if inputs.nonfinite else "no batch reaches it"


def _better(weight: Tensor, curvature: Curvature, job: _Job, method: str) -> QuantizedTensor:
    if method == "search":
        importance = curvature.hessian.diagonal()
        return search_scales(weight, job.format, job.rotation, importance=importance)
    return gptq(weight, curvature, job.format, job.rotation, search=method == "gptq+search")
