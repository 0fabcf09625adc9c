"""GPTQ: each column's rounding error is made up for by the columns that are still to be rounded.

Minimizes ‖X·Wᵀ − X·Ŵᵀ‖² column by column (Frantar et al., arXiv:2210.17323), in the rotated basis and on the
contract's grid; with a scale search in each block it is the recipe of MR-GPTQ (Egiazarian et al., arXiv:2509.23202).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hadaquant import reference
from hadaquant.calibrate.search import Grid, best_scales, rotated_weight
from hadaquant.errors import LayerError, ShapeError
from hadaquant.formats import Format
from hadaquant.ops.plan import has_triton
from hadaquant.rotation import Rotation
from hadaquant.tensor import QuantizedTensor

#: Columns after which the errors so far are taken to the rest of the weight at once.
CHUNK = 128

#: Columns of a step within a chunk where a row has one scale.
STEP = 32


@dataclass(frozen=True)
class Curvature:
    """What GPTQ needs to know of a linear's inputs; shared by all linears that read them.

    Attributes:
        hessian: float64 [K, K], the sum of xᵀx over the rotated inputs, undamped.
        order: int64 [K], the rotated channels in the order they are rounded.
        factor: float32 [K, K], upper triangular U with UᵀU the inverse of the damped Hessian in that order.
    """

    hessian: Tensor
    order: Tensor
    factor: Tensor

    @classmethod
    def of(
        cls,
        gram: Tensor,
        format: Format,
        rotation: Rotation,
        *,
        damping: float = 0.1,
        act_order: bool = True,
    ) -> Curvature:
        """From the sum of xᵀx in the original basis; see :func:`gptq` for the arguments.

        Raises:
            LayerError: the sums hold NaN or Inf, or no damping makes them positive definite.
        """
        r = rotation.to(gram.device)
        h = _rotated(gram, r)
        if not torch.isfinite(h).all():
            raise LayerError(layer="hessian", rule="it holds NaN or Inf", fix="look at the layer's inputs")
        diagonal = h.diagonal()
        dead = diagonal <= 0
        mean = diagonal[~dead].mean() if not dead.all() else torch.ones_like(diagonal[0])
        order = _order(diagonal, format.block) if act_order else torch.arange(len(h), device=h.device)
        while True:
            # a channel that is always zero gets a pivot of its own and moves nothing else
            damped = h + torch.diag(torch.where(dead, mean, damping * mean))
            lower, info = torch.linalg.cholesky_ex(damped[order][:, order].flip(0, 1))
            if not info:
                break
            damping = max(10 * damping, 1e-6)
            if damping > 1:
                raise LayerError(layer="hessian", rule="it is not positive", fix="give sums of xᵀx")
        eye = torch.eye(len(h), dtype=h.dtype, device=h.device)
        # H = U'U'ᵀ with U' upper, so that U = U'⁻¹ gives UᵀU = H⁻¹ without inverting H
        factor = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
        return cls(h, order, factor.to(torch.float32))


def _rotated(gram: Tensor, rotation: Rotation) -> Tensor:
    """RᵀGR in float64, R block-diagonal."""
    g = gram.to(torch.float64)
    if rotation.kind == "none":
        return g
    block = rotation.dense().to(g.device)
    k, side = len(g), rotation.group

    def right(m: Tensor) -> Tensor:
        return (m.reshape(-1, side) @ block).view(k, k)

    return right(right(g).T).T


def _order(diagonal: Tensor, block: int | None) -> Tensor:
    """Channels from the strongest to the weakest; blocks stay together, ordered by their strongest means."""
    strengths = diagonal.view(-1, block or len(diagonal))
    blocks = strengths.sum(1).argsort(descending=True, stable=True)
    inner = strengths[blocks].argsort(dim=1, descending=True, stable=True)
    return (blocks[:, None] * strengths.shape[1] + inner).flatten()


def gptq(
    weight: Tensor,
    hessian: Tensor | Curvature,
    format: str | Format,
    rotation: str | Rotation = "none",
    *,
    search: bool = False,
    damping: float = 0.1,
    act_order: bool = True,
    fixed: bool = False,
) -> QuantizedTensor:
    """Quantize a weight so that its product with the inputs changes least.

    Args:
        weight: [N, K] in the original basis.
        hessian: [K, K], a multiple of the sum of xᵀx over the inputs x of the linear, in the original basis;
            or a :class:`Curvature`, which holds the next arguments but ``search`` and ``fixed``.
        format, rotation: as in :func:`hadaquant.quantize`.
        search: try scales around the contract's and keep those of the least error.
        damping: share of the mean diagonal that is added to the diagonal; raised where the Hessian is singular.
        act_order: round the channels of the strongest inputs first; a block's channels stay together.
        fixed: choose all scales from the weight as it is, not each block's when its turn comes.

    Raises:
        ShapeError, BlockError, GroupError, LayerError: see :func:`rotated_weight` and :class:`Curvature`.
    """
    y, f, r = rotated_weight(weight, format, rotation)
    k = y.shape[1]
    if isinstance(hessian, Tensor):
        if tuple(hessian.shape) != (k, k):
            found = tuple(hessian.shape)
            raise ShapeError(what="hessian", found=found, expected=(k, k), fix="one row and column a channel")
        hessian = Curvature.of(hessian, f, r, damping=damping, act_order=act_order)
    grid = Grid.of(y, f)
    codes, scales = _round(y[:, hessian.order], grid, hessian.factor, search, fixed)
    back = hessian.order.argsort()
    blocks = f.blocks(k)
    return grid.quantized(codes[:, back], scales[:, back.view(blocks, -1)[:, 0] // (k // blocks)], r)


def _round(y: Tensor, grid: Grid, factor: Tensor, search: bool, fixed: bool) -> tuple[Tensor, Tensor]:
    """Unpacked codes [N, K] and scales [N, blocks] of a rotated weight, which is used up."""
    n, k = y.shape
    block = grid.format.block or k
    step = min(block, STEP)
    codes = torch.empty(n, k, dtype=grid.format.element.codes_dtype, device=y.device)
    early = None
    if fixed or step != block:
        blocks = y.view(n, -1, block)
        counts = factor.diagonal().square().reciprocal().view(-1, block)
        early = best_scales(blocks, grid, counts)[0] if search else grid.contract_scales(blocks)
    scales = torch.empty(n, k // block, dtype=grid.format.scale.dtype, device=y.device)
    for start in range(0, k, CHUNK):
        stop = min(start + CHUNK, k)
        errors = torch.empty(n, stop - start, device=y.device)
        for a in range(start, stop, step):
            b = min(a + step, stop)
            z, u = y[:, a:b], factor[a:b, a:b]
            if early is not None:
                tried = early[None, :, a // block]
            else:
                tried = grid.contract_scales(z)
                tried = grid.candidates(tried) if search else tried[None]
            found, error = _round_columns(z, grid, tried, u)
            best = error.square().sum(-1).argmin(0)
            rows = torch.arange(n, device=y.device)
            codes[:, a:b], error = found[best, rows], error[best, rows]
            scales[:, a // block] = tried[best, rows]
            y[:, b:stop] -= error @ factor[a:b, b:stop]
            errors[:, a - start : b - start] = error
        y[:, stop:] -= errors @ factor[start:stop, stop:]
    return codes, scales


def _round_columns(y: Tensor, grid: Grid, scales: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and errors [C, N, step] of columns y [N, step] under each of the scales [C, N] of their block."""
    if y.is_cuda and has_triton():
        from hadaquant.kernels import columns

        if y.shape[1] in columns.STEPS:
            divisor, multiplier = grid.divisor(scales), grid.multiplier(scales)
            return columns.round_columns(y, divisor, multiplier, factor, grid.format)
    return round_columns_in_torch(y, grid, scales, factor)


