"""torch.library's own checks of every op: schema, autograd registration, fake tensors, dynamic shapes."""

import pytest
import torch
from torch.library import opcheck

import hadaquant as hq
from hadaquant.formats import FORMATS

ops = torch.ops.hadaquant
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0] * 4)
MATRIX = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0))).Q
ROTATIONS = {
    "none": ("none", None, None),
    "sylvester": ("sylvester:8", None, None),
    "regular": ("regular:64", None, None),
    "signs": ("regular:16", SIGNS, None),
    "matrix": ("matrix:16", None, MATRIX),
}
INPUTS = {
    "matrix": lambda: torch.randn(5, 64),
    "rank 3 in bf16": lambda: torch.randn(2, 3, 64, dtype=torch.bfloat16),
    "a vector in fp16": lambda: torch.randn(64, dtype=torch.float16),
    "a transposed view": lambda: torch.randn(64, 5).t(),
    "empty": lambda: torch.randn(0, 64),
}
formats = pytest.mark.parametrize("name", sorted(FORMATS))
rotations = pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
inputs = pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)


def global_scale(name: str) -> torch.Tensor | None:
    return torch.tensor(0.002) if FORMATS[name].has_global_scale else None


@rotations
@inputs
def test_a4_rotate(rotation, make):
    for inverse in (False, True):
        opcheck(ops.rotate, (make(), *rotation, inverse, "auto"))
    opcheck(ops.rotate, (make().requires_grad_(), *rotation, False, "auto"))


@rotations
@inputs
def test_a4_amax(rotation, make):
    opcheck(ops.amax, (make(), *rotation, "auto"))


@formats
@rotations
def test_a4_quantize(name, rotation):
    for make in INPUTS.values():
        opcheck(ops.quantize, (make(), name, *rotation, global_scale(name), "linear", "auto"))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@inputs
def test_a4_quantize_tiled(name, make):
    opcheck(ops.quantize, (make(), name, *ROTATIONS["signs"], global_scale(name), "tiled", "auto"))


@formats
@rotations
def test_a4_dequantize(name, rotation):
    for make in INPUTS.values():
        q = hq.quantize(make(), name)
        opcheck(ops.dequantize, (q.codes, q.scales, q.global_scale, name, *rotation, "linear"))
    if FORMATS[name].block:
        q = hq.quantize(torch.randn(5, 64), name, scale_layout="tiled")
        opcheck(ops.dequantize, (q.codes, q.scales, q.global_scale, name, *rotation, "tiled"))


@formats
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_a4_scaled_mm(name, out_dtype):
    w = hq.quantize(torch.randn(9, 64), name)
    for make in INPUTS.values():
        for bias in (None, torch.randn(9)):
            x = hq.quantize(make(), name)
            args = (x.codes, x.scales, x.global_scale, w.codes, w.scales, w.global_scale)
            opcheck(ops.scaled_mm, (*args, bias, name, out_dtype, "auto"))
