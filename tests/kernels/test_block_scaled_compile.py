"""What prepares operands for Blackwell's FP4 units compiles for it: scales written in tiles, the global scale."""

import pytest

from hadaquant.ops.plan import interpreting

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from hadaquant.kernels import amax_fast
from hadaquant.kernels.runtime import OPTIONS

from .compiling import TARGETS, compile_for
from .test_compile import check
from .test_quantize_blocks_compile import compiled


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("target", ["sm_100", "sm_103", "sm_120"])
def test_tiled_scales_straight_from_the_kernel(target, format):
    rotation = "sylvester:16" if format == "nvfp4" else "sylvester:32"
    check(compiled(format, rotation, target, tiled=True), target)


@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm_")])
def test_global_scale(target):
    arguments = {"num_warps": 1, **OPTIONS}
    usage = compile_for(amax_fast.global_scale_kernel, {"amax_ptr": "*fp32", "global_ptr": "*fp32"}, arguments, target)
    check(usage, target)
