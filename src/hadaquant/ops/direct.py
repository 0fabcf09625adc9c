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
from hadaquant.front import NONE, FrontEnd
from hadaquant.front import trusted as trusted_front
from hadaquant.layout import NIBBLE_SPAN
from hadaquant.ops.checks import FLOAT_DTYPES, check_front_end
from hadaquant.ops.options import resolve_backend
from hadaquant.ops.plan import plan_amax, plan_quantize, plan_rotate, plan_scaled_mm, plan_weight_mm
from hadaquant.ops.target import target_of
from hadaquant.ops.weight_candidates import BY_NIBBLE
from hadaquant.rotation import Rotation, trusted

#: y of x, a weight's codes, scales and global scale, x's global scale, bias, signs; of the shape of y; and of a front
#: end, if the call was prepared with one.
Call = Callable[..., Tensor]
_INT8_PRODUCTS = ("int8_gemv", "int8_mm_ahead", "int8_few_rows", "int8_mm", "int8_mm_hopper")
#: Products that can follow a kernel that quantizes x.
_PRODUCTS: dict[str, tuple[str, ...]] = {
    "quantize_front_gluon": _INT8_PRODUCTS,
    "quantize_rows_gluon": _INT8_PRODUCTS,
    "quantize_blocks_fast": ("fp4_gemv", "fp4_value_rows", "fp4_mm_hopper"),
}
#: Products of full activations.
_FULL_PRODUCTS = ("weight_few_rows", "weight_mm", "weight_mm_hopper")
#: Stands for signs, of which only is asked whether there are any.
_SIGNS = torch.empty(0)
#: Tensors that nothing looks at as they are used.
_PLAIN = (Tensor, nn.Parameter)


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
    x: Tensor,
    front_end: FrontEnd,
    tensors: dict[str, nn.Parameter | None],
    format: str,
    rotation: str,
    backend: str,
    dtype: torch.dtype,
    full: bool,
) -> Tensor | None:
    """y of an unwatched x [..., K] and a linear's ``tensors`` by name; None where the ops have to be called.

    They have to if a kernel of the plan cannot be called so, or a tensor is not laid out as kernels want it; they
    then copy it, or say what is wrong with it. ``full``: activations are not coded.

    Raises:
        DtypeError, ShapeError: as ``checks.check_front_end``.
    """
    w, sw, bias, signs = tensors["codes"], tensors["scales"], tensors["bias"], tensors["signs"]
    gw, gx = tensors["global_scale"], tensors["input_global_scale"]
    if w is None or sw is None or x.dtype not in FLOAT_DTYPES:
        return None
    *leading, k = x.shape
    n, elements = w.shape[0], x.numel()
    if not n or not elements:
        return None
    described = None
    if front_end is NONE:
        if not x.is_contiguous() or x.data_ptr() % 16:
            return None
    else:
        check_front_end(x, front_end)
        if not all(t is None or type(t) in _PLAIN for t in front_end.tensors):
            return None
        described = front_end.spec, *(None if t is None else t.dtype for t in front_end.tensors)
    dtypes = x.dtype, dtype, None if bias is None else bias.dtype
    key = (rotation, signs is not None, (elements // k, n, k), dtypes, described, full, gx is None)
    call, *shapes = _prepared(format, resolve_backend(backend), x.device, *key)
    if call is None or [w.shape, sw.shape] != shapes or (bias is not None and bias.shape != (n,)):
        return None
    device = x.get_device()
    for t in (w, sw, gw, gx, bias, signs):
        if t is not None and not _fits(t, device):
            return None
    if described is None:
        return call(x, (w, sw, gw, gx, bias, signs), (*leading, n))
    return call(x, (w, sw, gw, gx, bias, signs), (*leading, n), front_end)


def _fits(t: Tensor, device: int) -> bool:
    return type(t) is nn.Parameter and t.get_device() == device and t.is_contiguous() and not t.data_ptr() % 16


@functools.lru_cache(maxsize=4096)
def _prepared(
    format: str,
    backend: str,
    device: torch.device,
    rotation: str,
    signed: bool,
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    front_end: tuple[str, torch.dtype | None, torch.dtype | None] | None,
    full: bool,
    dynamic: bool,
) -> tuple[Call | None, tuple[int, ...], tuple[int, ...]]:
    """The call, and the shapes that the weight's codes and scales must have."""
    f, (_, n, k) = get_format(format), shape
    r = trusted(rotation, _SIGNS if signed else None, None)
    fe = NONE
    if front_end is not None:
        spec, *of_tensors = front_end
        fe = trusted_front(spec, *(None if t is None else torch.empty(0, dtype=t) for t in of_tensors))
    if full:
        call = _full(f, r, backend, device, shape, dtypes) if fe is NONE else None
    else:
        call = _coded(f, r, backend, device, shape, dtypes, fe, dynamic and f.has_global_scale)
    return call, f.codes_shape((n, k)), f.scales_shape((n, k))


def _coded(
    f: Format,
    r: Rotation,
    backend: str,
    device: torch.device,
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    front_end: FrontEnd,
    dynamic: bool,
) -> Call | None:
    (m, n, k), target = shape, target_of(device)
    quantize = plan_quantize(f, r, target, backend, dtype=dtypes[0], k=k, front_end=front_end.kind)
    product = plan_scaled_mm(f, target, backend, m=m, n=n, k=k, out_dtype=dtypes[1])
    if product.kernel not in _PRODUCTS.get(quantize.kernel, ()):
        return None
    if product.kernel == "fp4_mm_hopper" and k % NIBBLE_SPAN:
        return None  # its x has whole spans of columns, which quantizing does not pad
    if dynamic and plan_amax(r, target, backend, k=k).kernel != "amax_fast":
        return None
    how = shape, dtypes, device, product.kernel, product.tile
    if f.block is None:
        from hadaquant.kernels.direct import DirectLinear

        return DirectLinear(f, (r.kind, r.group, r.signs is not None), *how, front_end)
    from hadaquant.kernels.direct_fp4 import Case, DirectFp4Linear

    return DirectFp4Linear(Case(f, r, *how, dynamic))


def _full(
    f: Format,
    r: Rotation,
    backend: str,
    device: torch.device,
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
) -> Call | None:
    (m, n, k), target = shape, target_of(device)
    rotated = plan_rotate(r, target, backend)
    product = plan_weight_mm(f, target, backend, m=m, n=n, k=k, out_dtype=dtypes[1])
    if r.kind == "matrix" or rotated.kernel != "rotate" or product.kernel not in _FULL_PRODUCTS:
        return None
    if target.vendor != "nvidia" or (product.kernel == BY_NIBBLE and k % NIBBLE_SPAN):
        return None
    from hadaquant.kernels.direct_fp4 import Case
    from hadaquant.kernels.direct_full import DirectFullLinear

    return DirectFullLinear(Case(f, r, shape, dtypes, device, product.kernel, product.tile))
