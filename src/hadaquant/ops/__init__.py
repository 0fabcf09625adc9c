"""The verbs: rotate, quantize, scaled_mm. Thin Python over the torch.library ops."""

from __future__ import annotations

import torch
from torch import Tensor

from hadaquant.errors import DtypeError, MismatchError
from hadaquant.formats import Format, get_format
from hadaquant.front import FrontEnd, given
from hadaquant.ops import weight_only as _weight_only  # noqa: F401 - defines its ops
from hadaquant.ops.checks import check_front_end, check_global_number, check_input, check_tensor
from hadaquant.ops.library import op
from hadaquant.ops.options import check_backend
from hadaquant.ops.plan import LinearPlan, Plan, explain
from hadaquant.ops.target import Target
from hadaquant.rotation import Rotation, parse
from hadaquant.tensor import QuantizedTensor


def rotate(x: Tensor, rotation: str | Rotation, inverse: bool = False, *, backend: str = "auto") -> Tensor:
    """x · R along the last dimension, or x · Rᵀ with ``inverse``.

    Args:
        x: [..., K] bfloat16, float16 or float32.
        rotation: ``"none"``, ``"sylvester:16"``, ``"regular:256"``, or a :class:`Rotation`.
        inverse: rotate back.
        backend: ``auto``, ``reference`` or ``triton``; an int8 product's name counts as ``auto``.

    Returns:
        float32 [..., K], also for a 16-bit x: a rotated float16 can exceed float16.

    Raises:
        RotationError, GroupError, DtypeError, ShapeError, BackendError.
    """
    check_tensor(x)
    r = parse(rotation).to(x.device)
    return torch.ops.hadaquant.rotate(x, r.spec, r.signs, r.matrix, inverse, check_backend(backend))


def quantize(
    x: Tensor,
    format: str | Format,
    *,
    rotation: str | Rotation = "none",
    front_end: FrontEnd | None = None,
    global_scale: float | Tensor | None = None,
    scale_layout: str = "linear",
    backend: str = "auto",
) -> QuantizedTensor:
    """Rotate x along its last dimension, after a front end if one is given, choose scales, write codes.

    Args:
        x: [..., K] bfloat16, float16 or float32.
        format: ``nvfp4``, ``mxfp4``, ``mxfp4-ceil``, ``mxfp4-even``, ``int8`` or a ``Format``.
        rotation: as in :func:`rotate`.
        front_end: what is done to x before it is rotated, in the same kernel; see :mod:`hadaquant.front`.
        global_scale: for nvfp4, the multiplier g; a number, or a float32 scalar tensor, which stays
            on its device. Left out, g = (amax / 6) / 448 of the rotated x.
        scale_layout: ``linear``, or ``tiled`` for block-scaled matrix units.
        backend: ``auto``, ``reference`` or ``triton``; an int8 product's name counts as ``auto``.

    Returns:
        The same bytes on every backend, but for near-ties behind a front end with exp.

    Raises:
        UnknownChoice, RotationError, FrontEndError, GroupError, BlockError, DtypeError, ShapeError,
        GlobalScaleError, BackendError.
    """
    check_tensor(x)
    x = x.detach()  # codes have no gradient
    f, r = get_format(format), parse(rotation).to(x.device)
    args = (r.spec, r.signs, r.matrix)
    fe = given(front_end)
    front = (fe.spec, fe.factor, fe.shift)
    check_backend(backend)
    g: Tensor | None = None
    if isinstance(global_scale, Tensor):
        # any one-element shape will do; another is refused by the op
        g = global_scale.to(x.device)
        g = g.reshape(()) if g.numel() == 1 else g
    elif global_scale is not None:
        check_global_number(global_scale)
        g = torch.full((), global_scale, dtype=torch.float32, device=x.device)
    elif f.has_global_scale:
        check_input(x, f, r)  # before the work of finding the maximum
        check_front_end(x, fe)
        g = op("global_scale", x)(op("amax", x)(x, *args, backend, *front))
    codes, scales = op("quantize", x)(x, f.name, *args, g, scale_layout, backend, *front)
    return QuantizedTensor(codes, scales, g, f, r, scale_layout)


def scaled_mm(
    x: QuantizedTensor,
    w: QuantizedTensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "auto",
) -> Tensor:
    """x · wᵀ + bias of quantized x [..., K] and w [N, K], both of one format and rotation: [..., N].

    ``backend``: ``auto``, ``reference``, ``triton``, or for int8 ``cublas``, ``bf16`` or ``sgl``. All give
    int8 the same bits but ``sgl``, which ``auto`` never takes and which may differ by one ulp. For nvfp4 and mxfp4
    ``cublas`` is torch's product on the FP4 units of Blackwell, which has never run on hardware and is taken by name
    alone; it reads tiled scales, the others linear ones. Either may be given: what is not as the kernel reads it is
    put in that order first.

    Raises:
        DtypeError: an operand is not quantized.
        MismatchError: formats or rotations differ.
        ShapeError: shapes differ.
        AccumulatorError: int8 with K above 133,144.
        BackendError: the backend has no kernel for this, with each one's reason.
    """
    for what, operand in (("x", x), ("w", w)):
        if not isinstance(operand, QuantizedTensor):
            found = type(operand).__name__
            raise DtypeError(what=what, found=found, expected="a QuantizedTensor", fix="quantize it with hq.quantize")
    for what, found, expected in (
        ("x's format", x.format, w.format),
        ("x's rotation", x.rotation, w.rotation),
    ):
        if found != expected:
            raise MismatchError(what=what, found=found, expected=expected)
    return op("scaled_mm", x.codes)(
        x.codes,
        x.scales,
        x.global_scale,
        w.codes,
        w.scales,
        w.global_scale,
        bias,
        x.format.name,
        out_dtype,
        check_backend(backend),
        x.scale_layout,
        w.scale_layout,
    )


__all__ = ["LinearPlan", "Plan", "Target", "explain", "quantize", "rotate", "scaled_mm"]
