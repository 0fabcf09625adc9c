"""The kernels that can multiply 16-bit activations by quantized weights, and what speaks for and against each."""

from __future__ import annotations

import torch

from hadaquant.formats import Format
from hadaquant.ops.candidates import Candidate, copied_refusal, hopper_refusal, hopper_tile, packed_refusal
from hadaquant.ops.target import Target

#: Most rows for weights decoded in the registers of the matrix units that multiply them.
FEW_ROWS = 64
#: The same where the Hopper product can take the rest: the faster one with 64 rows (measured on an H200).
HOPPER_FEW_ROWS = 16
#: The kernel that reads x in the order of ``layout.by_nibble``.
BY_NIBBLE = "weight_mm_hopper"


def weight_candidates(
    format: Format, target: Target, m: int, n: int, k: int, out_dtype: torch.dtype
) -> list[Candidate]:
    """Candidates for bfloat16 [M, K] · quantized [N, K]ᵀ, best first."""
    packed = packed_refusal(format, target, k)
    hopper = hopper_refusal(packed, target, n, out_dtype)
    most = HOPPER_FEW_ROWS if not hopper else FEW_ROWS
    few = f"M={m} is above {most}" if m > most else None
    return [
        Candidate(
            kernel="weight_few_rows",
            why="packed weights decoded in the registers of the bfloat16 matrix units, each read once",
            refusal=packed or few,
            tile=few_rows_tile(m, n, target),
        ),
        Candidate(
            kernel=BY_NIBBLE,
            why="weights decoded in the registers of the warpgroup matrix units, fed by TMA",
            refusal=hopper,
            tile=hopper_tile(m, n, target),
        ),
        Candidate(
            kernel="weight_unpacked",
            why="weights copied to bfloat16 (exact), multiplied by torch into float32, then one pass of scales",
            refusal=copied_refusal(target),
            unasked=None if m > FEW_ROWS else f"a copy of the weights in each call costs more than M={m} rows",
        ),
        Candidate(kernel="weight_mm", why="tiles of weights decoded to bfloat16 (exact), multiplied into float32"),
    ]


def few_rows_tile(m: int, n: int, target: Target) -> tuple[int, int]:
    """Rows of x and of the weight in a tile: narrow tiles while they all run at once."""
    narrow = -(-n // 16) <= 2 * target.multiprocessors
    if m <= 8:
        return 8, 16
    if m <= 16:
        return (16, 16) if narrow else (16, 32)
    return 32, 16
