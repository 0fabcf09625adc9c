"""Scales with a smaller error than the contract's: tried one by one, the codes always by the contract.

A contract chooses a block's scale from its largest magnitude, so that nothing is clipped. A smaller
scale clips that element and serves the others better; a larger one may meet the grid better (for
NVFP4 "four over six": the largest magnitude becomes 4 instead of 6; Cook et al., arXiv:2512.02010).
Which scale has the least squared error is found by trying those around the contract's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hadaquant import layout, reference
from hadaquant.errors import LayerError, ShapeError
from hadaquant.formats import Format, get_format
from hadaquant.formats.scales import block_amax_bits, finite_amax, global_scale_of
from hadaquant.rotation import Rotation, parse
from hadaquant.tensor import QuantizedTensor

#: Elements of a weight worked on at a time, so that the trials stay small beside it.
CHUNK = 1 << 22

#: Steps of a scale byte around the contract's. E4M3 has eight steps in a factor of two; beyond these, which hold
#: four over six, a real weight hardly ever chose one.
E4M3_STEPS = tuple(range(-2, 7))
E8M0_STEPS = (-1, 0, 1)
#: Factors of a float32 scale.
FACTORS = tuple(1.0 - 0.02 * i for i in range(26))


@dataclass(frozen=True)
class Grid:
    """A format with its global scale: the numbers that a block's elements can become."""

    format: Format
    global_scale: Tensor | None

    @classmethod
    def of(cls, y: Tensor, format: Format) -> Grid:
        """The contract's, for a rotated weight."""
        return cls(format, global_scale_of(finite_amax(y)) if format.has_global_scale else None)

    @property
    def last_scale(self) -> int:
        """The largest scale byte that is a number."""
        return 0x7E if self.format.has_global_scale else 0xFE

    def contract_scales(self, blocks: Tensor) -> Tensor:
        """Stored scales of blocks [..., block]: [...]."""
        return self.format.scale.choose(block_amax_bits(blocks), self.global_scale)

    def candidates(self, scales: Tensor) -> Tensor:
        """Stored scales to try, the given ones first: [...] -> [C, ...]. A mark for NaN stays alone."""
        shape = (-1, *[1] * scales.dim())
        if scales.dtype == torch.float32:
            return scales * torch.tensor(FACTORS, dtype=torch.float32, device=scales.device).view(shape)
        steps = sorted(E4M3_STEPS if self.format.has_global_scale else E8M0_STEPS, key=abs)
        given = scales.to(torch.int32)
        tried = given + torch.tensor(steps, dtype=torch.int32, device=scales.device).view(shape)
        legal = (tried >= 0) & (tried <= self.last_scale) & (given <= self.last_scale)
        return torch.where(legal, tried, given).to(torch.uint8)

    def multiplier(self, scales: Tensor) -> Tensor:
        """What decoded codes are multiplied by."""
        return self.format.scale.multiplier(scales, self.global_scale)

    def divisor(self, scales: Tensor) -> Tensor:
        """What elements are divided by."""
        return reference.divisor(scales, self.format, self.global_scale)

    def round(self, y: Tensor, divisor: Tensor, multiplier: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of y and their values."""
        codes = reference.encode(y, divisor, self.format)
        return codes, self.format.element.decode(codes) * multiplier

    def quantized(self, codes: Tensor, scales: Tensor, rotation: Rotation) -> QuantizedTensor:
        """Unpacked codes [N, K] and scales [N, blocks] as a tensor."""
        if self.format.element.packed:
            codes = layout.pack_nibbles(codes)
        if self.format.block is None:
            scales = scales[:, 0]
        return QuantizedTensor(codes, scales.contiguous(), self.global_scale, self.format, rotation)


def rotated_weight(weight: Tensor, format: str | Format, rotation: str | Rotation) -> tuple[Tensor, Format, Rotation]:
    """float32 W·R [N, K], with its format and rotation looked up.

    Raises:
        ShapeError: not a matrix.
        BlockError, GroupError: the format or the rotation does not divide K.
        LayerError: the weight holds NaN or Inf.
    """
    f, r = get_format(format), parse(rotation).to(weight.device)
    if weight.dim() != 2:
        raise ShapeError(what="weight", found=tuple(weight.shape), expected="[N, K]", fix="give W as nn.Linear has")
    f.check_k(weight.shape[1])
    r.check_k(weight.shape[1])
    weight = weight.detach().to(torch.float32)
    if not torch.isfinite(weight).all():
        raise LayerError(layer="weight", rule="it holds NaN or Inf", fix="leave the layer as it is, or mend it")
    return reference.rotate(weight, r), f, r


def search_scales(
    weight: Tensor,
    format: str | Format,
    rotation: str | Rotation = "none",
    *,
    importance: Tensor | None = None,
    global_factors: Sequence[float] = (1.0,),
) -> QuantizedTensor:
    """Quantize a weight with the scales of the least squared error in the rotated basis.

    Never worse than the contract's own scales, which are among those tried.

    Args:
        weight: [N, K] in the original basis.
        format, rotation: as in :func:`hadaquant.quantize`.
        importance: [K], what a squared error counts in each rotated channel; one everywhere if left out.
            The diagonal of the Hessian of the rotated inputs is the usual choice.
        global_factors: of the contract's global scale, where the format has one, to try too.

    Raises:
        ShapeError, BlockError, GroupError, LayerError: see :func:`rotated_weight`.
    """
    y, f, r = rotated_weight(weight, format, rotation)
    if importance is not None and importance.shape != y.shape[1:]:
        raise ShapeError(
            what="importance", found=tuple(importance.shape), expected=tuple(y.shape[1:]), fix="one number a channel"
        )
    contract = Grid.of(y, f)
    grids = [contract]
    if contract.global_scale is not None:
        grids += [Grid(f, contract.global_scale * factor) for factor in global_factors if factor != 1.0]
    found = [(*_search(y, grid, importance), grid) for grid in grids]
    _, codes, scales, grid = min(found, key=lambda one: one[0])
    return grid.quantized(codes, scales, r)


def _search(y: Tensor, grid: Grid, importance: Tensor | None) -> tuple[float, Tensor, Tensor]:
    """The summed error of a rotated weight, its unpacked codes and its scales [N, blocks]."""
    n, k = y.shape
    blocks = grid.format.blocks(k)
    counts = None if importance is None else importance.to(y.device, torch.float32).view(blocks, -1)
    codes = torch.empty(n, blocks, k // blocks, dtype=grid.format.element.codes_dtype, device=y.device)
    scales = torch.empty(n, blocks, dtype=grid.format.scale.dtype, device=y.device)
    error = 0.0
    for rows in range(0, n, max(1, CHUNK // k)):
        part = slice(rows, rows + max(1, CHUNK // k))
        z = y[part].view(-1, blocks, k // blocks)
        scales[part], least = best_scales(z, grid, counts)
        codes[part] = reference.encode(z, grid.divisor(scales[part])[..., None], grid.format)
        error += least.sum(dtype=torch.float64).item()
    return error, codes.view(n, k), scales


def best_scales(blocks: Tensor, grid: Grid, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of blocks [N, blocks, block] the best scales [N, blocks] and their errors; the contract's where others tie."""
    best = grid.contract_scales(blocks)
    least = torch.full(best.shape, torch.inf, device=best.device)
    for scales in grid.candidates(best):
        values = grid.round(blocks, grid.divisor(scales)[..., None], grid.multiplier(scales)[..., None])[1]
        squares = values.sub_(blocks).square_()
        error = (squares if importance is None else squares.mul_(importance)).sum(-1)
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    return best, least
