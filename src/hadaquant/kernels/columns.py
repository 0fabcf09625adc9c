"""The columns of a block rounded one after the other, each error taken off those still to come: GPTQ's inner loop.

Rows know nothing of each other, so a program holds 32 of them, and the loop over columns stays in registers. Every
step is the rounded one that torch takes, so codes and errors are those of calibrate/gptq.py, bit for bit. Reads
[N, step] floats and writes [C, N, step] codes and floats; bound by latency, not by bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.kernels.numerics import decode_e2m1, encode
from hadaquant.kernels.runtime import OPTIONS, launch

#: Columns that a program may hold: powers of two.
STEPS = (16, 32)
ROWS = 32


@triton.jit
def round_columns_kernel(
    y_ptr,
    y_row,
    y_column,
    divisor_ptr,
    multiplier_ptr,
    factor_ptr,
    factor_row,
    factor_column,
    codes_ptr,
    errors_ptr,
    N,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    candidate = tl.program_id(1)
    column = tl.arange(0, STEP)
    here = rows < N
    y = tl.load(y_ptr + rows[:, None] * y_row + column[None, :] * y_column, mask=here[:, None], other=0.0)
    divisor = tl.load(divisor_ptr + candidate * N + rows, mask=here, other=1.0)
    multiplier = tl.load(multiplier_ptr + candidate * N + rows, mask=here, other=1.0)
    codes = tl.zeros((ROWS, STEP), tl.int32)
    errors = tl.zeros((ROWS, STEP), tl.float32)
    for j in range(STEP):
        mine = column[None, :] == j
        z = tl.sum(tl.where(mine, y, 0.0), 1)  # one term is not zero, so the sum is exact
        factors = tl.load(factor_ptr + j * factor_row + column * factor_column)
        pivot = tl.load(factor_ptr + j * factor_row + j * factor_column)
        code = encode(z, divisor, ELEMENT)
        value = (decode_e2m1(code) if ELEMENT == "e2m1" else code.to(tl.float32)) * multiplier
        error = tl.div_rn(z - value, tl.zeros_like(z) + pivot)
        y = tl.where(column[None, :] > j, y - error[:, None] * factors[None, :], y)
        codes = tl.where(mine, code[:, None], codes)
        errors = tl.where(mine, error[:, None], errors)
    at = (candidate * N + rows)[:, None] * STEP + column[None, :]
    tl.store(codes_ptr + at, codes.to(codes_ptr.dtype.element_ty), mask=here[:, None])
    tl.store(errors_ptr + at, errors, mask=here[:, None])


def round_columns(
    y: Tensor, divisor: Tensor, multiplier: Tensor, factor: Tensor, format: Format
) -> tuple[Tensor, Tensor]:
    """Codes and errors [C, N, step] of y [N, step] under divisors and multipliers [C, N]; see calibrate/gptq.py."""
    n, step = y.shape
    shape = (*divisor.shape, step)
    codes = torch.empty(shape, dtype=format.element.codes_dtype, device=y.device)
    errors = torch.empty(shape, dtype=torch.float32, device=y.device)
    given = (y, *y.stride(), divisor.contiguous(), multiplier.contiguous(), factor, *factor.stride())
    config = {"STEP": step, "ROWS": ROWS, "ELEMENT": format.element.name, "num_warps": 1, **OPTIONS}
    launch(round_columns_kernel, (triton.cdiv(n, ROWS), shape[0]), (*given, codes, errors, n), config)
    return codes, errors
