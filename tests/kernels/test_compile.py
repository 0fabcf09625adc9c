"""Every kernel compiles ahead of time for every target, within consumer shared memory, without spills."""

import pytest
import torch

from hadaquant.formats import get_format
from hadaquant.ops.plan import interpreting
from hadaquant.rotation import Rotation, parse

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from hadaquant.kernels import (
    epilogue,
    gemm,
    gemm_int8_ahead,
    gemm_int8_hopper,
    gemm_int8_small,
    quantize,
    quantize_rows_gluon,
    rotate,
)
from hadaquant.kernels.runtime import OPTIONS

from .compiling import SHARED_LIMIT, TARGETS, compile_for

#: Launches can overlap.
OVERLAPPING = ("sm_90", "sm_100", "sm_103", "sm_120")
ROTATIONS = ("none", "sylvester:16", "sylvester:128", "regular:256", "sylvester:4096", "matrix:64", "matrix:256")


def rotation_of(spec: str) -> Rotation:
    if spec.startswith("matrix"):
        return Rotation("matrix", matrix=torch.eye(int(spec.partition(":")[2])))
    if spec == "regular:256":
        return Rotation("regular", 256, signs=torch.ones(256))
    return parse(spec)


def check(usage, target: str) -> None:
    assert usage.shared <= SHARED_LIMIT, f"{usage.shared} bytes of shared memory on {target}"
    assert usage.spills == 0, f"{usage.spills} bytes of spills on {target}"


def pointers(format: str, x: str = "*bf16") -> dict[str, str]:
    packed = get_format(format).element.packed
    return {
        "x_ptr": x,
        "codes_ptr": "*u8" if packed else "*i8",
        "scales_ptr": "*u8" if packed else "*fp32",
        "global_ptr": "*fp32",
        "signs_ptr": "*fp32",
        "matrix_ptr": "*fp32",
        "y_ptr": "*fp32",
        "amax_ptr": "*i32",
    }


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_quantize_blocks(target, rotation):
    for format, tiled in (("nvfp4", True), ("mxfp4-even", False)):
        config = quantize.block_config(get_format(format), rotation_of(rotation))
        arguments = {**config, "TILED": tiled, **OPTIONS}
        check(compile_for(quantize.quantize_blocks_kernel, pointers(format), arguments, target), target)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_quantize_rows(target, rotation):
    for k in (3072, 32768):
        arguments = {**quantize.row_config(get_format("int8"), rotation_of(rotation), k), **OPTIONS}
        check(compile_for(quantize.quantize_rows_kernel, pointers("int8"), arguments, target), target)


