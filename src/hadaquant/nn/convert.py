"""Whole-model conversion in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hadaquant.contract import check_activations
from hadaquant.errors import AlreadyQuantized, LayerError
from hadaquant.formats import Format, get_format
from hadaquant.nn.linear import RotatedLinear, why_not
from hadaquant.nn.report import LayerReport, Report
from hadaquant.nn.select import DEFAULT_SKIP, check_patterns, skipped_by
from hadaquant.ops.checks import INT8_MAX_K
from hadaquant.rotation import Rotation, parse

FilterFn = Callable[[nn.Module, str], bool]

#: These read their linears' weights themselves, in a fused path that knows only plain weights.
READ_WEIGHTS_THEMSELVES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def quantize_(
    model: nn.Module,
    format: str | Format,
    rotation: str | Rotation = "none",
    skip: str | Sequence[str] = DEFAULT_SKIP,
    filter_fn: FilterFn | None = None,
    *,
    activations: str = "coded",
    backend: str = "auto",
) -> Report:
    """Replace a model's linears by :class:`RotatedLinear`, in place.

    A layer whose in_features the rotation's group does not divide gets the largest legal group that
    does; a layer that cannot be quantized stays as it is. The report says both.

    Args:
        model: any module. A module in several places stays shared; a linear whose weight another module holds too,
            such as an embedding, is kept.
        format, rotation: as in :func:`hadaquant.quantize`.
        skip: name patterns (or one) to leave alone: whole dotted parts such as ``"lm_head"`` or
            ``"layers.*.mlp"``, or ``"re:..."``.
        filter_fn: ``filter_fn(module, name) -> bool``; a linear for which it is False is left alone.
        activations: ``coded``, in the weights' format too, or ``full``: weights alone are quantized.
        backend: of the new layers.

    Raises:
        AlreadyQuantized: the model holds a RotatedLinear.
        PatternError: a pattern of ``skip`` matches no linear.
        LayerError: there is nothing to quantize.
    """
    f, r = get_format(format), parse(rotation)
    check_activations(activations)
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    linears = linears_of(model)
    check_patterns(skip, [place.name for places in linears.values() for place in places])
    # all decisions before the first change: an error leaves the model as it was
    jobs = [(m, places, *decide(m, places, f, r, skip, filter_fn)) for m, places in linears.items()]
    del linears  # so that each weight is freed when its layer is replaced

    report = Report()
    while jobs:
        linear, places, fitted, reason = jobs.pop(0)
        shape = (linear.out_features, linear.in_features)
        if fitted is None:
            nbytes = sum(p.nbytes for p in linear.parameters(recurse=False))
            report.layers.append(
                LayerReport(name=places[0].name, shape=shape, reason=reason, bytes_before=nbytes, bytes_after=nbytes)
            )
            continue
        if holds_nonfinite(linear.weight):
            reason = f"{reason} (it holds NaN or Inf)".strip()
        layer = RotatedLinear.from_linear(linear, f, fitted, activations=activations, backend=backend)
        for place in places:
            setattr(place.parent, place.child, layer)
        report.layers.append(
            LayerReport(
                name=places[0].name,
                shape=shape,
                format=f.name,
                rotation=str(fitted),
                reason=reason,
                bytes_before=linear.weight.nbytes,
                bytes_after=layer.quantized_weight().nbytes,
                error=relative_error(linear.weight, layer.dequantized_weight()),
            )
        )
    return report


class Place(NamedTuple):
    """Where a module hangs: ``parent.child``, in the whole model ``name``. ``tied``: names of its weight elsewhere."""

    name: str
    parent: nn.Module
    child: str
    tied: tuple[str, ...] = ()


def linears_of(model: nn.Module) -> dict[nn.Linear, list[Place]]:
    """Each linear of a model once, with every place that holds it.

    Raises:
        AlreadyQuantized: the model holds a RotatedLinear.
        LayerError: it holds no linear, or is one.
    """
    if isinstance(model, nn.Linear):
        raise LayerError(
            layer="the model",
            rule="it is itself a linear, which cannot be replaced in place",
            fix="use RotatedLinear.from_linear",
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    holders: dict[int, dict[nn.Module, str]] = {}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            holders.setdefault(id(parameter), {}).setdefault(module, f"{name}.{key}")
    found: dict[nn.Linear, list[Place]] = {}
    for name, module in modules.items():
        if isinstance(module, RotatedLinear):
            raise AlreadyQuantized(name=name or "the model", found=f"{module.format}, {module.rotation}")
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            same = holders.get(id(module._parameters.get("weight")), {})
            tied = tuple(other for holder, other in same.items() if holder is not module)
            found.setdefault(module, []).append(Place(name, modules[parent], child, tied))
    if not found:
        raise LayerError(layer=type(model).__name__, rule="it holds no nn.Linear", fix="nothing to quantize")
    return found


def decide(
    linear: nn.Linear,
    places: Sequence[Place],
    format: Format,
    rotation: Rotation,
    skip: Sequence[str],
    filter_fn: FilterFn | None,
) -> tuple[Rotation | None, str]:
    """The rotation a linear gets and a note about it, or None and why the linear is kept.

    A linear that hangs in several places is kept if any of them speaks against it.
    """
    for place in places:
        pattern = skipped_by(place.name, skip)
        if pattern is not None:
            return None, f"matches skip pattern '{pattern}'"
        if filter_fn is not None and not filter_fn(linear, place.name):
            return None, "filter_fn says no"
        if isinstance(place.parent, READ_WEIGHTS_THEMSELVES):
            return None, f"its parent {type(place.parent).__name__} reads the weight itself"
        if place.tied:
            return None, f"tied to {', '.join(place.tied)}"
    reason = why_not(linear)
    if reason is not None:
        return None, reason
    if type(linear) is not nn.Linear:
        return None, f"{type(linear).__name__}, a subclass of nn.Linear, may use its weight in its own way"
    return fit(format, rotation, linear.in_features)


def fit(format: Format, rotation: Rotation, k: int) -> tuple[Rotation | None, str]:
    """The rotation that a weight [N, K] gets and a note if it is not the one asked for, or None and why not."""
    if format.block is None and k > INT8_MAX_K:
        return None, f"in_features {k} exceeds {INT8_MAX_K}: an int32 accumulator could overflow"
    fitted = rotation.fit(k, format.multiple)
    if fitted is None:
        return None, _unfit(format, rotation, k)
    return fitted, "" if fitted is rotation else f"(group fitted: {rotation} does not divide K={k})"


def _unfit(format: Format, rotation: Rotation, k: int) -> str:
    if k == 0 or k % format.multiple:
        return f"in_features {k} is not a multiple of {format.multiple}, which {format} needs"
    if rotation.signs is not None or rotation.kind == "matrix":
        return f"in_features {k} is not a multiple of the group of {rotation}, whose tensors have one size"
    return f"no group of kind {rotation.kind!r} divides in_features {k}"


def holds_nonfinite(weight: Tensor) -> bool:
    """Whether a weight holds NaN or Inf; False on the meta device."""
    return not weight.is_meta and not weight.isfinite().all()


def relative_error(weight: Tensor, restored: Tensor) -> float | None:
    """‖W − Ŵ‖ / ‖W‖ in float32; None on the meta device, 0 for a zero weight."""
    if weight.is_meta:
        return None
    w = weight.detach().to(torch.float32)
    norm = torch.linalg.vector_norm(w).item()
    return torch.linalg.vector_norm(restored - w).item() / norm if norm else 0.0
