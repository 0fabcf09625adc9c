"""What torch's block-scaled FP4 product is given, checked by a stand-in: no such hardware was ever at hand.

The stand-in has torch's own signature. It refuses what torch refuses, finds each scale by cuBLAS's formula for its
tiled layout, written here from the formula alone, decodes codes by its own table, and multiplies in float64.
"""

import inspect

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

import hadaquant as hq
from hadaquant import reference
from hadaquant.errors import BackendError, DtypeError
from hadaquant.formats import get_format
from hadaquant.kernels import block_scaled
from hadaquant.ops import library, plan
from hadaquant.ops.candidates import BLOCK_SCALED
from hadaquant.ops.plan import plan_scaled_mm
from hadaquant.ops.target import TARGETS, get_target

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
BLACKWELL = ("sm_100", "sm_103", "sm_120")
TORCHS = functional.scaled_mm


def spread_scales(tiled: torch.Tensor, rows: int, k: int, block: int) -> torch.Tensor:
    """float64 [rows, K] of scales in 128x4 tiles of 512 bytes: tiles run along K, then along the rows."""
    flat, blocks = tiled.flatten().to(torch.float64), k // block
    tiles_along_k = (blocks + 3) // 4
    assert flat.numel() == (rows + 127) // 128 * tiles_along_k * 512
    out = torch.empty(rows, blocks, dtype=torch.float64)
    for outer in range(rows):
        for inner in range(blocks):
            tile = (outer // 128) * tiles_along_k + inner // 4
            within = (outer % 32) * 16 + ((outer % 128) // 32) * 4 + inner % 4
            out[outer, inner] = flat[tile * 512 + within]
    return out.repeat_interleave(block, 1)


def decoded(codes: torch.Tensor) -> torch.Tensor:
    """float64 [rows, K] of two codes a byte, the first in the low nibble."""
    assert codes.dtype == torch.float4_e2m1fn_x2 and codes.is_contiguous()
    byte = codes.view(torch.uint8).long()
    return torch.stack((E2M1[byte & 15], E2M1[byte >> 4]), -1).flatten(1)


class StandIn:
    """torch.nn.functional.scaled_mm on Blackwell."""

    def __init__(self):
        self.calls = 0
        self.scales_b = []

    def __call__(self, *arguments, **named):
        self.calls += 1
        bound = inspect.signature(TORCHS).bind(*arguments, **named)
        bound.apply_defaults()
        return self.multiply(**bound.arguments)

    def multiply(self, mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b, bias,
                 output_dtype, contraction_dim, use_fast_accum):  # fmt: skip
        assert not contraction_dim and not use_fast_accum
        assert mat_b.stride(0) == 1 and mat_b.stride(1) == mat_b.shape[0], "mat_b is column-major"
        (m, half), n = mat_a.shape, mat_b.shape[1]
        k = 2 * half
        assert n % 16 == 0 and k % 32 == 0
        factor = torch.ones((), dtype=torch.float32)
        if isinstance(scale_a, list):
            recipe, order = [ScalingType.BlockWise1x16, ScalingType.TensorWise], [
                SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]  # fmt: skip
            assert scale_recipe_a == scale_recipe_b == recipe and swizzle_a == swizzle_b == order
            (scale_a, ga), (scale_b, gb) = scale_a, scale_b
            assert all(g.dtype == torch.float32 and g.numel() == 1 for g in (ga, gb))
            block, dtype, factor = 16, torch.float8_e4m3fn, ga * gb
            assert bias is None or bias.dtype == output_dtype
            assert output_dtype in (torch.bfloat16, torch.float16)
        else:
            assert scale_recipe_a == scale_recipe_b == ScalingType.BlockWise1x32
            assert swizzle_a == swizzle_b == SwizzleType.SWIZZLE_32_4_4
            block, dtype = 32, torch.float8_e8m0fnu
            assert bias is None and output_dtype == torch.bfloat16  # CUTLASS's kernel takes no bias
        for s in (scale_a, scale_b):
            assert s.dtype == dtype and s.is_contiguous()
        self.scales_b.append(scale_b)
        a = decoded(mat_a) * spread_scales(scale_a, m, k, block)
        b = decoded(mat_b.T) * spread_scales(scale_b, n, k, block)
        y = a @ b.T * factor.double()
        return (y if bias is None else y + bias.double()).to(output_dtype)


@pytest.fixture
def stand_in(monkeypatch) -> StandIn:
    """A Blackwell of its own: plans are for sm_100, without Triton, and torch's product is the stand-in."""
    found = StandIn()
    monkeypatch.setattr(functional, "scaled_mm", found)
    monkeypatch.setattr(library, "target_of", lambda device: TARGETS["sm_100"])
    monkeypatch.setattr(plan, "has_triton", lambda: False)
    library._made.cache_clear()
    yield found
    library._made.cache_clear()


def operands(m: int, n: int, k: int, format: str, layouts: tuple[str, str] = ("linear", "linear")):
    gen = torch.Generator().manual_seed(m + n + k)
    rows = (torch.randn(m, k, generator=gen), torch.randn(n, k, generator=gen))
    return [hq.quantize(r, format, scale_layout=s, backend="reference") for r, s in zip(rows, layouts, strict=True)]


def assert_close(y: torch.Tensor, x: hq.QuantizedTensor, w: hq.QuantizedTensor, bias, slack: float = 2.0) -> None:
    exact, torchs = x.dequantize().double() @ w.dequantize().double().T, x.dequantize() @ w.dequantize().T
    if bias is not None:
        exact, torchs = exact + bias.double(), torchs + bias.float()
    error, allowed = ((t.double() - exact).norm() for t in (y, torchs.to(y.dtype)))
    assert error <= slack * allowed + 2.0**-22 * exact.norm()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp4-ceil", "mxfp4-even"])
@pytest.mark.parametrize("shape", [(1, 16, 32), (5, 32, 96), (130, 48, 160), (129, 144, 64)], ids=str)
@pytest.mark.parametrize("layouts", [("linear", "linear"), ("tiled", "linear"), ("tiled", "tiled")], ids=str)
def test_a10_codes_and_tiled_scales_as_torch_wants_them(stand_in, format, shape, layouts):
    x, w = operands(*shape, format, layouts)
    for dtype in (torch.bfloat16, torch.float16)[: 2 if format == "nvfp4" else 1]:
        for bias in (None, torch.randn(shape[1]).to(dtype)):
            y = hq.scaled_mm(x, w, bias, dtype, backend="cublas")
            assert y.dtype == dtype and y.shape == shape[:2]
            # torch's MXFP4 takes no bias: added to the rounded product, it rounds once more
            assert_close(y, x, w, bias, slack=2.0 if format == "nvfp4" or bias is None else 3.0)
    assert stand_in.calls == (4 if format == "nvfp4" else 2)


def test_scale_bytes_of_every_kind_arrive(stand_in):
    """Zero blocks, subnormal and largest scales, and a NaN that stays in its row."""
    x = torch.randn(40, 64)
    x[0], x[1, :16], x[2], x[3, 16:32] = 0, 0, 1e-4, 2688
    q, w = hq.quantize(x, "nvfp4", global_scale=1.0, backend="reference"), operands(1, 16, 64, "nvfp4")[1]
    assert {0x00, 0x7E} <= set(q.scales.flatten().tolist())
    assert_close(hq.scaled_mm(q, w, backend="cublas"), q, w, None)
    x[7, 5] = torch.nan
    y = hq.scaled_mm(hq.quantize(x, "nvfp4", global_scale=1.0, backend="reference"), w, backend="cublas")
    assert y[7].isnan().all() and y[torch.arange(40) != 7].isfinite().all()


def test_torchs_own_checks_accept_the_call():
    """torch's shape function, which needs no GPU."""
    for format in ("nvfp4", "mxfp4"):
        x, w = (t.to("meta") for t in operands(5, 32, 64, format))
        y = block_scaled.scaled_mm(
            x.codes, x.scales, x.global_scale, w.codes, w.scales, w.global_scale, x.format, None, torch.bfloat16,
            x_layout="linear", w_layout="linear",
        )  # fmt: skip
        assert y.shape == (5, 32) and y.dtype == torch.bfloat16


def test_a_bias_of_another_dtype_is_refused(stand_in):
    x, w = operands(2, 16, 32, "nvfp4")
    with pytest.raises(DtypeError, match="bias with backend='cublas' has dtype"):
        hq.scaled_mm(x, w, torch.randn(16), torch.bfloat16, backend="cublas")


# ---- a layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a11_a_layer_quantizes_into_tiles_and_tiles_its_weight_once(stand_in, monkeypatch, format):
    linear = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    layer = hq.RotatedLinear.from_linear(linear, format, "sylvester:16", backend="cublas")
    tiled = []
    original = block_scaled.layout.tile_scales
    monkeypatch.setattr(block_scaled.layout, "tile_scales", lambda s: tiled.append(tuple(s.shape)) or original(s))
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    expected = hq.RotatedLinear.from_linear(linear, format, "sylvester:16", backend="reference")
    for _ in range(3):
        y = layer(x)
        assert y.shape == (2, 3, 32)
        assert torch.allclose(y, expected(x), rtol=2.0**-6, atol=2.0**-6)
    block = get_format(format).block
    # the inputs' by the quantizer itself, three times; the weight's once
    assert tiled.count((32, 64 // block)) == 1 and tiled.count((6, 64 // block)) == 3


def test_the_kept_tiles_follow_the_weight(stand_in):
    torch.manual_seed(0)
    layer = hq.RotatedLinear(64, 32, "nvfp4", bias=False, backend="cublas", dtype=torch.bfloat16)
    x = torch.randn(4, 64).bfloat16()
    for _ in range(2):
        weight = torch.randn(32, 64) * 3
        layer.set_weight(weight)
        q = hq.quantize(x, "nvfp4", backend="reference")
        assert_close(layer(x), q, layer.quantized_weight(), None)
    # an offloader gives the same parameter other memory
    layer.scales.data = layer.scales.data.clone()
    assert_close(layer(x), q, layer.quantized_weight(), None)
    first, last = stand_in.scales_b[0], stand_in.scales_b[-1]
    assert not torch.equal(first.view(torch.uint8), last.view(torch.uint8))


def test_tiles_of_inference_mode_are_not_kept():
    with torch.inference_mode():
        scales = torch.randint(0, 100, (32, 4), dtype=torch.uint8)
        before = block_scaled.tiled_once(scales)
        scales += 1
        assert not torch.equal(block_scaled.tiled_once(scales), before)


def test_the_tiles_of_a_dead_weight_are_dropped():
    scales = torch.zeros(32, 4, dtype=torch.uint8)
    assert block_scaled.tiled_once(scales) is block_scaled.tiled_once(scales)
    kept = len(block_scaled._tiled)
    del scales
    assert len(block_scaled._tiled) == kept - 1


# ---- plans --------------------------------------------------------------------------------------


def product(target: str, format: str = "nvfp4", n: int = 4096, k: int = 4096, backend: str = "cublas", **how):
    return plan_scaled_mm(get_format(format), get_target(target), backend, m=64, n=n, k=k, **how)


def test_by_name_on_blackwell_and_never_by_auto(monkeypatch):
    monkeypatch.setattr(plan, "has_triton", lambda: True)
    for target in BLACKWELL:
        found = product(target)
        assert found.kernel == BLOCK_SCALED and "FP4 units" in found.reason
        auto = product(target, backend="auto")
        assert auto.kernel != BLOCK_SCALED and "never run" in dict(auto.rejected)[BLOCK_SCALED]
    assert product("sm_100", "mxfp4").kernel == product("sm_103", "mxfp4-even").kernel == BLOCK_SCALED
    monkeypatch.setattr(plan, "has_triton", lambda: False)
    assert product("sm_100", backend="auto").kernel != BLOCK_SCALED


@pytest.mark.parametrize(("how", "reason"), [
    ({"target": "sm_90"}, "sm_90 has no FP4 units"),
    ({"target": "gfx950"}, "gfx950 has no FP4 units that torch multiplies on"),
    ({"target": "cpu"}, "cpu has no FP4 units"),
    ({"target": "sm_120", "format": "mxfp4"}, "sm_100 and sm_103 alone, not on sm_120"),
    ({"target": "sm_100", "n": 4104}, "N % 16 == 0 and K % 32 == 0, not N=4104, K=4096"),
    ({"target": "sm_100", "k": 4112}, "N % 16 == 0 and K % 32 == 0, not N=4096, K=4112"),
    ({"target": "sm_100", "out_dtype": torch.float32}, r"of nvfp4 it writes .*, not torch\.float32"),
    ({"target": "sm_100", "format": "mxfp4", "out_dtype": torch.float16}, r"writes torch\.bfloat16, not"),
])  # fmt: skip
def test_elsewhere_it_is_refused_with_the_reason(how, reason):
    with pytest.raises(BackendError, match=f"{BLOCK_SCALED}: .*{reason}"):
        product(**how)


def test_either_scale_layout_gives_the_same_product_elsewhere():
    for format in ("nvfp4", "mxfp4"):
        x, w = operands(5, 20, 96, format)
        tiled = operands(5, 20, 96, format, ("tiled", "tiled"))
        assert torch.equal(hq.scaled_mm(*tiled), hq.scaled_mm(x, w))
        expected = reference.scaled_mm(
            x.codes, x.scales, x.global_scale, w.codes, w.scales, w.global_scale, x.format, None, torch.bfloat16
        )
        assert torch.equal(hq.scaled_mm(x, tiled[1]), expected)