def round_columns_in_torch(y: Tensor, grid: Grid, scales: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The same step by step, on any device."""
    divisor, multiplier = grid.divisor(scales), grid.multiplier(scales)
    y = y.expand(len(scales), *y.shape).clone()
    codes = torch.empty(y.shape, dtype=grid.format.element.codes_dtype, device=y.device)
    errors = torch.empty_like(y)
    for i in range(y.shape[-1]):
        codes[..., i], values = grid.round(y[..., i], divisor, multiplier)
        errors[..., i] = (y[..., i] - values) / factor[i, i]
        y[..., i + 1 :] -= errors[..., i, None] * factor[i, i + 1 :]
    return codes, errors


def output_error(weight: Tensor, quantized: QuantizedTensor, curvature: Curvature) -> float:
    """‖X·Wᵀ − X·Ŵᵀ‖ / ‖X·Wᵀ‖ over the inputs that the curvature was made of; 0 where that is 0 / 0."""
    w = rotated_weight(weight, quantized.format, quantized.rotation)[0].to(torch.float64)
    q = reference.decode(quantized.codes, quantized.scales, quantized.global_scale, quantized.format)
    error, output = (((m @ curvature.hessian) * m).sum().clamp(min=0).sqrt().item() for m in (q - w, w))
    return error / output if output else 0.0
