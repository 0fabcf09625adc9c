"""Checks on metadata: shapes, dtypes and numbers, never a tensor's values. Ops and their fakes share them."""

from __future__ import annotations

import torch
from torch import Tensor

from hadaquant.errors import AccumulatorError, DtypeError, GlobalScaleError, ShapeError
from hadaquant.formats import Format
from hadaquant.formats.elements import INT8_MAX
from hadaquant.front import FrontEnd
from hadaquant.rotation import Rotation
from hadaquant.tensor import QuantizedTensor

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Largest K whose int8 products cannot leave int32, every term being at most 127².
INT8_MAX_K = (2**31 - 1) // INT8_MAX**2


def check_tensor(x: object) -> None:
    """Refuse what is no dense tensor.

    Raises:
        DtypeError.
    """
    if not isinstance(x, Tensor):
        found, fix = type(x).__name__, "convert it with torch.as_tensor"
        if isinstance(x, QuantizedTensor):
            fix = "give the tensor before it was coded: what reads it codes it"
        raise DtypeError(what="x", found=found, expected="a torch.Tensor", fix=fix)
    if x.is_nested or x.layout != torch.strided:
        found = f"{x.dtype}, {'nested' if x.is_nested else f'in layout {x.layout}'}"
        fix = "give its parts one by one, or padded" if x.is_nested else "convert it with x.to_dense()"
        raise DtypeError(what="x", found=found, expected="a dense tensor", fix=fix)


def check_input(x: Tensor, format: Format | None, rotation: Rotation) -> None:
    """Refuse an input that cannot be rotated, or quantized if a format is given.

    Raises:
        DtypeError, ShapeError, BlockError, GroupError.
    """
    if x.dtype not in FLOAT_DTYPES:
        names = ", ".join(str(d) for d in FLOAT_DTYPES)
        raise DtypeError(what="x", found=x.dtype, expected=f"one of {names}", fix="convert it with x.to(...)")
    if x.dim() == 0:
        raise ShapeError(what="x", found=(), expected="[..., K]", fix="give at least one dimension")
    if format is not None:
        format.check_k(x.shape[-1])
    rotation.check_k(x.shape[-1])
    tensors = {"rotation signs": rotation.signs, "rotation matrix": rotation.matrix}
    check_device(x, tensors, fix="use rotation.to(device)")


def check_front_end(x: Tensor, front_end: FrontEnd) -> None:
    """Refuse a front end whose tensors do not fit x [..., K].

    Raises:
        DtypeError, ShapeError.
    """
    k = x.shape[-1]
    for name, tensor in front_end.named_tensors:
        if tensor is None:
            continue
        what = f"{name} of front end {front_end.kind!r}"
        dtypes = (x.dtype,) if front_end.kind == "silu_mul" else FLOAT_DTYPES
        if tensor.dtype not in dtypes:
            raise DtypeError(
                what=what,
                found=tensor.dtype,
                expected=f"one of {', '.join(str(d) for d in dtypes)}",
                fix="convert it with .to(...)",
            )
        # one comparison a shape: a compiler that does not know the sizes yet cannot look into a list
        fits, expected = tensor.shape == (k,), f"{(k,)}"
        if front_end.kind == "silu_mul":
            fits, expected = tensor.shape == x.shape, f"{tuple(x.shape)}"
        elif front_end.kind == "ada_norm" and x.dim() > 1:
            fits, expected = fits or tensor.shape == (x.shape[0], k), f"{(k,)} or {(x.shape[0], k)}"
        if not fits:
            fix = f"x has shape {tuple(x.shape)}; see hadaquant.front.{front_end.kind}"
            raise ShapeError(what=what, found=tuple(tensor.shape), expected=expected, fix=fix)
        check_device(x, {what: tensor})


def check_global_scale(format: Format, global_scale: Tensor | None) -> None:
    """Refuse a global scale that the format does not have, or whose shape or dtype is wrong.

    Raises:
        GlobalScaleError.
    """
    if global_scale is None:
        if format.has_global_scale:
            raise GlobalScaleError(
                value="None", rule=f"format {format.name!r} needs one", fix="use hq.quantize, which computes it"
            )
        return
    if not format.has_global_scale:
        raise GlobalScaleError(
            value="given", rule=f"format {format.name!r} has no global scale", fix="leave global_scale out"
        )
    if global_scale.dtype != torch.float32 or global_scale.numel() != 1:
        raise GlobalScaleError(
            value=f"{tuple(global_scale.shape)} {global_scale.dtype}",
            rule="it is one float32 number",
            fix="torch.tensor(g, dtype=torch.float32)",
        )


def check_device(x: Tensor, operands: dict[str, Tensor | None], fix: str = "move it there") -> None:
    """Refuse operands, by name, that are not where x is: a kernel is given their bare addresses.

    Raises:
        ShapeError.
    """
    for name, tensor in operands.items():
        if tensor is not None and tensor.device != x.device:
            raise ShapeError(
                what=f"{name} on device {tensor.device}",
                found=tuple(tensor.shape),
                expected=f"the same device as x, {x.device}",
                fix=fix,
            )


def check_global_number(value: float) -> None:
    """Refuse a global scale, given as a Python number, that is not positive and finite.

    Raises:
        GlobalScaleError.
    """
    float32 = torch.finfo(torch.float32)
    if not float32.smallest_normal * float32.eps <= value <= float32.max:
        raise GlobalScaleError(
            value=value, rule="it must be positive and finite in float32", fix="g = amax / (6 · 448), or leave it out"
        )


def check_product(format: Format, m: int, n: int, k: int) -> None:
    """Refuse a product [M, K] · [N, K]ᵀ that the format cannot do.

    Raises:
        BlockError, AccumulatorError.
    """
    format.check_k(k)
    if format.block is None and k > INT8_MAX_K:
        raise AccumulatorError(k=k, limit=INT8_MAX_K, term=f"{INT8_MAX}²")


def check_codes(
    what: str,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    format: Format,
    scale_layout: str = "linear",
) -> int:
    """Refuse codes and scales that do not belong together; returns K.

    Raises:
        DtypeError, ShapeError, GlobalScaleError, UnknownChoice.
    """
    for name, tensor, dtype in (("codes", codes, format.element.codes_dtype), ("scales", scales, format.scale.dtype)):
        if tensor.dtype != dtype:
            fix = f"give the {name} that hq.quantize made"
            raise DtypeError(what=f"{what} {name}", found=tensor.dtype, expected=dtype, fix=fix)
    k = format.k_of(codes.shape[-1])
    expected = format.scales_shape((*codes.shape[:-1], k), scale_layout)
    if tuple(scales.shape) != expected:
        fix = "one scale a block" if format.block else "one scale a row, without further dimensions"
        raise ShapeError(what=f"{what} scales ({scale_layout})", found=tuple(scales.shape), expected=expected, fix=fix)
    check_global_scale(format, global_scale)
    return k
