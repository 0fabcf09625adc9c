"""Layers that several files test."""

from typing import Any

import torch
from torch import nn

import hadaquant as hq

SIGNED = hq.Rotation("regular", 64, torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(1)) * 2 - 1)
MATRIX = hq.Rotation(
    "matrix", matrix=torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(1))).Q
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(name: str, rotation: Any = "regular:64", k: int = 128, n: int = 48, **how: Any) -> hq.RotatedLinear:
    torch.manual_seed(5)
    linear = nn.Linear(k, n, bias=how.pop("bias", True), dtype=how.pop("dtype", None))
    return hq.RotatedLinear.from_linear(linear, name, rotation, **how)


def parts(layer: hq.RotatedLinear) -> dict[str, torch.Tensor]:
    return {key: p.detach().clone() for key, p in layer.named_parameters() if key != "bias"}


def all_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
