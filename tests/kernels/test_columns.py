"""GPTQ's inner loop as a kernel: bit for bit what torch does."""

import importlib

import pytest
import torch

from hadaquant.calibrate.search import Grid
from hadaquant.formats import get_format
from hadaquant.kernels.columns import ROWS, round_columns, round_columns_kernel
from hadaquant.kernels.runtime import OPTIONS
from hadaquant.ops.plan import interpreting

from .compiling import SHARED_LIMIT, TARGETS, compile_for

torch_columns = importlib.import_module("hadaquant.calibrate.gptq").round_columns_in_torch


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])  # a Cholesky factor on a GPU lies turned
@pytest.mark.parametrize("n", [1, 70])
@pytest.mark.parametrize(("format", "step"), [("nvfp4", 16), ("mxfp4", 32), ("mxfp4-even", 32), ("int8", 32)])
def test_codes_and_errors_are_those_of_torch(device, format, step, n, turned):
    random = torch.Generator().manual_seed(n)
    y = torch.randn(n, step, generator=random)
    y[0, :5] = torch.tensor([0.0, -0.0, 1e-30, 300.0, -2.5])
    factor = torch.rand(step, step, generator=random).triu() + torch.eye(step)
    y, factor = y.to(device), factor.to(device)
    if turned:
        y, factor = y.T.contiguous().T, factor.T.contiguous().T
    grid = Grid.of(y, get_format(format))
    scales = grid.contract_scales(y)
    scales = scales[None] if format == "int8" else grid.candidates(scales)
    expected = torch_columns(y, grid, scales, factor)
    found = round_columns(y, grid.divisor(scales), grid.multiplier(scales), factor, grid.format)
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two)


@pytest.mark.skipif(interpreting(), reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target):
    pointers = dict.fromkeys(("y_ptr", "divisor_ptr", "multiplier_ptr", "factor_ptr", "errors_ptr"), "*fp32")
    for element, step in (("e2m1", 16), ("e2m1", 32), ("int8", 32)):
        codes = {"codes_ptr": "*u8" if element == "e2m1" else "*i8"}
        arguments = {"STEP": step, "ROWS": ROWS, "ELEMENT": element, "num_warps": 1, **OPTIONS}
        usage = compile_for(round_columns_kernel, pointers | codes, arguments, target)
        assert usage.spills == 0 and usage.shared <= SHARED_LIMIT
