"""The fast FP4 kernel gives the reference's bytes: on a GPU, or in the interpreter with what that lacks emulated."""

import pytest
import torch

from hadaquant import reference
from hadaquant.formats import get_format
from hadaquant.kernels import amax_fast
from hadaquant.kernels import quantize_blocks_fast as fast
from hadaquant.ops.plan import interpreting
from hadaquant.rotation import Rotation, parse

from .test_twins import DTYPES, all_bf16, assert_same, nasty

FORMATS = ("nvfp4", "mxfp4", "mxfp4-ceil", "mxfp4-even")
ROTATIONS = ("none", "sylvester:16", "regular:16", "sylvester:32", "sylvester:64", "regular:64")


@pytest.fixture(autouse=True)
def _emulated(device, monkeypatch):
    if interpreting():
        from .emulated import emulate

        emulate(monkeypatch)


def run(x, format, rotation, g, scale_layout, device) -> tuple[torch.Tensor, torch.Tensor]:
    shape, tiled = tuple(x.shape), scale_layout == "tiled"
    x, g = x.contiguous().to(device), None if g is None else torch.tensor(g, device=device)
    codes = torch.full(format.codes_shape(shape), 0xA5, dtype=torch.uint8, device=device)
    scales = torch.full(format.scales_shape(shape, scale_layout), 0xA5, dtype=torch.uint8, device=device)
    if not interpreting():
        fast.quantize_blocks(x, codes, scales, format, rotation.to(device), g, scale_layout)
        return codes, scales
    k = x.shape[-1]
    m = x.numel() // k
    tiles = fast.tiling(format, rotation, m, k, tiled)
    # numpy likes its steps large
    wide = 128 if tiled else 256
    if tiled or m * (k // tiles["UNIT"]) >= wide:
        tiles["N"] = wide
    config = {**fast.config(format, rotation, False, tiles), "FEW": tiles["N"]}
    signs = x if rotation.signs is None else rotation.signs
    in_row = k // tiles["UNIT"]
    fast.quantize_blocks_fast_kernel[fast.grid(tiles, m, k)](
        x, codes, scales, x if g is None else g, signs, m * in_row, m, in_row, **config
    )
    return codes, scales


def check(x, format: str, rotation, device, g: float = 0.003, scale_layout: str = "linear") -> None:
    f, r = get_format(format), parse(rotation)
    scale = g if f.has_global_scale else None
    ours = run(x, f, r, scale, scale_layout, device)
    oracle = reference.quantize(x, f, r, None if scale is None else torch.tensor(scale), scale_layout)
    assert_same(ours[0], oracle[0], "codes")
    assert_same(ours[1], oracle[1], "scales")


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_same_bytes(format, rotation, device):
    check(nasty(9, 256, torch.bfloat16), format, rotation, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rotation", ["none", "regular:16", "sylvester:32"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4-even"])
def test_same_bytes_of_other_inputs(format, rotation, dtype, device):
    check(nasty(9, 256, dtype), format, rotation, device)


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (17, 160), (2, 3, 64), (64,), (131, 224), (1, 2048)], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_tails_and_ranks(format, shape, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    check(x, format, "sylvester:32", device)


@pytest.mark.parametrize("shape", [(1, 128), (128, 64), (131, 96), (257, 32)], ids=str)
@pytest.mark.parametrize("rotation", ["none", "regular:16", "sylvester:32"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4-even"])
def test_tiled_scales_and_their_padding(format, rotation, shape, device):
    check(nasty(*shape, torch.bfloat16), format, rotation, device, scale_layout="tiled")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_tiled_scales_of_large_groups(format, device):
    check(nasty(130, 128, torch.float16), format, "sylvester:64", device, scale_layout="tiled")


@pytest.mark.parametrize("format", FORMATS)
def test_with_signs(format, device):
    for group in (16, 64):
        signs = torch.randint(0, 2, (group,), generator=torch.Generator().manual_seed(1)) * 2 - 1
        x = nasty(9, 192, torch.bfloat16)
        x[8] = torch.where(torch.arange(192) % 3 == 0, -0.0, 0.0)
        check(x, format, Rotation("sylvester", group, signs=signs), device)


@pytest.mark.parametrize("g", [2.0**-126, 1e-30, 2.0**-60, 1e-5, 1.0, 40.0, 2.0**60, 1e30, 3e38, 0.0, -1.0])
def test_any_global_scale(g, device):
    x = nasty(9, 64, torch.float32) * torch.logspace(-9, 9, 9)[:, None]
    check(x, "nvfp4", "none", device, g)
    check(x, "nvfp4", "sylvester:16", device, g)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 6 * min(max(g, 1e-30), 1e30)
    check(x * torch.tensor([2.0**-10, 2.0**-9, 1.0, 300.0])[:, None], "nvfp4", "none", device, g)


@pytest.mark.parametrize("format", FORMATS)
def test_every_bf16_value(format, device):
    block = get_format(format).block or 1
    values = all_bf16()
    if interpreting():
        values = values[::64]
    alone = torch.zeros(len(values), block, dtype=torch.bfloat16)
    alone[:, 5] = values
    check(alone, format, "none", device)
    check(values.view(-1, block), format, "none", device)
    check(values.view(-1, block), format, "sylvester:16", device)


def test_sign_is_that_of_a_number_below_zero(device):
    # exact -0 is no such number; a quotient that underflows to -0 is one
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 2] = 1e31, -1e-30, -0.0
    check(x, "mxfp4", "none", device)
    check(x, "nvfp4", "none", device, 1e28)
    check(torch.full((2, 64), -0.0), "nvfp4", "none", device)
    check(torch.full((2, 64), -0.0), "mxfp4", "regular:16", device)


def test_a_block_beyond_the_fast_path_leaves_the_others_alone(device):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x[7, 100] = float("nan")
    x[33] *= 1e4  # its scale saturates
    check(x, "nvfp4", "sylvester:16", device, 0.001)
    check(x, "nvfp4", "sylvester:16", device, 0.001, "tiled")


@pytest.mark.parametrize("rotation", ["none", "sylvester:16", "regular:64", "sylvester:32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_largest_magnitude(rotation, dtype, device):
    r = parse(rotation)
    for x in (
        nasty(9, 192, dtype),
        nasty(1, 64, dtype),
        torch.randn(131, 64).to(dtype),
        torch.zeros(3, 64, dtype=dtype),
    ):
        x = x.to(device)
        if interpreting():
            config = amax_fast.config(r)
            found = torch.zeros((), dtype=torch.int32)
            units = x.numel() // config["UNIT"]
            amax_fast.amax_fast_kernel[(2,)](x, found, x, -(-units // config["N"]), units, **config)
            found = found.view(torch.float32)
        else:
            found = amax_fast.amax(x, r.to(device))
        assert_same(found, reference.amax(x.cpu(), r), "largest magnitude")
