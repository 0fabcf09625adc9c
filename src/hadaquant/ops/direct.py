"""A linear's two ops as one Python call, where nothing stands between the caller and the kernels.

The dispatcher is for compilers, tracers, modes and transforms. An eager call on a GPU needs none of them,
and at a few rows it would cost more than the kernels. The plan is the ops' own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hadaquant.formats import Format, get_format
from hadaquant.ops.options import resolve_backend
from hadaquant.ops.plan import plan_amax, plan_quantize, plan_scaled_mm
from hadaquant.ops.target import target_of
from hadaquant.rotation import trusted

#: y of x, a weight's codes, scales and global scale, x's global scale, bias, signs; and of the shape of y.
Call = Callable[[Tensor, tuple[Tensor | None, ...], tuple[int, ...]], Tensor]
#: Products that can follow a kernel that quantizes x.
_PRODUCTS: dict[str, tuple[str, ...]] = {
    "quantize_rows_gluon": ("int8_gemv", "int8_mm_ahead", "int8_few_rows", "int8_mm", "int8_mm_hopper"),
    "quantize_blocks_fast": ("fp4_gemv", "fp4_value_rows", "fp4_mm_hopper"),
}
#: Stands for signs, of which only is asked whether there are any.
_SIGNS = torch.empty(0)


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
    gw, gx = tensors["global_scale"], tensors["input_global_scale"]
    if w is None or sw is None:
        return None
    *leading, k = x.shape
    n, elements = w.shape[0], x.numel()
    if not n or not elements:
        return None
    key = (rotation, signs is not None, elements // k, n, k, x.dtype, dtype, None if bias is None else bias.dtype)
    call, *shapes = _prepared(format, resolve_backend(backend), x.device, *key, gx is None)
    if call is None or not x.is_contiguous() or x.data_ptr() % 16 or [w.shape, sw.shape] != shapes:
        return None
    if bias is not None and bias.shape != (n,):
        return None
    device = x.get_device()
    for t in (w, sw, gw, gx, bias, signs):
        if t is not None and not _fits(t, device):
            return None
    return call(x, (w, sw, gw, gx, bias, signs), (*leading, n))


def _fits(t: Tensor, device: int) -> bool:
    return type(t) is nn.Parameter and t.get_device() == device and t.is_contiguous() and not t.data_ptr() % 16


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
    dynamic: bool,
) -> tuple[Call | None, tuple[int, ...], tuple[int, ...]]:
    """The call, and the shapes that the weight's codes and scales must have."""
    f = get_format(format)
    call = _call(f, backend, device, rotation, signed, (m, n, k), (x_dtype, y_dtype, bias_dtype), dynamic)
    return call, f.codes_shape((n, k)), f.scales_shape((n, k))


def _call(
    f: Format,
    backend: str,
    device: torch.device,
    rotation: str,
    signed: bool,
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    dynamic: bool,
) -> Call | None:
    (m, n, k), target = shape, target_of(device)
    r = trusted(rotation, _SIGNS if signed else None, None)
    quantize = plan_quantize(f, r, target, backend, dtype=dtypes[0], k=k)
    product = plan_scaled_mm(f, target, backend, m=m, n=n, k=k, out_dtype=dtypes[1])
    if product.kernel not in _PRODUCTS.get(quantize.kernel, ()):
        return None
    if product.kernel == "fp4_mm_hopper" and k % 128:
        return None  # its x has whole spans of columns, which quantizing does not pad
    dynamic = dynamic and f.has_global_scale
    if dynamic and plan_amax(r, target, backend, k=k).kernel != "amax_fast":
        return None
    if f.block is None:
        from hadaquant.kernels.direct import DirectLinear

        return DirectLinear(f, (r.kind, r.group, signed), shape, dtypes, device, product.kernel, product.tile)
    from hadaquant.kernels.direct_fp4 import DirectFp4Linear

    return DirectFp4Linear(f, r, shape, dtypes, device, product.kernel, product.tile, dynamic)
