"""Kernels with front ends compile ahead of time for every target, without spills."""

import pytest
import torch

from hadaquant import front
from hadaquant.formats import get_format
from hadaquant.ops.plan import interpreting

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from hadaquant.kernels import front as front_kernels
from hadaquant.kernels import quantize, quantize_blocks_front, quantize_front_gluon, rotate
from hadaquant.kernels.runtime import OPTIONS

from .compiling import TARGETS, compile_for
from .test_compile import check, pointers, rotation_of

ONES = torch.ones(8)
FRONT_ENDS = {
    "rms_norm": front.rms_norm(ONES),
    "ada_norm": front.ada_norm(ONES, ONES),
    "silu_mul": front.silu_mul(ONES),
    "gelu_tanh": front.gelu_tanh(),
}


CASES = [
    *((target, "ada_norm", "regular:256") for target in TARGETS),  # the most registers
    ("sm_80", "silu_mul", "sylvester:16"),
    ("sm_90", "silu_mul", "sylvester:16"),
    ("gfx942", "gelu_tanh", "none"),
    ("sm_120", "rms_norm", "matrix:64"),
]


@pytest.mark.parametrize(("target", "kind", "rotation"), CASES)
def test_front_ends(target, kind, rotation):
    r, front_end, nvfp4 = rotation_of(rotation), FRONT_ENDS[kind], get_format("nvfp4")
    operands = {"factor_ptr": "*bf16", "shift_ptr": "*bf16"}
    rows = {**quantize.row_config(get_format("int8"), r, 5120, front_end=front_end), **OPTIONS}
    check(compile_for(quantize.quantize_rows_kernel, {**pointers("int8"), **operands}, rows, target), target)
    walk = {**quantize.walk_config(r, front_end, 5120, nvfp4), "TILED": True, **OPTIONS}
    check(compile_for(quantize.quantize_walk_kernel, {**pointers("nvfp4"), **operands}, walk, target), target)
    alone = {**quantize.walk_config(r, front_end, 5120), "WRITE": False, **OPTIONS}
    check(compile_for(rotate.front_kernel, {**pointers("nvfp4"), **operands}, alone, target), target)


@pytest.mark.parametrize("kind", FRONT_ENDS)
@pytest.mark.parametrize(
    ("target", "k"), [("sm_90", 768), ("sm_90", 3072), ("sm_90", 5120), ("sm_90", 12288), ("sm_80", 3072)]
)
def test_front_ends_on_register_tiles(target, k, kind):
    parameters = {"x_ptr": "*bf16", "q_ptr": "*i8", "s_ptr": "*fp32", "signs_ptr": "*fp32"}
    parameters |= {"factor_ptr": "*bf16", "shift_ptr": "*bf16"}
    described = front_kernels.constants(FRONT_ENDS[kind])
    arguments = quantize_front_gluon.config(get_format("int8"), "regular", 256, False, described, k, target == "sm_90")
    arguments = {name: value for name, value in arguments.items() if name != "launch_pdl" and value is not None}
    check(compile_for(quantize_front_gluon.quantize_front_gluon, parameters, arguments, target), target)


@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm_")])
def test_fp4_behind_a_norm(target):
    check(fp4("nvfp4", "sylvester:16", "ada_norm", 3072, target), target)


@pytest.mark.parametrize(
    ("format", "rotation", "kind", "k", "m", "target"),
    [
        ("nvfp4", "sylvester:16", "rms_norm", 12288, 16384, "sm_90"),
        ("mxfp4", "sylvester:32", "ada_norm", 3072, 16384, "sm_90"),
        ("mxfp4", "sylvester:32", "ada_norm", 12288, 16384, "sm_90"),
        ("mxfp4-even", "none", "silu_mul", 12288, 16384, "sm_80"),
        ("nvfp4", "none", "gelu_tanh", 12288, 16384, "sm_120"),
        ("nvfp4", "regular:16", "ada_norm", 4096, 1, "sm_100"),
        ("nvfp4", "regular:16", "rms_norm", 13824, 131, "sm_80"),
    ],
)
def test_fp4_behind_front_ends(format, rotation, kind, k, m, target):
    check(fp4(format, rotation, kind, k, target, m, tiled=True), target)


def fp4(format: str, spec: str, kind: str, k: int, target: str, m: int = 16384, tiled: bool = False):
    f, r, front_end = get_format(format), rotation_of(spec), FRONT_ENDS[kind]
    tiles = quantize_blocks_front.tiling(f, r, front_end, torch.bfloat16, m, k, tiled)
    arguments = quantize_blocks_front.config(f, r, front_end, int(target[3:]) >= 89, tiles)
    parameters = {**pointers(format), "factor_ptr": "*bf16", "shift_ptr": "*bf16"}
    return compile_for(quantize_blocks_front.quantize_blocks_front_kernel, parameters, arguments, target)
