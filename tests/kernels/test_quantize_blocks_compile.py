"""The fast FP4 kernels compile ahead of time for every NVIDIA target, without spills."""

import pytest

from hadaquant.formats import get_format
from hadaquant.ops.plan import interpreting, plan_amax, plan_quantize
from hadaquant.ops.target import get_target
from hadaquant.rotation import parse

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from hadaquant.kernels import amax_fast, quantize_blocks_fast

from .compiling import TARGETS, compile_for
from .test_compile import check, pointers

NVIDIA = [t for t in TARGETS if t.startswith("sm_")]


def compiled(format: str, spec: str, target: str, x: str = "*bf16", m: int = 4096, tiled: bool = False):
    f, r = get_format(format), parse(spec)
    tiles = quantize_blocks_fast.tiling(f, r, m, 4096, tiled)
    arguments = quantize_blocks_fast.config(f, r, int(target[3:]) >= 89, tiles)
    return compile_for(quantize_blocks_fast.quantize_blocks_fast_kernel, pointers(format, x), arguments, target)


@pytest.mark.parametrize("target", NVIDIA)
def test_quantize(target):
    check(compiled("nvfp4", "sylvester:16", target), target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_quantize_other_formats(target):
    check(compiled("mxfp4", "none", target, "*fp32", m=131, tiled=True), target)
    check(compiled("mxfp4-even", "regular:16", target, "*fp16"), target)


@pytest.mark.slow
@pytest.mark.parametrize("x", ["*bf16", "*fp32"])
@pytest.mark.parametrize("spec", ["sylvester:32", "regular:64"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_quantize_larger_groups(format, spec, x):
    check(compiled(format, spec, "sm_90", x, tiled=True), "sm_90")


@pytest.mark.parametrize("target", NVIDIA)
def test_amax(target):
    arguments = amax_fast.config(parse("sylvester:16"))
    check(compile_for(amax_fast.amax_fast_kernel, pointers("nvfp4"), arguments, target), target)


def test_the_plan_chooses_them_where_they_run():
    sm_90, gfx = get_target("sm_90"), get_target("gfx942")
    nvfp4 = get_format("nvfp4")
    assert plan_quantize(nvfp4, parse("sylvester:16"), sm_90).kernel == "quantize_blocks_fast"
    assert plan_amax(parse("sylvester:16"), sm_90).kernel == "amax_fast"
    large = plan_quantize(nvfp4, parse("sylvester:128"), sm_90)
    assert large.kernel == "quantize_blocks"
    assert "groups up to 64" in large.rejected[0][1]
    assert plan_quantize(nvfp4, parse("sylvester:16"), gfx).kernel == "quantize_blocks"
    front = plan_quantize(nvfp4, parse("none"), sm_90, front_end="rms_norm")
    assert front.kernel == "quantize_blocks_front" and "rms_norm" in front.reason
    wide = plan_quantize(nvfp4, parse("none"), sm_90, front_end="rms_norm", k=65536)
    assert wide.kernel == "quantize_walk" and "rows of up to 32768" in wide.rejected[0][1]
    assert plan_quantize(nvfp4, parse("none"), gfx, front_end="rms_norm").kernel == "quantize_walk"
    assert plan_quantize(nvfp4, parse("sylvester:128"), sm_90, front_end="silu_mul").kernel == "quantize_walk"
    assert plan_amax(parse("none"), sm_90, k=5).kernel == "amax"
