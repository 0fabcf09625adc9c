"""Products of bfloat16 activations and quantized weights compile for every target, without spills."""

import pytest

from hadaquant.formats import get_format
from hadaquant.ops.plan import interpreting

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from hadaquant.kernels import rotate, weight_only, weight_only_small
from hadaquant.kernels.runtime import OPTIONS
from hadaquant.layout import NIBBLE_SPAN
from hadaquant.rotation import parse

from .compiling import SHARED_LIMIT, TARGETS, compile_for

OVERLAPPING = ("sm_90", "sm_100", "sm_103", "sm_120")
POINTERS = {
    "x_ptr": "*bf16",
    "gw_ptr": "*fp32",
    "acc_ptr": "*fp32",
    "bias_ptr": "*bf16",
    "y_ptr": "*bf16",
}


def pointers(format: str) -> dict[str, str]:
    packed = get_format(format).element.packed
    return {**POINTERS, "w_ptr": "*u8" if packed else "*i8", "sw_ptr": "*u8" if packed else "*fp32"}


def check(usage, target: str) -> None:
    assert usage.shared <= SHARED_LIMIT, f"{usage.shared} bytes of shared memory on {target}"
    assert usage.spills == 0, f"{usage.spills} bytes of spills on {target}"


@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("target", TARGETS)
def test_tiles_and_the_pass_of_scales(target, format):
    f = get_format(format)
    for m in (1, 4096):
        arguments = {**weight_only.config(m, f, True), "DOT": weight_only.tl.bfloat16}
        check(compile_for(weight_only.weight_mm_kernel, pointers(format), arguments, target), target)
    arguments = weight_only.finish_config(f, True)
    check(compile_for(weight_only.finish_kernel, pointers(format), arguments, target), target)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm_")])
def test_few_rows(target, format):
    # all tiles where they are to be measured, the largest elsewhere
    for tile in weight_only_small.SLICES_AND_WORDS if target == "sm_90" else ((32, 16),):
        arguments = weight_only_small.config(tile, get_format(format), True, target in OVERLAPPING)
        check(compile_for(weight_only_small.weight_few_rows_kernel, pointers(format), arguments, target), target)


@pytest.mark.parametrize("target", TARGETS)
def test_rotated_and_rounded(target):
    unit = {"UNIT": NIBBLE_SPAN, "ROWS": rotate.TILE // NIBBLE_SPAN, "SPAN": NIBBLE_SPAN}
    unit["OVERLAP"] = target in OVERLAPPING
    arguments = {**rotate.unit_config(parse("sylvester:16")), **unit, "INVERSE": False, **OPTIONS}
    types = {"x_ptr": "*bf16", "y_ptr": "*bf16", "signs_ptr": "*fp32", "matrix_ptr": "*fp32"}
    check(compile_for(rotate.rotate_kernel, types, arguments, target), target)
