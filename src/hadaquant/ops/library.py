"""The verbs as torch.library ops: schema, checks, fake, and one entry that asks the plan what to run.

| op | in | out |
|---|---|---|
| rotate | x [..., K] | float32 [..., K] |
| amax | x [..., K] | float32 [], over the finite values of the rotated x |
| global_scale | float32 [] of amax | float32 [], nvfp4's multiplier |
| quantize | x [..., K] | codes, scales |
| dequantize | codes, scales | float32 [..., K], original basis |
| scaled_mm | two quantized matrices | [..., N] |

An op's name holds no format. A rotation travels as its spec and its tensors, and so does a front end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hadaquant import front, layout, reference
from hadaquant.formats import Format, get_format
from hadaquant.formats.scales import global_scale_of
from hadaquant.front import FrontEnd
from hadaquant.ops import checks
from hadaquant.ops.candidates import BLOCK_SCALED, OTHERS_PRODUCTS
from hadaquant.ops.direct import unwatched
from hadaquant.ops.options import resolve_backend
from hadaquant.ops.plan import Plan, plan_amax, plan_quantize, plan_rotate, plan_scaled_mm, tell
from hadaquant.ops.target import Target, target_of
from hadaquant.rotation import NONE, Rotation, trusted

_ROTATION = "str rotation, Tensor? signs, Tensor? matrix"
_FRONT = 'str front_end="none", Tensor? factor=None, Tensor? shift=None'
_library = torch.library.Library("hadaquant", "DEF")
_on_cuda: dict[str, Callable] = {}


def op(name: str, x: Tensor) -> Callable:
    """The op for an x that has no gradient: what it does on a GPU where nobody watches, else by the dispatcher."""
    return _on_cuda[name] if unwatched(x) else getattr(torch.ops.hadaquant, name)


def _op(schema: str) -> Callable[[Callable], Callable]:
    """Define an op whose one implementation serves every device."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def register(fn: Callable) -> Callable:
        for key in ("CPU", "CUDA"):
            _library.impl(name, _as_written(fn, key.lower()), key)
        _on_cuda[name] = _as_written(fn, "cuda")
        return fn

    return register


