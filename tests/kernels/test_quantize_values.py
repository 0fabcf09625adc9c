"""Values of FP4 codes made in one pass are those of the reference's codes, in the orders of the products."""

import pytest
import torch

from hadaquant import reference
from hadaquant.formats import get_format
from hadaquant.formats.scales import global_scale_of
from hadaquant.kernels.gemm_fp4 import interleaved
from hadaquant.kernels.quantize_blocks_fast import CELL
from hadaquant.kernels.quantize_values import quantize_values
from hadaquant.layout import by_nibble
from hadaquant.ops.plan import interpreting
from hadaquant.rotation import Rotation, parse

from .test_twins import nasty


@pytest.fixture(autouse=True)
def _emulated(device, monkeypatch):
    if interpreting():
        from .emulated import emulate

        emulate(monkeypatch)


#: Both are stored of the same values; each is compiled.
ORDERS = (by_nibble, interleaved)


def check(x: torch.Tensor, format: str, rotation: Rotation, g: float, device: str) -> None:
    f = get_format(format)
    scale = torch.tensor(g) if f.has_global_scale else None
    codes, scales = reference.quantize(x, f, rotation, scale, "linear")
    expected, moved = reference._scaled_codes(codes, scales, f), None if scale is None else scale.to(device)
    for order in ORDERS if format == "nvfp4" else ORDERS[:1]:
        found = quantize_values(x.to(device), f, rotation.to(device), moved, order is by_nibble).float().cpu()
        assert torch.equal(found.nan_to_num(7.5), order(expected).nan_to_num(7.5))


@pytest.mark.parametrize(
    ("format", "rotation"),
    [
        ("nvfp4", "none"),
        ("nvfp4", "sylvester:16"),
        ("nvfp4", "regular:64"),
        ("mxfp4", "none"),
        ("mxfp4", "regular:64"),
        ("mxfp4-ceil", "sylvester:16"),
        ("mxfp4-even", "sylvester:16"),
    ],
)
def test_same_values(format, rotation, device):
    check(nasty(9, 256, torch.bfloat16), format, parse(rotation), 0.003, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_same_values_of_other_inputs(dtype, device):
    signs = torch.randint(0, 2, (32,), generator=torch.Generator().manual_seed(0)) * 2 - 1
    check(nasty(9, 256, dtype), "nvfp4", Rotation("sylvester", 32, signs=signs), 0.003, device)


@pytest.mark.parametrize("g", [1e-30, 1e-5, 3.0, 1e30])
@pytest.mark.parametrize("m", [1, 5, 33])
def test_global_scales_that_fit_badly(g, m, device):
    x = torch.randn(m, 128, generator=torch.Generator().manual_seed(m)).to(torch.bfloat16)
    check(x, "nvfp4", parse("sylvester:16"), g, device)


def test_global_scale_of_a_largest_magnitude(device):
    x, f, r = torch.randn(40, 128).to(torch.bfloat16), get_format("nvfp4"), parse("none")
    for amax in (reference.amax(x, r), torch.zeros(())):
        cell = torch.full((2 * CELL.value,), amax.item(), device=device)
        dynamic = quantize_values(x.to(device), f, r, cell, False, dynamic=True)
        assert cell[CELL.value].cpu() == global_scale_of(amax)
        assert torch.equal(dynamic, quantize_values(x.to(device), f, r, cell[CELL.value], False))
