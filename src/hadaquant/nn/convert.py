"""Whole-model conversion in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hadaquant.errors import AlreadyQuantized, LayerError
from hadaquant.formats import Format, get_format
from hadaquant.nn.linear import RotatedLinear, why_not
from hadaquant.nn.report import LayerReport, Report
from hadaquant.nn.select import DEFAULT_SKIP, check_patterns, skipped_by
from hadaquant.rotation import Rotation, parse

FilterFn = Callable[[nn.Module, str], bool]

#: These read their linears' weights themselves, in a fused path that knows only plain weights.
READ_WEIGHTS_THEMSELVES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def quantize_(
    model: nn.Module,
    format: str | Format,
    rotation: str | Rotation = "none",
    skip: Sequence[str] = DEFAULT_SKIP,
    filter_fn: FilterFn | None = None,
    *,
    backend: str = "auto",
) -> Report:
    """Replace a model's linears by :class:`RotatedLinear`, in place.

    A layer whose in_features the rotation's group does not divide gets the largest legal group that
    does; a layer that cannot be quantized stays as it is. The report says both.

    Args:
        model: any module; shared modules stay shared, tied embeddings untouched.
        format, rotation: as in :func:`hadaquant.quantize`.
        skip: name patterns to leave alone: whole dotted parts such as ``"lm_head"`` or
            ``"layers.*.mlp"``, or ``"re:..."``.
        filter_fn: ``filter_fn(module, name) -> bool``; a linear for which it is False is left alone.
        backend: of the new layers.

    Raises:
        AlreadyQuantized: the model holds a RotatedLinear.
        PatternError: a pattern of ``skip`` matches no linear.
        LayerError: there is nothing to quantize.
    """
    f, r = get_format(format), parse(rotation)
    modules = list(model.named_modules(remove_duplicate=False))
    for name, module in modules:
        if isinstance(module, RotatedLinear):
            raise AlreadyQuantized(name=name or "the model", found=f"{module.format}, {module.rotation}")
    if isinstance(model, nn.Linear):
        raise LayerError(
            layer="the model",
            rule="it is itself a linear, which cannot be replaced in place",
            fix="use RotatedLinear.from_linear",
        )
    parents = dict(modules)
    linears = [(name, m) for name, m in modules if isinstance(m, nn.Linear)]
    if not linears:
        raise LayerError(layer=type(model).__name__, rule="it holds no nn.Linear", fix="nothing to quantize")
    check_patterns(skip, [name for name, _ in linears])

    report, converted = Report(), dict[int, RotatedLinear]()
    for name, linear in linears:
        parent_name, _, child = name.rpartition(".")
        parent = parents[parent_name]
        if id(linear) in converted:
            setattr(parent, child, converted[id(linear)])
            continue
        shape = (linear.out_features, linear.in_features)
        fitted = r.fit(linear.in_features, f.multiple)
        reason = _kept_reason(name, linear, parent, skip, filter_fn) or (
            unfit(f, r, shape[1]) if fitted is None else None
        )
        if reason is not None or fitted is None:
            nbytes = sum(p.nbytes for p in linear.parameters(recurse=False))
            report.layers.append(
                LayerReport(name=name, shape=shape, reason=reason or "", bytes_before=nbytes, bytes_after=nbytes)
            )
            continue
        layer = RotatedLinear.from_linear(linear, f, fitted, backend=backend)
        converted[id(linear)] = layer
        setattr(parent, child, layer)
        report.layers.append(
            LayerReport(
                name=name,
                shape=shape,
                format=f.name,
                rotation=str(fitted),
                reason="" if fitted is r else f"(group fitted: {r} does not divide K={shape[1]})",
                bytes_before=linear.weight.nbytes,
                bytes_after=layer.quantized_weight().nbytes,
                error=relative_error(linear.weight, layer.dequantized_weight()),
            )
        )
    return report


def _kept_reason(
    name: str, linear: nn.Linear, parent: nn.Module, skip: Sequence[str], filter_fn: FilterFn | None
) -> str | None:
    pattern = skipped_by(name, skip)
    if pattern is not None:
        return f"matches skip pattern {pattern!r}"
    if filter_fn is not None and not filter_fn(linear, name):
        return "filter_fn says no"
    if isinstance(parent, READ_WEIGHTS_THEMSELVES):
        return f"its parent {type(parent).__name__} reads the weight itself"
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__}, a subclass of nn.Linear, may use its weight in its own way"
    return why_not(linear)


def unfit(format: Format, rotation: Rotation, k: int) -> str:
    """Why neither the format nor any group of the rotation divides K."""
    if k == 0 or k % format.multiple:
        return f"in_features {k} is not a multiple of {format.multiple}, which {format} needs"
    if rotation.signs is not None or rotation.kind == "matrix":
        return f"in_features {k} is not a multiple of the group of {rotation}, whose tensors have one size"
    return f"no group of kind {rotation.kind!r} divides in_features {k}"


def relative_error(weight: Tensor, restored: Tensor) -> float | None:
    """‖W − Ŵ‖ / ‖W‖ in float32; None on the meta device, 0 for a zero weight."""
    if weight.is_meta:
        return None
    w = weight.detach().to(torch.float32)
    norm = torch.linalg.vector_norm(w).item()
    return torch.linalg.vector_norm(restored - w).item() / norm if norm else 0.0