def _as_written(fn: Callable, device: str) -> Callable:
    """Run without autograd and autocast: a contract's steps are float32, whatever the caller's mode."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        with torch.no_grad():
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return fn(*args)
            return fn(*args)

    return run


def _fake(name: str) -> Callable[[Callable], Callable]:
    return torch.library.register_fake(f"hadaquant::{name}", lib=_library)


def _plan(make: Callable[..., Plan], *deciding: Any, device: torch.device, backend: str, **more: Any) -> Plan:
    """``make``'s plan; one of a GPU is made once, since a kernel of a few microseconds waits for it.

    Arguments of ``make``: those that decide, then the target and the backend, then ``more``.
    """
    target, backend = target_of(device), resolve_backend(backend)
    if target.vendor == "cpu":  # where the environment has a say
        return tell(make(*deciding, target, backend, **more))
    return _made(make, deciding, target, backend, tuple(more.items()))


@functools.lru_cache(maxsize=4096)
def _made(make: Callable[..., Plan], deciding: Any, target: Target, backend: str, more: Any) -> Plan:
    return tell(make(*deciding, target, backend, **dict(more)))


def _bare(rotation: Rotation) -> Rotation:
    """A rotation without its tensors, whose values decide nothing: they are not to be compared."""
    return rotation if rotation.signs is rotation.matrix is None else trusted(rotation.spec, None, None)


# ---- rotate -------------------------------------------------------------------------------------


@_op(f"rotate(Tensor x, {_ROTATION}, bool inverse, str backend) -> Tensor")
def _rotate(
    x: Tensor, rotation: str, signs: Tensor | None, matrix: Tensor | None, inverse: bool, backend: str
) -> Tensor:
    r = trusted(rotation, signs, matrix)
    checks.check_input(x, None, r)
    plan = _plan(plan_rotate, _bare(r), device=x.device, backend=backend)
    if plan.kernel == "reference" or x.numel() == 0:
        y = reference.rotate(x, r, inverse).contiguous()
        return y.clone() if y is x else y
    from hadaquant.kernels.rotate import rotate

    return rotate(x, r, inverse)


@_fake("rotate")
def _(x, rotation, signs, matrix, inverse, backend):
    checks.check_input(x, None, trusted(rotation, signs, matrix))
    return x.new_empty(x.shape, dtype=torch.float32)


def _keep_rotate_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.rotation, ctx.inverse, ctx.backend = inputs
    ctx.dtype = x.dtype


def _rotate_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    back = torch.ops.hadaquant.rotate(gradient, *ctx.rotation, not ctx.inverse, ctx.backend)
    return (back.to(ctx.dtype), None, None, None, None, None)


torch.library.register_autograd(
    "hadaquant::rotate", _rotate_gradient, setup_context=_keep_rotate_arguments, lib=_library
)


# ---- amax ---------------------------------------------------------------------------------------


@_op(f"amax(Tensor x, {_ROTATION}, str backend, {_FRONT}) -> Tensor")
def _amax(
    x: Tensor,
    rotation: str,
    signs: Tensor | None,
    matrix: Tensor | None,
    backend: str,
    front_end: str = "none",
    factor: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    r, fe = trusted(rotation, signs, matrix), front.trusted(front_end, factor, shift)
    checks.check_input(x, None, r)
    checks.check_front_end(x, fe)
    plan = _plan(plan_amax, _bare(r), device=x.device, backend=backend, k=x.shape[-1], front_end=fe.kind)
    if plan.kernel == "reference" or x.numel() == 0:
        return reference.amax(x, r, fe)
    if plan.kernel == "amax_fast":
        from hadaquant.kernels.amax_fast import amax as amax_fast

        return amax_fast(x.contiguous(), r)
    from hadaquant.kernels.rotate import amax

    return amax(x, r, fe)


@_fake("amax")
def _(x, rotation, signs, matrix, backend, front_end="none", factor=None, shift=None):
    checks.check_input(x, None, trusted(rotation, signs, matrix))
    checks.check_front_end(x, front.trusted(front_end, factor, shift))
    return x.new_empty((), dtype=torch.float32)


# ---- global_scale -------------------------------------------------------------------------------


@_op("global_scale(Tensor amax) -> Tensor")
def _global_scale(amax: Tensor) -> Tensor:
    # an op of its own, because a compiler that saw its divisions would replace them by faster, wrong ones
    if _plan(plan_amax, NONE, device=amax.device, backend="auto").kernel == "amax_fast":
        from hadaquant.kernels.amax_fast import global_scale

        return global_scale(amax)  # one launch in place of seven
    return global_scale_of(amax)


@_fake("global_scale")
def _(amax):
    return amax.new_empty(())


# ---- quantize -----------------------------------------------------------------------------------


def _checked(
    x: Tensor, format: str, rotation: Rotation, global_scale: Tensor | None, scale_layout: str, front_end: FrontEnd
) -> Format:
    f = get_format(format)
    checks.check_input(x, f, rotation)
    checks.check_front_end(x, front_end)
    checks.check_global_scale(f, global_scale)
    checks.check_device(x, {"global_scale": global_scale})
    f.check_layout(scale_layout)
    return f


@_op(
    f"quantize(Tensor x, str format, {_ROTATION}, Tensor? global_scale, str scale_layout, str backend, {_FRONT})"
    " -> (Tensor codes, Tensor scales)"
)
def _quantize(
    x: Tensor,
    format: str,
    rotation: str,
    signs: Tensor | None,
    matrix: Tensor | None,
    global_scale: Tensor | None,
    scale_layout: str,
    backend: str,
    front_end: str = "none",
    factor: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r, fe = trusted(rotation, signs, matrix), front.trusted(front_end, factor, shift)
    f = _checked(x, format, r, global_scale, scale_layout, fe)
    plan = _plan(
        plan_quantize, f, _bare(r), device=x.device, backend=backend, dtype=x.dtype, k=x.shape[-1], front_end=fe.kind
    )
    if plan.kernel == "reference" or x.numel() == 0:
        return reference.quantize(x, f, r, global_scale, scale_layout, fe)
    from hadaquant.kernels.quantize import quantize

    if plan.kernel.startswith("rotate+"):
        from hadaquant.kernels import rotate

        x = rotate.front(x, fe) if fe.kind != "none" else x
        x, r, fe = rotate.rotate(x, r, False), NONE, front.NONE
    return quantize(x, f, r, global_scale, scale_layout, fe, kernel=plan.kernel)


@_fake("quantize")
def _(
    x, format, rotation, signs, matrix, global_scale, scale_layout, backend, front_end="none", factor=None, shift=None
):
    fe = front.trusted(front_end, factor, shift)
    f = _checked(x, format, trusted(rotation, signs, matrix), global_scale, scale_layout, fe)
    shape = tuple(x.shape)
    codes = x.new_empty(f.codes_shape(shape), dtype=f.element.codes_dtype)
    return codes, x.new_empty(f.scales_shape(shape, scale_layout), dtype=f.scale.dtype)


# ---- dequantize ---------------------------------------------------------------------------------


@_op(
    f"dequantize(Tensor codes, Tensor scales, Tensor? global_scale, str format, {_ROTATION}, str scale_layout)"
    " -> Tensor"
)
def _dequantize(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    format: str,
    rotation: str,
    signs: Tensor | None,
    matrix: Tensor | None,
    scale_layout: str,
) -> Tensor:
    f, r = get_format(format), trusted(rotation, signs, matrix)
    r.check_k(checks.check_codes("tensor", codes, scales, global_scale, f, scale_layout))
    return reference.dequantize(codes, scales, global_scale, f, r, scale_layout)


@_fake("dequantize")
def _(codes, scales, global_scale, format, rotation, signs, matrix, scale_layout):
    k = checks.check_codes("tensor", codes, scales, global_scale, get_format(format), scale_layout)
    return codes.new_empty((*codes.shape[:-1], k), dtype=torch.float32)


# ---- scaled_mm ----------------------------------------------------------------------------------


_Operand = tuple[Tensor, Tensor, Tensor | None]


def _check_operands(x: _Operand, w: _Operand, bias: Tensor | None, f: Format, x_layout: str, w_layout: str) -> None:
    k = checks.check_codes("x", *x, f, x_layout)
    if w[0].dim() != 2:
        raise checks.ShapeError(what="w codes", found=tuple(w[0].shape), expected="[N, K]", fix="give a matrix")
    wk = checks.check_codes("w", *w, f, w_layout)
    of_w = {"w_codes": w[0], "w_scales": w[1], "w_global": w[2]}
    checks.check_device(x[0], {"x_scales": x[1], "x_global": x[2], **of_w, "bias": bias})
    if k != wk:
        raise checks.ShapeError(what="w", found=f"K={wk}", expected=f"K={k} of x", fix="multiply matrices of one K")
    n = w[0].shape[0]
    checks.check_product(f, 0, n, k)
    if bias is not None and tuple(bias.shape) != (n,):
        raise checks.ShapeError(what="bias", found=tuple(bias.shape), expected=(n,), fix="one number an output")


def _rows_of_scales(scales: Tensor, rows: int, k: int, f: Format, scale_layout: str) -> Tensor:
    """Linear scales of a matrix with ``rows`` rows of K elements."""
    if scale_layout == "tiled":
        return layout.untile_scales(scales, rows, f.blocks(k))
    return scales.reshape(-1) if f.block is None else scales.reshape(rows, -1)


@_op(
    "scaled_mm(Tensor x_codes, Tensor x_scales, Tensor? x_global, Tensor w_codes, Tensor w_scales,"
    " Tensor? w_global, Tensor? bias, str format, ScalarType out_dtype, str backend,"
    ' str x_layout="linear", str w_layout="linear") -> Tensor'
)
def _scaled_mm(
    x_codes: Tensor,
    x_scales: Tensor,
    x_global: Tensor | None,
    w_codes: Tensor,
    w_scales: Tensor,
    w_global: Tensor | None,
    bias: Tensor | None,
    format: str,
    out_dtype: torch.dtype,
    backend: str,
    x_layout: str = "linear",
    w_layout: str = "linear",
) -> Tensor:
    f = get_format(format)
    w = (w_codes, w_scales, w_global)
    _check_operands((x_codes, x_scales, x_global), w, bias, f, x_layout, w_layout)
    lead = x_codes.shape[:-1]
    x2 = x_codes.reshape(-1, x_codes.shape[-1])
    if x2.shape[0] == 0 or w_codes.shape[0] == 0:
        return torch.empty((*lead, w_codes.shape[0]), dtype=out_dtype, device=x_codes.device)
    m, n, k = x2.shape[0], w_codes.shape[0], f.k_of(x2.shape[1])
    plan = _plan(plan_scaled_mm, f, device=x_codes.device, backend=backend, m=m, n=n, k=k, out_dtype=out_dtype)
    if plan.kernel == BLOCK_SCALED:
        from hadaquant.kernels import block_scaled

        sx = x_scales if x_layout == "tiled" else x_scales.reshape(m, -1)
        layouts = {"x_layout": x_layout, "w_layout": w_layout}
        y = block_scaled.scaled_mm(x2, sx, x_global, *w, f, bias, out_dtype, **layouts)
        return y.view(*lead, n)
    s2 = _rows_of_scales(x_scales, m, k, f, x_layout)
    w_scales = _rows_of_scales(w_scales, n, k, f, w_layout)
    operands = (x2, s2, x_global, w_codes, w_scales, w_global, f, bias, out_dtype)
    if plan.kernel == "reference":
        return reference.scaled_mm(*operands).view(*lead, n)
    if plan.kernel in OTHERS_PRODUCTS:
        from hadaquant.kernels import vendor

        y = vendor.scaled_mm(x2, s2, w_codes, w_scales, bias, out_dtype, kernel=plan.kernel)
        return y.view(*lead, n)
    from hadaquant.kernels.gemm import scaled_mm

    return scaled_mm(*operands, kernel=plan.kernel, tile=plan.tile).view(*lead, n)


@_fake("scaled_mm")
def _(
    x_codes, x_scales, x_global, w_codes, w_scales, w_global, bias, format, out_dtype, backend,
    x_layout="linear", w_layout="linear",
):  # fmt: skip
    x, w = (x_codes, x_scales, x_global), (w_codes, w_scales, w_global)
    _check_operands(x, w, bias, get_format(format), x_layout, w_layout)
    return x_codes.new_empty((*x_codes.shape[:-1], w_codes.shape[0]), dtype=out_dtype)
