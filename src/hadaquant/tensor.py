"""A quantized tensor: a plain frozen container of codes, scales and what they mean."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.rotation import Rotation


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Codes and scales of a tensor ``[..., K]``, rotated along K.

    Attributes:
        codes: uint8 [..., K/2], element 2i in the low nibble, or int8 [..., K].
        scales: uint8 bytes of E4M3 or E8M0, [..., K/block] (``linear``) or
            [ceil(M/128)*128, ceil(C/4)*4] in tiled order (``tiled``); float32 [...] for int8.
        global_scale: float32 scalar tensor, or None where the format has none.
        format: what codes and scales mean.
        rotation: the basis they are in.
        scale_layout: ``linear`` or ``tiled``.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    format: Format
    rotation: Rotation
    scale_layout: str = "linear"

    def __repr__(self) -> str:
        return (
            f"QuantizedTensor({self.format}, rotation={self.rotation}, shape={list(self.shape)}, "
            f"device={self.device}, {self.nbytes} bytes" + (", tiled scales)" if self.scale_layout == "tiled" else ")")
        )

    @property
    def shape(self) -> torch.Size:
        """Logical shape ``[..., K]``."""
        return torch.Size((*self.codes.shape[:-1], self.format.k_of(self.codes.shape[-1])))

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes that codes, scales and global scale take."""
        return sum(t.nbytes for t in (self.codes, self.scales, self.global_scale) if t is not None)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same tensor on another device."""
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            global_scale=None if self.global_scale is None else self.global_scale.to(device),
            rotation=self.rotation.to(device),
        )

    def dequantize(self) -> Tensor:
        """float32 values [..., K] in the original basis: decoded, then rotated back."""
        return torch.ops.hadaquant.dequantize(
            self.codes,
            self.scales,
            self.global_scale,
            self.format.name,
            self.rotation.spec,
            self.rotation.signs,
            self.rotation.matrix,
            self.scale_layout,
        )
