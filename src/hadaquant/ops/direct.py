"""A linear's two ops as one Python call, where nothing stands between the caller and the kernels.

The dispatcher is for compilers, tracers, modes and transforms. An eager call on a GPU needs none of them,
and at a few rows it would cost more than the kernels. The plan is the ops' own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hadaquant.formats import get_format
from hadaquant.ops.options import resolve_backend
from hadaquant.ops.plan import plan_quantize, plan_scaled_mm
from hadaquant.ops.target import target_of
from hadaquant.rotation import trusted

if TYPE_CHECKING:
    from hadaquant.kernels.direct import DirectLinear


def unwatched(x: Tensor) -> bool:
    """Whether x is a plain tensor on a GPU, and no compiler, tracer, mode or transform looks at what is called."""
    return (
        x.is_cuda
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]
        and torch._C._get_tracing_state() is None
    )


def direct_linear(
    x: Tensor, tensors: dict[str, nn.Parameter | None], format: str, rotation: str, backend: str, dtype: torch.dtype
) -> Tensor | None:
    """y of an unwatched x [..., K] and a linear's ``tensors`` by name; None where the ops have to be called.

    They have to if a kernel of the plan cannot be called so, or a tensor is not laid out as kernels want it; they
    then copy it, or say what is wrong with it.
    """
    w, sw, bias, signs = tensors["codes"], tensors["scales"], tensors["bias"], tensors["signs"]
    if w is None or sw is None:
        return None
    n, k = w.shape[0], x.shape[-1]
    m = x.numel() // k
    key = (rotation, signs is not None, m, n, k, x.dtype, dtype, None if bias is None else bias.dtype)
    call = _prepared(format, resolve_backend(backend), x.device, *key) if m and n else None
    if call is None or not (
        x.is_contiguous()
        and not x.data_ptr() % 16
        and w.shape == (n, k)
        and sw.shape == (n,)
        and (bias is None or bias.shape == (n,))
        and all(_fits(t, x.device) for t in (w, sw, bias, signs) if t is not None)
    ):
        return None
    return call(x, w, sw, bias, signs, (*x.shape[:-1], n))


def _fits(t: Tensor, device: torch.device) -> bool:
    return type(t) is nn.Parameter and t.device == device and t.is_contiguous() and not t.data_ptr() % 16


@functools.lru_cache(maxsize=4096)
def _prepared(
    format: str,
    backend: str,
    device: torch.device,
    rotation: str,
    signed: bool,
    m: int,
    n: int,
    k: int,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> DirectLinear | None:
    f, target, r = get_format(format), target_of(device), trusted(rotation, None, None)
    quantize = plan_quantize(f, r, target, backend, dtype=x_dtype, k=k)
    product = plan_scaled_mm(f, target, backend, m=m, n=n, k=k, out_dtype=y_dtype)
    if quantize.kernel != "quantize_rows_gluon":
        return None
    from hadaquant.kernels.direct import PRODUCTS, DirectLinear

    if product.kernel not in PRODUCTS:
        return None
    shape, dtypes = (m, n, k), (x_dtype, y_dtype, bias_dtype)
    return DirectLinear(f, (r.kind, r.group, signed), shape, dtypes, device, product.kernel, product.tile)
