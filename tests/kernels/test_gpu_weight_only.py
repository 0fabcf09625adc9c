"""Many rows of full activations on a GPU: as close to the exact product as torch, by each kernel."""

import pytest
import torch

from hadaquant.kernels.rotate import rotate_round
from hadaquant.ops.plan import interpreting
from hadaquant.rotation import parse

from .test_weight_only import assert_close, operands, weight_mm

pytestmark = pytest.mark.skipif(interpreting() or not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("format", "m", "n", "k", "tile"), [
    ("nvfp4", 17, 520, 1152, (32, 128)),
    ("nvfp4", 300, 4096, 4096, (256, 128)),
    ("mxfp4", 300, 520, 1152, (256, 128)),
])  # fmt: skip
def test_hopper(format, m, n, k, tile):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is written for sm_90")
    x, w = operands(m, n, k, format, "cuda")
    assert_close(x, w, None, torch.bfloat16, "weight_mm_hopper", tile)
    # rotated into the order that it reads, the input gives the same bits
    plain = weight_mm(x, w, None, torch.bfloat16, "weight_mm_hopper", tile)
    turned = rotate_round(x, parse("none"), by_nibble=True)
    assert torch.equal(weight_mm(turned, w, None, torch.bfloat16, "weight_mm_hopper", tile, by_nibble=True), plain)


def test_hopper_with_a_bias():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is written for sm_90")
    x, w = operands(300, 520, 1056, "nvfp4", "cuda")
    bias = torch.randn(520, device="cuda", dtype=torch.float16)
    assert_close(x, w, bias, torch.float16, "weight_mm_hopper", (256, 128))


@pytest.mark.parametrize("kernel", ["weight_unpacked", "weight_mm"])
@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4"])
def test_others(format, kernel):
    for m in (1, 300):
        x, w = operands(m, 520, 1056, format, "cuda")
        assert_close(x, w, torch.randn(520, device="cuda"), torch.bfloat16, kernel)
