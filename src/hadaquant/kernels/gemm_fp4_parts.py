"""Sums of an FP4 product's slices of K, then the global scales, the bias and the rounding.

Reads 4 bytes an output and slice, from the L2 cache as a rule.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.kernels.numerics import narrow, widen
from hadaquant.kernels.runtime import OPTIONS, launch, launches_overlap, overlapping


@triton.jit
def add_parts_kernel(
    parts_ptr, gx_ptr, gw_ptr, bias_ptr, y_ptr, M, N,
    SPLIT: tl.constexpr, RULE: tl.constexpr, HAS_GLOBAL: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [M, N] of the sums of the slices of K, parts [SPLIT, N, M]."""
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = (column < N)[:, None] & (row < M)[None, :]
    at = column.to(tl.int64)[:, None] * M + row[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLIT):
        acc += tl.load(parts_ptr + at + N.to(tl.int64) * M * split, mask=mask, other=0.0)
    y = acc * (128.0 if RULE == "e4m3_global" else 1.0)
    if HAS_GLOBAL:
        y = y * (tl.load(gx_ptr) * tl.load(gw_ptr))
    if HAS_BIAS:
        y = y + widen(tl.load(bias_ptr + column, mask=column < N, other=0.0))[:, None]
    y = tl.trans(narrow(y, y_ptr.dtype.element_ty))
    tl.store(y_ptr + row.to(tl.int64)[:, None] * N + column[None, :], y, mask=tl.trans(mask))


def config(format: Format, has_bias: bool, m: int, split: int, overlap: bool) -> dict[str, Any]:
    """Compile-time arguments and launch options of :func:`add_parts_kernel`."""
    return {
        "SPLIT": split,
        "RULE": format.scale.name,
        "HAS_GLOBAL": format.has_global_scale,
        "HAS_BIAS": has_bias,
        "BM": min(64, max(16, triton.next_power_of_2(m))),
        "BN": 32,
        "OVERLAP": overlap,
        "num_warps": 4,
        **OPTIONS,
    }


def grid(m: int, n: int, config: dict[str, Any]) -> tuple[int, int, int]:
    """Programs of :func:`add_parts_kernel`."""
    return triton.cdiv(n, config["BN"]), triton.cdiv(m, config["BM"]), 1


def add_parts(
    parts: Tensor, gx: Tensor, gw: Tensor, bias: Tensor, y: Tensor, format: Format, has_bias: bool
) -> None:  # fmt: skip
    """y [M, N] of parts [SPLIT, N, M]; stand-ins for what the format or the linear lacks."""
    split, n, m = parts.shape
    c = config(format, has_bias, m, split, launches_overlap(y.device))
    launch(add_parts_kernel, grid(m, n, c), (parts, gx, gw, bias, y, m, n), c | overlapping(c))
