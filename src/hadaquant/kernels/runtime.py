"""What every launcher needs: the compile options of the numerics contract, and the right device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

#: A fused multiply-add rounds once where the contract rounds twice.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on a device that need not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def placeholder(x: Tensor) -> Tensor:
    """A pointer for an argument that the kernel was compiled not to read."""
    return x
