"""What is kept of the inputs of one linear: running sums and a sample, never the inputs themselves."""

from __future__ import annotations

import torch
from torch import Tensor


class InputStatistics:
    """Statistics of a linear's inputs [rows, K], gathered batch by batch.

    Rows that hold NaN or Inf are counted and left out of everything else.

    Attributes:
        count: finite rows seen; ``nonfinite``: the others.
        absmax: float32 [K], each channel's largest magnitude; zeros before the first row.
        gram: float64 [K, K], the sum of xᵀx over rows; None unless asked for.
        sample: [up to ``rows``, K] rows drawn evenly from all (a reservoir of a fixed seed), in their own dtype.
    """

    def __init__(self, k: int, device: torch.device, *, gram: bool, rows: int) -> None:
        self.count = self.nonfinite = 0
        self.absmax = torch.zeros(k, dtype=torch.float32, device=device)
        self.gram = torch.zeros(k, k, dtype=torch.float64, device=device) if gram else None
        self._rows = rows
        self._kept: list[Tensor] = []
        self._random = torch.Generator().manual_seed(0)

    @property
    def sample(self) -> Tensor:
        """[up to ``rows``, K]; without rows where none was asked for or seen."""
        return torch.stack(self._kept) if self._kept else self.absmax.new_zeros(0, self.absmax.numel())

    def add(self, x: Tensor) -> None:
        """Take in x [..., K]."""
        x = x.reshape(-1, x.shape[-1])
        finite = torch.isfinite(x).all(-1)
        found = int(finite.sum())
        if found < x.shape[0]:
            self.nonfinite += x.shape[0] - found
            x = x[finite]
        if not found:
            return
        self._draw(x)
        self.count += found
        # products in float32 of one batch, summed in float64: a channel that towers over the others
        # would swallow them in a long float32 sum
        y = x.to(torch.float32)
        torch.maximum(self.absmax, y.abs().amax(0), out=self.absmax)
        if self.gram is not None:
            self.gram += y.T @ y

    def _draw(self, x: Tensor) -> None:
        """Row number t takes a random place of t + 1, and is kept if that is one of the first ``rows``."""
        if not self._rows:
            return
        t = torch.arange(self.count, self.count + x.shape[0], dtype=torch.float64)
        places = (torch.rand(x.shape[0], generator=self._random, dtype=torch.float64) * (t + 1)).long()
        free = self._rows - len(self._kept)
        self._kept += list(x[:free].clone())
        for i in range(free, x.shape[0]):
            if places[i] < self._rows:
                self._kept[int(places[i])] = x[i].clone()
