"""Tensor descriptors, by which the copy engine of Hopper and later finds a tile."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hadaquant.kernels.runtime import Address

Base = Tensor | Address


def matrix(base: Base, rows: int, columns: int, block: list[int], element: Any) -> TensorDescriptor:
    """Of a contiguous [rows, columns], copied a block at a time."""
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return TensorDescriptor(base, [rows, columns], [columns, 1], block, layout)
