"""The descriptor of a format. All shapes, bits and byte counts derive from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hadaquant.errors import BlockError, UnknownChoice
from hadaquant.formats.elements import Element
from hadaquant.formats.scales import ScaleRule

ScaleLayout = Literal["linear", "tiled"]
SCALE_LAYOUTS: tuple[str, ...] = ("linear", "tiled")

#: Rows and columns of one tile of the tiled scale layout.
TILE_ROWS, TILE_COLS = 128, 4


@dataclass(frozen=True, kw_only=True)
class Format:
    """A low-bit format: what codes and scales mean.

    ``block``: elements along K that share a scale, or None for the whole row.
    ``version`` changes when the bytes for any input change.
    """

    name: str
    version: int
    element: Element
    scale: ScaleRule
    block: int | None
    has_global_scale: bool = False

    def __hash__(self) -> int:
        return hash(self.name)  # asked for in every call on a GPU

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Format({self.name}: {self.element.name}, {self.scale.name}, block {self.block or 'the whole row'})"

    @property
    def multiple(self) -> int:
        """What K must be a multiple of."""
        return self.block or 1

    def check_k(self, k: int) -> None:
        """Refuse a K that the block does not divide.

        Raises:
            BlockError: K is not a multiple of the block, or is zero.
        """
        if k == 0 or k % self.multiple:
            raise BlockError(k=k, block=self.multiple, format=self.name)

    def blocks(self, k: int) -> int:
        """Number of scales in a row of K elements."""
        self.check_k(k)
        return k // self.block if self.block else 1

    def codes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the codes of a tensor ``[..., K]``: two 4-bit codes a byte, or one 8-bit code."""
        return (*shape[:-1], shape[-1] * self.element.bits // 8)

    def k_of(self, codes_width: int) -> int:
        """K of codes ``[..., codes_width]``."""
        return codes_width * 8 // self.element.bits

    def check_layout(self, layout: str) -> None:
        """Refuse a scale layout that is unknown, or not one of this format.

        Raises:
            UnknownChoice.
        """
        choices = SCALE_LAYOUTS if self.block else ("linear",)
        if layout not in choices:
            raise UnknownChoice(what=f"scale_layout of format {self.name!r}", value=layout, choices=", ".join(choices))

    def scales_shape(self, shape: tuple[int, ...], layout: str = "linear") -> tuple[int, ...]:
        """Shape of the scales of a tensor ``[..., K]`` in a scale layout.

        Raises:
            UnknownChoice: a layout that is unknown, or not one of this format.
        """
        self.check_layout(layout)
        lead, cols = shape[:-1], self.blocks(shape[-1])
        if self.block is None:
            return tuple(lead)
        if layout == "linear":
            return (*lead, cols)
        rows = 1
        for n in lead:
            rows *= n
        return (-(-rows // TILE_ROWS) * TILE_ROWS, -(-cols // TILE_COLS) * TILE_COLS)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of codes, scales and global scale of a tensor ``[..., K]``."""

        def count(dims: tuple[int, ...]) -> int:
            n = 1
            for d in dims:
                n *= d
            return n

        scale_bytes = torch.empty((), dtype=self.scale.dtype).element_size()
        return (
            count(self.codes_shape(shape))
            + count(self.scales_shape(shape)) * scale_bytes
            + (4 if self.has_global_scale else 0)
        )
