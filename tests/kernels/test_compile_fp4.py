"""FP4 products compile ahead of time for every target they are made for, without spills."""

import pytest

from hadaquant.formats import get_format
from hadaquant.ops.plan import interpreting

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.experimental.gluon import language as gl

from hadaquant.kernels import gemm_fp4, gemm_fp4_hopper, gemm_fp4_small, gemm_fp4_values, quantize_values
from hadaquant.rotation import parse

from .compiling import SHARED_LIMIT, TARGETS, compile_for

#: Launches can overlap.
OVERLAPPING = ("sm_90", "sm_100", "sm_103", "sm_120")
POINTERS = {
    **dict.fromkeys(("x_ptr", "sx_ptr", "w_ptr", "sw_ptr", "codes_ptr", "scales_ptr"), "*u8"),
    **dict.fromkeys(("gx_ptr", "gw_ptr", "parts_ptr"), "*fp32"),
    **dict.fromkeys(("bias_ptr", "y_ptr"), "*bf16"),
}


def check(usage, target: str, shared: int = SHARED_LIMIT) -> None:
    assert usage.shared <= shared, f"{usage.shared} bytes of shared memory on {target}"
    assert usage.spills == 0, f"{usage.spills} bytes of spills on {target}"


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm_")])
def test_products_of_few_rows(target, format):
    f, overlap = get_format(format), target in OVERLAPPING
    # the largest everywhere, all of them where they were measured
    measured = target == "sm_90"
    for m in (1, 2, 3, 4) if measured else (4,):
        arguments = gemm_fp4_small.gemv_config(m, f, True, overlap, at_rest=True)
        check(compile_for(gemm_fp4_small.gemv_kernel, POINTERS, arguments, target), target)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm_")])
def test_products_of_few_rows_of_values(target, format):
    pointers = {**POINTERS, "x_ptr": "*bf16"}
    for tile in gemm_fp4_values.SLICES_AND_WORDS if target == "sm_90" else ((64, 32),):
        arguments = gemm_fp4_values.config(tile, get_format(format), True, target in OVERLAPPING, at_rest=True)
        check(compile_for(gemm_fp4_values.value_rows_kernel, pointers, arguments, target), target)


def tile_of(dtype: str, *block: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), {"i32": gl.int32, "bf16": gl.bfloat16}[dtype])
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


@pytest.mark.parametrize("shares", [(256, 1, 1), (256, 1, 2), (128, 1, 1), (64, 4, 1), (16, 2, 1)], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_hopper_product(format, shares):
    rows, _, cut = shares
    tensors = {
        "x_desc": tile_of("bf16", rows, 64),
        "w_desc": tile_of("i32", 64, 16),
        "y_desc": tile_of("bf16", rows, 64),
    }
    arguments = gemm_fp4_hopper.config(get_format(format), True, shares, at_rest=True)
    for cut_desc in ("x_cut_desc", "y_cut_desc"):
        if cut > 1:
            tensors[cut_desc] = tile_of("bf16", rows // cut, 64)
        else:
            arguments[cut_desc] = None
    usage = compile_for(gemm_fp4_hopper.fp4_mm_hopper, {**POINTERS, **tensors}, arguments, "sm_90")
    check(usage, "sm_90", shared=227 * 1024)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("target", TARGETS)
def test_bfloat16_copies(target, format):
    f, overlap = get_format(format), target in OVERLAPPING
    check(compile_for(gemm_fp4.unpack_kernel, POINTERS, gemm_fp4.unpack_config(f, overlap), target), target)
    check(compile_for(gemm_fp4.unpack_words_kernel, POINTERS, gemm_fp4.words_config(f, True, overlap), target), target)
    arguments = gemm_fp4.finish_config(f, True)
    check(compile_for(gemm_fp4.finish_kernel, {**POINTERS, "acc_ptr": "*fp32"}, arguments, target), target)


@pytest.mark.parametrize(
    ("format", "spec", "m", "x"),
    [
        pytest.param("nvfp4", "sylvester:16", 4096, "*bf16", marks=pytest.mark.slow),
        ("nvfp4", "sylvester:16", 64, "*bf16"),
        ("nvfp4", "none", 4, "*fp32"),
        ("mxfp4", "sylvester:32", 4, "*fp16"),
    ],
)
def test_quantized_values(format, spec, m, x):
    arguments = quantize_values.config(get_format(format), parse(spec), m, 4096, True, True, m > 4, True)
    pointers = {"x_ptr": x, "y_ptr": "*bf16", "global_ptr": "*fp32", "signs_ptr": "*fp32"}
    check(compile_for(quantize_values.quantize_values_kernel, pointers, arguments, "sm_90"), "sm_90")
