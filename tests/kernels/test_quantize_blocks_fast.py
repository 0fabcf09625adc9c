"""The fast FP4 kernel gives the reference's bytes: on a GPU, or in the interpreter with what that lacks emulated."""

import pytest
import torch

from hadaquant import reference
from hadaquant.formats import get_format
from hadaquant.kernels import quantize_blocks_fast as fast
from hadaquant.ops.plan import interpreting
from hadaquant.rotation import parse

from .test_twins import DTYPES, assert_same, nasty

FORMATS = ("nvfp4", "mxfp4", "mxfp4-ceil", "mxfp4-even")
ROTATIONS = ("none", "sylvester:16", "regular:16", "sylvester:32", "sylvester:64", "regular:64", "sylvester:128")


@pytest.fixture(autouse=True)
def _emulated(device, monkeypatch):
    if interpreting():
        from .emulated import emulate

        emulate(monkeypatch)


def run(x, format, rotation, g, scale_layout, device) -> tuple[torch.Tensor, torch.Tensor]:
    shape, tiled = tuple(x.shape), scale_layout == "tiled"
    x, g = x.to(device), None if g is None else torch.tensor(g, device=device)
    codes = torch.full(format.codes_shape(shape), 0xA5, dtype=torch.uint8, device=device)
    scales = torch.full(format.scales_shape(shape, scale_layout), 0xA5, dtype=torch.uint8, device=device)
    if not interpreting():
        fast.quantize_blocks(x, codes, scales, format, rotation.to(device), g, scale_layout)
        return codes, scales
    k = x.shape[-1]
    m = x.numel() // k
    tiles = fast.tiling(format, rotation, m, k, tiled)
    config = fast.config(format, rotation, False, tiles)
    signs = x if rotation.signs is None else rotation.signs
    fast.quantize_blocks_fast_kernel[(3,)](
        x, codes, scales, x if g is None else g, signs, *fast.sizes(tiles, m, k), **config
    )
    return codes, scales


def check(x, format: str, rotation, device, g: float = 0.003, scale_layout: str = "linear") -> None:
    f, r = get_format(format), parse(rotation)
    scale = g if f.has_global_scale else None
    ours = run(x, f, r, scale, scale_layout, device)
    oracle = reference.quantize(x, f, r, None if scale is None else torch.tensor(scale), scale_layout)
    assert_same(ours[0], oracle[0], "codes")
    assert_same(ours[1], oracle[1], "scales")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_same_bytes(format, rotation, dtype, device):
    check(nasty(9, 512, dtype), format, rotation, device)
