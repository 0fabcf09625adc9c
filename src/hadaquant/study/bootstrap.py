"""Intervals by resampling: what else a figure could have been, had other rows or other text been drawn."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

#: Resamples of an interval, and the share of them that it holds.
RESAMPLES, CONFIDENCE = 2000, 0.95


class Interval(NamedTuple):
    """The two ends of an interval."""

    low: float
    high: float


def resampled_sums(values: Tensor) -> Tensor:
    """Sums over samples of n rows drawn with replacement from [n, ...]: float64 [RESAMPLES, ...].

    The rows drawn depend on n alone, so that figures which are compared share them.
    """
    counts = _draws(values.shape[0])
    return (counts @ values.to("cpu", torch.float64).flatten(1)).view(RESAMPLES, *values.shape[1:])


@functools.lru_cache(maxsize=8)
def _draws(n: int) -> Tensor:
    """float64 [RESAMPLES, n]: how often each sample holds each row."""
    rows = torch.randint(n, (RESAMPLES, n), generator=torch.Generator().manual_seed(0))
    return torch.zeros(RESAMPLES, n, dtype=torch.float64).scatter_add_(1, rows, torch.ones_like(rows).double())


def interval(resamples: Tensor, comparisons: int = 1) -> Interval:
    """The middle :data:`CONFIDENCE` of figures [RESAMPLES].

    With ``comparisons`` above one it is wider, so that as many intervals hold together: the best of five
    looks better than it is.
    """
    tail = (1 - CONFIDENCE) / 2 / comparisons
    low, high = torch.quantile(resamples.to(torch.float64), torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return Interval(low.item(), high.item())


def mean_interval(sums: Tensor, counts: Tensor) -> Interval:
    """Interval of a mean over all tokens, of units that hold several: sums and counts are [units]."""
    both = resampled_sums(torch.stack((sums.double(), counts.double()), 1))
    return interval(both[:, 0] / both[:, 1])
