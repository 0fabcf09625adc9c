"""A weight that stands for codes, and is dequantized by the first operation on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hadaquant.errors import LayerError

if TYPE_CHECKING:
    from hadaquant.nn.linear import RotatedLinear


class LazyWeight(Tensor):
    """A weight that is dequantized by the first operation on it."""

    layer: RotatedLinear

    @staticmethod
    def __new__(cls, layer: RotatedLinear) -> LazyWeight:
        shape = (layer.out_features, layer.in_features)
        weight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=layer.nominal.dtype, device=layer.codes.device)
        weight.layer = layer
        return weight

    def __repr__(self) -> str:  # type: ignore[override]
        return f"dequantized weight of {self.layer}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def materialize(t: Any) -> Any:
            return t.layer.dequantized_weight().to(t.dtype) if isinstance(t, cls) else t

        schema = func._schema.arguments
        given = dict(zip((argument.name for argument in schema), args, strict=False)) | (kwargs or {})
        for argument in schema:
            value = given.get(argument.name)
            if argument.is_write and isinstance(value, cls):
                rule = "its weight is computed from codes and cannot be changed in place"
                raise LayerError(layer=str(value.layer), rule=rule, fix="use set_weight")
        return func(*tree_map(materialize, args), **tree_map(materialize, kwargs or {}))
