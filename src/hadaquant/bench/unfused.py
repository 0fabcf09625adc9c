"""Rotate, quantize and multiply as one writes it in plain torch, an operation after another, for torch.compile.

Not the contract: the rotation is a product of 16-bit matrices, as most would have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hadaquant.bench.contest import Absent
from hadaquant.formats import Format


def rotate(x: Tensor, matrix: Tensor | None) -> Tensor:
    """x [M, K] times a block-diagonal matrix of blocks [g, g], in x's dtype."""
    return x if matrix is None else (x.view(-1, matrix.shape[0]) @ matrix).view(x.shape)


def quantize_int8(x: Tensor, matrix: Tensor | None) -> tuple[Tensor, Tensor]:
    """int8 codes [M, K], float32 scales [M]."""
    y = rotate(x, matrix).float()
    scales = y.abs().amax(1).clamp(min=1e-12) / 127
    return (y / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def quantize_fp4(x: Tensor, matrix: Tensor | None, block: int, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """E2M1 codes, two a byte, and a scale byte a block: E4M3 with a global scale, a power of two without."""
    y = rotate(x, matrix).float().view(x.shape[0], -1, block)
    amax = y.abs().amax(2)
    if global_scale is not None:
        stored = (amax / 6 / global_scale).clamp(max=448).to(torch.float8_e4m3fn)
        scale = stored.float() * global_scale
        scale = torch.where(scale == 0, 1.0, scale)
        scales = stored.view(torch.uint8)
    else:
        exponent = (torch.floor(torch.log2(amax)) - 2).clamp(-127, 127)
        scale = torch.exp2(exponent)
        scales = (exponent + 127).to(torch.uint8)
    magnitude = (y / scale[:, :, None]).abs()
    codes = sum((magnitude > bound).to(torch.uint8) for bound in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    codes = torch.where(y < 0, codes + 8, codes).view(x.shape)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def quantize(x: Tensor, matrix: Tensor | None, format: Format, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales in a format."""
    if format.block is None:
        return quantize_int8(x, matrix)
    return quantize_fp4(x, matrix, format.block, global_scale)


def linear_int8(x: Tensor, matrix: Tensor | None, w: Tensor, sw: Tensor) -> Tensor:
    """x [M, K] quantized, times int8 w [N, K], scaled."""
    codes, sx = quantize_int8(x, matrix)
    return scaled_int_mm(codes, sx, w, sw, x.dtype)


def check_int_mm(m: int) -> None:
    """Say whether torch._int_mm takes M rows on a GPU.

    Raises:
        Absent: it does not.
    """
    if m <= 16:
        raise Absent("torch._int_mm takes no fewer than 17 rows on a GPU")


def scaled_int_mm(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    """cuBLASLt's product of int8 matrices (torch._int_mm) and its scales in torch."""
    return (torch._int_mm(x, w.T).float() * sx[:, None] * sw).to(dtype)


def front_end(kind: str, x: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    """The front ends as torch has them."""
    if kind == "rms_norm":
        return functional.rms_norm(x, (x.shape[-1],), tensors[0], 1e-6)
    if kind == "ada_norm":
        return functional.layer_norm(x, (x.shape[-1],), eps=1e-6) * (1 + tensors[0]) + tensors[1]
    if kind == "silu_mul":
        return functional.silu(x) * tensors[0]
    return functional.gelu(x, approximate="tanh")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for one set of shapes, with no memory of the shapes before."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)
