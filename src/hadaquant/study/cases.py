"""Inputs of the error study: small tensors on which a rotation is known to help, to hurt, or to do nothing.

Each is drawn from a stated seed, so that its errors can be compared to the last printed digit. No
random state outside this file changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One input and the rotations worth trying on it.

    Attributes:
        name: short, without spaces.
        origin: how it is drawn, with its seed.
        x: float32 [M, K].
        rotations: specs as of :func:`hadaquant.rotation.parse`; ``matrix:G`` is a random orthogonal matrix.
        outliers: channels (columns of x) that are far larger than the others; the others are the
            quiet channels.
    """

    name: str
    origin: str
    x: Tensor
    rotations: tuple[str, ...]
    outliers: tuple[int, ...] = ()


#: 16 is NVFP4's block, 32 is MXFP4's, 64 the whole row.
_NARROW = ("sylvester:16", "matrix:16", "sylvester:32", "regular:64")
_WIDE = ("sylvester:16", "regular:256", "sylvester:256")


def narrow_cases() -> list[Case]:
    """Three [256, 64] tensors drawn one after the other from one seed: outliers, gaussian, heavy tails."""
    outliers = (3, 17, 40)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loud = torch.randn(256, 64)
        loud[:, outliers] *= 20
        gaussian = torch.randn(256, 64)
        heavy = torch.distributions.StudentT(3.0).sample((256, 64))
    return [
        Case(
            name="outlier-channels",
            origin="manual_seed(0), randn(256, 64), channels 3, 17, 40 times 20",
            x=loud,
            rotations=_NARROW,
            outliers=outliers,
        ),
        Case(name="gaussian", origin="the next randn(256, 64) of that seed", x=gaussian, rotations=_NARROW),
        Case(name="student-t3", origin="then StudentT(3).sample((256, 64))", x=heavy, rotations=_NARROW),
    ]


def wide_cases(seed: int = 0) -> list[Case]:
    """Three [64, 256] tensors drawn in float64, each from its own seed: ``seed`` and the next two."""

    def generator(offset: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed + offset)

    def randn(offset: int) -> Tensor:
        return torch.randn(64, 256, dtype=torch.float64, generator=generator(offset))

    loud = randn(0)
    loud[:, 5] *= 60
    # the inverse of Laplace's distribution function, of u in -1/2 … 1/2
    u = torch.rand(64, 256, dtype=torch.float64, generator=generator(1)) - 0.5
    laplace = -u.sign() * torch.log1p(-2 * u.abs())
    constant = 1 + 0.01 * randn(2)
    return [
        Case(
            name="one-channel",
            origin=f"float64 randn(64, 256) of seed {seed}, channel 5 times 60",
            x=loud.to(torch.float32),
            rotations=_WIDE,
            outliers=(5,),
        ),
        Case(
            name="laplace",
            origin=f"Laplace(0, 1) of float64 rand(64, 256) of seed {seed + 1}",
            x=laplace.to(torch.float32),
            rotations=_WIDE,
        ),
        Case(
            name="near-constant",
            origin=f"1 + 0.01 · float64 randn(64, 256) of seed {seed + 2}",
            x=constant.to(torch.float32),
            rotations=_WIDE,
        ),
    ]


def all_cases() -> list[Case]:
    """Every case of the study."""
    return narrow_cases() + wide_cases()
