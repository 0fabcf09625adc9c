"""One linear's weight, from file to file in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hadaquant import reference
from hadaquant.checkpoint.files import SafetensorsWriter, StoredTensor, TensorSpec
from hadaquant.checkpoint.layouts import Layout
from hadaquant.contract import Contract
from hadaquant.formats import Format
from hadaquant.formats.scales import global_scale_of
from hadaquant.ops import quantize
from hadaquant.ops.checks import FLOAT_DTYPES
from hadaquant.rotation import Rotation
from hadaquant.tensor import QuantizedTensor

#: Elements of a weight worked on at a time: 16 MiB in float32.
CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class WeightJob:
    """A weight [N, K] to quantize. ``note`` says what was changed of the rotation that was asked for.

    ``quantized``: what was made of it elsewhere, with better codes than the nearest, on the CPU.
    """

    layer: str
    weight: StoredTensor
    format: Format
    rotation: Rotation
    activations: str = "coded"
    note: str = ""
    quantized: QuantizedTensor | None = None

    @property
    def contract(self) -> Contract:
        """What the result will be."""
        n, k = self.weight.shape
        return Contract.of(self.format, self.rotation, (n, k), self.activations)

    def specs(self, layout: Layout) -> dict[str, TensorSpec]:
        """Names, shapes and dtypes of the result in a layout."""
        q = quantize(torch.empty(self.weight.shape, device="meta"), self.format, rotation=self.rotation)
        tensors = layout.rows(q) | layout.once(q, self.contract)
        return {f"{self.layer}.{suffix}": TensorSpec.of(t, f"{self.layer}.{suffix}") for suffix, t in tensors.items()}

    def write(
        self, writer: SafetensorsWriter, layout: Layout, device: torch.device, advance: Callable[[int], None]
    ) -> float:
        """Quantize and write; returns ‖W − Ŵ‖ / ‖W‖, NaN where W holds NaN or Inf.

        Memory: one chunk, whatever the weight's size. The bytes are those of the weight quantized at
        once: rows are independent but for the global scale, which takes a pass of its own. ``advance``
        is told the bytes of the source that are done.
        """
        own = self.quantized is None and self.format.has_global_scale
        global_scale = self._global_scale(device) if own else None
        squares = torch.zeros(2, dtype=torch.float64)
        q = None
        for first, w in self._chunks(device):
            if self.quantized is None:
                q = quantize(w, self.format, rotation=self.rotation, global_scale=global_scale)
            else:
                q = self._rows(self.quantized, first, w)
            for suffix, rows in layout.rows(q).items():
                writer.write(f"{self.layer}.{suffix}", rows, first)
            w = w.to(torch.float32)
            for i, difference in enumerate((q.dequantize() - w, w)):
                squares[i] += torch.linalg.vector_norm(difference, dtype=torch.float64).cpu() ** 2
            advance(self.weight.nbytes * w.shape[0] // self.weight.shape[0])
        if q is not None:
            for suffix, tensor in layout.once(q, self.contract).items():
                writer.write(f"{self.layer}.{suffix}", tensor)
        error, norm = squares.sqrt().tolist()
        return error / norm if norm else 0.0

    @staticmethod
    def _rows(q: QuantizedTensor, first: int, w: Tensor) -> QuantizedTensor:
        rows = slice(first, first + w.shape[0])
        return replace(q, codes=q.codes[rows], scales=q.scales[rows]).to(w.device)

    def _global_scale(self, device: torch.device) -> Tensor:
        r = self.rotation.to(device)
        found = torch.zeros((), dtype=torch.float32, device=device)
        for _, w in self._chunks(device):
            found = torch.maximum(found, torch.ops.hadaquant.amax(w, r.spec, r.signs, r.matrix, "auto"))
        return global_scale_of(found)

    def _chunks(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) in a dtype that quantize takes."""
        n, k = self.weight.shape
        # whole steps of the reference, so that also a matrix rotation is computed in the same pieces
        step = max(1, reference.CHUNK // k)
        rows = step * max(1, CHUNK // (step * k))
        for first in range(0, n, rows):
            w = self.weight.read(first, min(first + rows, n)).to(device)
            yield first, w if w.dtype in FLOAT_DTYPES else w.to(torch.float32)
