"""The two ops of a linear whose activations stay full: rotated and rounded to bfloat16, times a quantized weight.

| op | in | out |
|---|---|---|
| rotate_round | x [..., K] | bfloat16 [..., K] |
| weight_mm | bfloat16 [..., K], a quantized matrix [N, K] | [..., N] |

``by_nibble``: the bfloat16 tensor is in the order of ``layout.by_nibble``, for K a multiple of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadaquant import front, layout, reference
from hadaquant.errors import DtypeError, ShapeError
from hadaquant.formats import Format, get_format
from hadaquant.layout import NIBBLE_SPAN
from hadaquant.ops import checks
from hadaquant.ops.library import _FRONT, _ROTATION, _bare, _fake, _op, _plan
from hadaquant.ops.plan import plan_rotate, plan_weight_mm
from hadaquant.ops.weight_candidates import BY_NIBBLE
from hadaquant.rotation import trusted


@_op(f"rotate_round(Tensor x, {_ROTATION}, str backend, {_FRONT}, bool by_nibble=False) -> Tensor")
def _rotate_round(
    x: Tensor,
    rotation: str,
    signs: Tensor | None,
    matrix: Tensor | None,
    backend: str,
    front_end: str = "none",
    factor: Tensor | None = None,
    shift: Tensor | None = None,
    by_nibble: bool = False,
) -> Tensor:
    r, fe = trusted(rotation, signs, matrix), front.trusted(front_end, factor, shift)
    checks.check_input(x, None, r)
    checks.check_front_end(x, fe)
    _check_order(x, by_nibble)
    plan = _plan(plan_rotate, _bare(r), device=x.device, backend=backend)
    if plan.kernel == "reference" or x.numel() == 0:
        return reference.rotate_round(x, r, fe, by_nibble)
    from hadaquant.kernels.rotate import rotate_round

    return rotate_round(x, r, fe, by_nibble)


@_fake("rotate_round")
def _(x, rotation, signs, matrix, backend, front_end="none", factor=None, shift=None, by_nibble=False):
    checks.check_input(x, None, trusted(rotation, signs, matrix))
    checks.check_front_end(x, front.trusted(front_end, factor, shift))
    _check_order(x, by_nibble)
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def _check_order(x: Tensor, by_nibble: bool) -> None:
    if by_nibble and x.shape[-1] % NIBBLE_SPAN:
        expected = f"K a multiple of {NIBBLE_SPAN} by nibble"
        raise ShapeError(what="x", found=tuple(x.shape), expected=expected, fix="leave by_nibble out")


def _check(x: Tensor, w: tuple[Tensor, Tensor, Tensor | None], bias: Tensor | None, f: Format, by_nibble: bool) -> None:
    if x.dtype != torch.bfloat16:
        raise DtypeError(what="x", found=x.dtype, expected=torch.bfloat16, fix="use rotate_round")
    if w[0].dim() != 2:
        raise ShapeError(what="w codes", found=tuple(w[0].shape), expected="[N, K]", fix="give a matrix")
    k, n = checks.check_codes("w", *w, f), w[0].shape[0]
    checks.check_device(x, {"w_codes": w[0], "w_scales": w[1], "w_global": w[2], "bias": bias})
    f.check_k(k)
    if x.dim() == 0 or x.shape[-1] != k:
        raise ShapeError(what="x", found=tuple(x.shape), expected=f"[..., {k}]", fix="multiply matrices of one K")
    _check_order(x, by_nibble)
    if bias is not None and tuple(bias.shape) != (n,):
        raise ShapeError(what="bias", found=tuple(bias.shape), expected=(n,), fix="one number an output")


@_op(
    "weight_mm(Tensor x, Tensor w_codes, Tensor w_scales, Tensor? w_global, Tensor? bias, str format,"
    " ScalarType out_dtype, str backend, bool by_nibble=False) -> Tensor"
)
def _weight_mm(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_global: Tensor | None,
    bias: Tensor | None,
    format: str,
    out_dtype: torch.dtype,
    backend: str,
    by_nibble: bool = False,
) -> Tensor:
    f = get_format(format)
    _check(x, (w_codes, w_scales, w_global), bias, f, by_nibble)
    lead, n = x.shape[:-1], w_codes.shape[0]
    x2 = x.reshape(-1, x.shape[-1])
    m, k = x2.shape
    if m == 0 or n == 0:
        return torch.empty((*lead, n), dtype=out_dtype, device=x.device)
    plan = _plan(plan_weight_mm, f, device=x.device, backend=backend, m=m, n=n, k=k, out_dtype=out_dtype)
    if by_nibble and plan.kernel != BY_NIBBLE:
        x2, by_nibble = layout.from_nibbles(x2), False
    operands = (x2, w_codes, w_scales, w_global, f, bias, out_dtype)
    if plan.kernel == "reference":
        return reference.weight_mm(*operands).view(*lead, n)
    from hadaquant.kernels.weight_only import weight_mm

    return weight_mm(*operands, kernel=plan.kernel, tile=plan.tile, by_nibble=by_nibble).view(*lead, n)


@_fake("weight_mm")
def _(x, w_codes, w_scales, w_global, bias, format, out_dtype, backend, by_nibble=False):
    _check(x, (w_codes, w_scales, w_global), bias, get_format(format), by_nibble)
    return x.new_empty((*x.shape[:-1], w_codes.shape[0]), dtype=out_dtype)


def reads_by_nibble(x: Tensor, n: int, format: Format, out_dtype: torch.dtype, backend: str) -> bool:
    """Whether the product of x [..., K] and [N, K] reads its input by nibble: then it is best rotated into that order.

    Not asked under a compiler, whose programs serve any number of rows.
    """
    k = x.shape[-1]
    if not x.is_cuda or not x.numel() or k % NIBBLE_SPAN or torch.compiler.is_compiling():
        return False
    shape = {"m": x.numel() // k, "n": n, "k": k, "out_dtype": out_dtype}
    return _plan(plan_weight_mm, format, device=x.device, backend=backend, **shape).kernel == BY_NIBBLE
