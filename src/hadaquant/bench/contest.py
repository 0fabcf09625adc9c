"""Contestants: what is built for a case before anything is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hadaquant.bench.timing import Call
from hadaquant.tensor import QuantizedTensor

#: Bytes that the buffers of one contestant take together, so that its data come from memory and not from a cache.
BUFFERS = 400_000_000
#: In a CUDA graph a copy of an odd number of bytes is slower by half: 85,983,360 took 64 µs where 84,934,656 took 42,
#: on an H200. Rounded up to this many.
COPIED = 2**14


class Absent(Exception):
    """A variant that cannot be built here: its message says why."""


@dataclass
class Variant:
    """One way to do a case: calls over different buffers, and a check of the first one's answer.

    ``check`` returns what is wrong, or None. ``ours``: a wrong answer is a fault of this repository.
    """

    calls: Sequence[Call]
    check: Callable[[], str | None] | None = None
    ours: bool = True


@dataclass
class Contest:
    """All ways to do a case, ours first. A variant is built when its turn comes, and may be :class:`Absent`.

    ``bytes``: the least that must move; ``flops``: operations of the products.
    """

    variants: dict[str, Callable[[], Variant]]
    timings: tuple[str, ...]
    bytes: int | None = None
    flops: int | None = None


def buffers(device: torch.device, nbytes: int, most: int = 64) -> int:
    """How many buffers of so many bytes a contestant walks over."""
    if device.type != "cuda":
        return 1
    return max(1, min(most, math.ceil(BUFFERS / nbytes)))


def copies(device: torch.device, nbytes: int) -> Variant:
    """A device copy that moves so many bytes, read plus written, rounded up."""
    half = math.ceil(nbytes / 2 / COPIED) * COPIED
    pairs = [
        tuple(torch.empty(half, dtype=torch.uint8, device=device) for _ in range(2))
        for _ in range(buffers(device, nbytes))
    ]
    return Variant([lambda a=a, b=b: b.copy_(a) for a, b in pairs])


def differing(found: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> str | None:
    """How many bytes differ between two lists of tensors, or None if none do."""
    wrong = total = 0
    for a, b in zip(found, right, strict=True):
        if a is None or b is None:
            if a is not b:
                return "one has a tensor that the other lacks"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{tuple(a.shape)} {a.dtype} where {tuple(b.shape)} {b.dtype} is right"
        x, y = (t.to(a.device).contiguous().view(-1).view(torch.uint8) for t in (a, b))
        wrong += int((x != y).sum())
        total += x.numel()
    return f"{wrong} of {total} bytes differ" if wrong else None


def parts(q: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and global scale."""
    return q.codes, q.scales, q.global_scale


def far(found: Tensor, right: Tensor, limit: float) -> str | None:
    """The relative error ‖found − right‖ / ‖right‖ if it exceeds a limit. For other libraries' answers."""
    right = right.to(torch.float32)
    error = (torch.linalg.vector_norm(found.to(torch.float32) - right) / torch.linalg.vector_norm(right)).item()
    return None if error <= limit else f"its relative error is {error:.4f}, above {limit:.4f}"
