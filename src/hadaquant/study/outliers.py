"""How uneven the channels of an input are: what a rotation is to mend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Points of a profile: neighbouring channels share one, of which the largest shows.
PROFILE = 128


@dataclass(frozen=True, kw_only=True)
class Spread:
    """An input's outliers.

    Attributes:
        ratio: largest over median channel, by each channel's largest magnitude; 1 where all are alike.
        kurtosis: fourth moment over the squared second, about the mean: 3 of a gaussian, more of heavy tails.
        median: of the channels' largest magnitudes.
        profile: largest magnitudes along the channels, at most :data:`PROFILE` of them.
    """

    ratio: float
    kurtosis: float
    median: float
    profile: tuple[float, ...]

    @classmethod
    def of(cls, x: Tensor) -> Spread:
        """The outliers of x [rows, K], rows finite."""
        x = x.to(torch.float32)
        absmax = x.abs().amax(0)
        median = absmax.median().item()
        centred = x.to(torch.float64) - x.mean(dtype=torch.float64)
        variance = centred.square().mean().item()
        bins = absmax.tensor_split(min(PROFILE, absmax.numel()))
        return cls(
            ratio=absmax.max().item() / median if median else float("inf"),
            kurtosis=centred.pow(4).mean().item() / variance**2 if variance else 0.0,
            median=median,
            profile=tuple(float(f"{channels.max().item():.4g}") for channels in bins),
        )
