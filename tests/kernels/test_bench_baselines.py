"""The kernels that hadaquant is timed against do what ours do: a benchmark must not beat a broken rival."""

import pytest
import torch

import hadaquant as hq
from hadaquant.bench import unfused
from hadaquant.bench.baselines import product, rows
from hadaquant.bench.rows import as_good
from hadaquant.formats import get_format
from hadaquant.ops.plan import interpreting
from hadaquant.rotation import parse

from .compiling import compile_for

CASES = (
    ("int8", "none"),
    ("int8", "regular:256"),
    ("int8", "regular:1024"),
    ("nvfp4", "sylvester:16"),
    ("mxfp4", "sylvester:32"),
    ("mxfp4", "none"),
)


@pytest.mark.parametrize("way", [unfused.quantize, rows.three_kernels, rows.fused], ids=lambda way: way.__name__)
@pytest.mark.parametrize(("format", "rotation"), CASES)
def test_rotate_quantize_is_as_good_as_ours(way, format, rotation, device):
    # float16: the interpreter has no product of bfloat16
    f, r = get_format(format), parse(rotation)
    if way is rows.fused and (not f.block or r.group not in (1, f.block)):
        pytest.skip("one kernel, for blocks as large as the rotation's group")
    x = torch.randn(40, 1024, dtype=torch.float16, device=device)
    g = hq.quantize(x, f, rotation=r).global_scale
    matrix = None if rotation == "none" else r.dense().to(x)
    codes, scales = way(x, matrix, f, g)
    assert as_good(codes, scales.view(torch.uint8) if f.block else scales, g, x, f, r) is None
    assert as_good(codes.roll(1, 1), scales.view(torch.uint8) if f.block else scales, g, x, f, r) is not None


@pytest.mark.parametrize("shape", [(70, 100, 96), (1, 8, 32), (33, 17, 130)])
def test_the_product_is_exact(shape, device):
    m, n, k = shape
    x, w = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n))
    sx, sw = torch.rand(m, device=device), torch.rand(n, device=device)
    tile = {"BM": 16, "BN": 32, "BK": 64, "GROUP": 8, "num_warps": 4, "num_stages": 2}
    acc = (x.cpu().int() @ w.cpu().int().T).float()
    right = acc * sx.cpu()[:, None] * sw.cpu()
    assert torch.equal(product.int8_mm(x, sx, w, sw, torch.float32, tile).cpu(), right)


@pytest.mark.skipif(interpreting(), reason="the interpreter compiles nothing")
@pytest.mark.parametrize("tile", [*product.SMALL_TILES, *product.USUAL_TILES, *product.LARGE_TILES], ids=str)
def test_tiles_compile_without_spills(tile):
    pointers = {"x_ptr": "*i8", "w_ptr": "*i8", "sx_ptr": "*fp32", "sw_ptr": "*fp32", "y_ptr": "*bf16"}
    used = compile_for(product.int8_mm_kernel, pointers, tile, "sm_90")
    assert used.spills == 0 and used.shared <= 227 * 1024