@pytest.mark.parametrize("x", ["*fp32", "*fp16"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120", "gfx942"])
def test_quantize_other_inputs(target, x):
    r = parse("regular:64")
    blocks = {**quantize.block_config(get_format("nvfp4"), r), "TILED": False, **OPTIONS}
    check(compile_for(quantize.quantize_blocks_kernel, pointers("nvfp4", x), blocks, target), target)
    rows = {**quantize.row_config(get_format("int8"), r, 4096), **OPTIONS}
    check(compile_for(quantize.quantize_rows_kernel, pointers("int8", x), rows, target), target)


@pytest.mark.parametrize("target", TARGETS)
def test_rotate_and_amax(target):
    for spec in ("sylvester:16", "regular:256", "matrix:64"):
        config = rotate.unit_config(rotation_of(spec))
        check(compile_for(rotate.amax_kernel, pointers("nvfp4"), {**config, **OPTIONS}, target), target)
        arguments = {**config, "INVERSE": False, "SPAN": 0, "OVERLAP": target in OVERLAPPING, **OPTIONS}
        check(compile_for(rotate.rotate_kernel, pointers("nvfp4"), arguments, target), target)
    arguments = {"INVERSE": False, "ROWS": 32, "COLS": 32, **OPTIONS}
    check(compile_for(rotate.rotate_by_any_matrix_kernel, pointers("nvfp4"), arguments, target), target)


@pytest.mark.parametrize("m", [1, 128, 512, 4096])
@pytest.mark.parametrize("target", TARGETS)
def test_products(target, m):
    int8 = {"x_ptr": "*i8", "w_ptr": "*i8", "sx_ptr": "*fp32", "sw_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    tile = {1: (16, 32), 128: (64, 64), 512: (64, 128), 4096: (128, 128)}[m]
    for ragged in (False, True):
        arguments = {**gemm.int8_config(tile, ragged, overlap=target in OVERLAPPING), "HAS_BIAS": True}
        check(compile_for(gemm.int8_mm_kernel, int8, arguments, target), target)
    fp4 = {
        **int8,
        "x_ptr": "*u8",
        "w_ptr": "*u8",
        "sx_ptr": "*u8",
        "sw_ptr": "*u8",
        "gx_ptr": "*fp32",
        "gw_ptr": "*fp32",
    }
    arguments = {**gemm.fp4_config(m, get_format("nvfp4")), "HAS_BIAS": True, "DOT": gemm.tl.bfloat16, **OPTIONS}
    check(compile_for(gemm.fp4_mm_kernel, fp4, arguments, target), target)


@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm_")])
def test_products_of_few_rows(target):
    int8 = {"x_ptr": "*i8", "w_ptr": "*i8", "sx_ptr": "*fp32", "sw_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    overlap = target in OVERLAPPING
    for m in (1, 2):
        arguments = {**gemm_int8_small.gemv_config(m, 4096, overlap), "HAS_BIAS": True}
        check(compile_for(gemm_int8_small.gemv_kernel, int8, arguments, target), target)
    arguments = {**gemm_int8_small.few_rows_config(overlap), "HAS_BIAS": True}
    check(compile_for(gemm_int8_small.few_rows_kernel, int8, arguments, target), target)


@pytest.mark.parametrize("target", TARGETS)
def test_scales_of_a_product_made_elsewhere(target):
    types = {"acc_ptr": "*i32", "sx_ptr": "*fp32", "sw_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    check(compile_for(epilogue.scale_kernel, types, {**epilogue.scale_config(), "HAS_BIAS": True}, target), target)


@pytest.mark.parametrize(
    ("spec", "k"), [("regular:256", k) for k in (3072, 5120, 13824, 32768)] + [("regular:1024", 4096)]
)
@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm_")])
def test_rows_in_gluon(target, spec, k):
    rows = {"x_ptr": "*bf16", "q_ptr": "*i8", "s_ptr": "*fp32", "signs_ptr": "*fp32"}
    r = rotation_of(spec)
    signed = r.signs is not None
    arguments = quantize_rows_gluon.config(get_format("int8"), r.kind, r.group, signed, k, target in OVERLAPPING)
    check(compile_for(quantize_rows_gluon.quantize_rows_gluon, rows, arguments, target), target)


def matrix(dtype: str, *block: int) -> str:
    """The type of a descriptor of a matrix."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(list(block), {"i8": gl.int8, "bf16": gl.bfloat16}[dtype])
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


#: What a block of sm_90 may use.
HOPPER_SHARED = 227 * 1024


@pytest.mark.parametrize("tile", gemm_int8_ahead.TILES, ids=str)
@pytest.mark.parametrize("m", [5, 40, 300])
def test_hopper_product_of_few_rows(tile, m):
    arguments = gemm_int8_ahead.config(m, tile, True, at_rest=True)
    parameters = {
        "x_desc": matrix("i8", arguments["BOX"], arguments["BK"]),
        "w_desc": matrix("i8", tile[1], arguments["BK"]),
        "sx_ptr": "*fp32",
        "sw_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "y_ptr": "*bf16",
    }
    usage = compile_for(gemm_int8_ahead.int8_mm_ahead, parameters, arguments, "sm_90")
    assert usage.spills == 0
    assert usage.shared <= HOPPER_SHARED
    # the first weights are asked for before the kernel ahead has ended
    assert usage.text.index("cp.async.bulk.tensor") < usage.text.index("griddepcontrol.wait")


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_hopper_product(cut):
    parameters = {
        "x_desc": matrix("i8", 64, 128),
        "w_desc": matrix("i8", 256, 128),
        "w_cut_desc": matrix("i8", 256 // cut, 128),
        "y_desc": matrix("bf16", 64, 128),
        "y_cut_desc": matrix("bf16", 64, min(128, 256 // cut)),
        "sx_ptr": "*fp32",
        "sw_ptr": "*fp32",
        "bias_ptr": "*bf16",
    }
    arguments = gemm_int8_hopper.config(cut, True)
    absent = {1: ("w_cut_desc", "y_cut_desc"), 2: ("y_cut_desc",)}.get(cut, ())
    for name in absent:
        del parameters[name]
        arguments[name] = None
    usage = compile_for(gemm_int8_hopper.int8_mm_hopper, parameters, arguments, "sm_90")
    assert usage.spills == 0
    assert usage.shared <= HOPPER_SHARED
