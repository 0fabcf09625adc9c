"""Other libraries' kernels, where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hadaquant.bench.contest import Absent


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(f"not installed here ({error})") from error


def comfy_rotate_quantize() -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """comfy-kitchen's rotation and quantization in one CUDA kernel: x [M, K], group -> codes, scales [M, 1].

    Raises:
        Absent: it is not installed, or has no such kernel.
    """
    cuda = _module("comfy_kitchen.backends.cuda")
    if not hasattr(cuda, "quantize_int8_rowwise_convrot"):
        raise Absent("comfy-kitchen has no quantize_int8_rowwise_convrot")
    return cuda.quantize_int8_rowwise_convrot


def comfy_linear(w: Tensor, sw: Tensor, group: int) -> Callable[[Tensor], Tensor]:
    """comfy-kitchen's INT8 linear of a rotated weight: x [M, K] -> [M, N].

    Raises:
        Absent: it is not installed.
    """
    kitchen = _module("comfy_kitchen")
    return lambda x: kitchen.int8_linear(x, w, sw[:, None], None, x.dtype, convrot=True, convrot_groupsize=group)


def sgl_int8_mm() -> Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]:
    """CUTLASS's product with scales through sgl_kernel: x [M, K], sx [M], w [N, K], sw [N], dtype -> [M, N].

    Raises:
        Absent: it is not installed.
    """
    mm = _module("sgl_kernel").int8_scaled_mm
    return lambda x, sx, w, sw, dtype: mm(x, w.T, sx[:, None], sw[:, None], dtype)
