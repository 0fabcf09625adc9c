"""RotatedLinear: one layer's outputs, casts, moves, modes and gradients."""

import copy

import pytest
import torch
from samples import DTYPES, MATRIX, SIGNED, all_equal, make, parts
from torch import nn

import hadaquant as hq
from hadaquant.errors import (
    AccumulatorError,
    BlockError,
    DtypeError,
    GlobalScaleError,
    GroupError,
    LayerError,
    ShapeError,
)
from hadaquant.formats import FORMATS
from hadaquant.formats.scales import global_scale_of
from hadaquant.ops import LinearPlan

formats = pytest.mark.parametrize("name", sorted(FORMATS))
rotations = pytest.mark.parametrize("rotation", ["none", "sylvester:32", "regular:64", SIGNED, MATRIX], ids=str)


# ---- outputs ------------------------------------------------------------------------------------


@formats
@rotations
def test_output_is_the_two_verbs(name, rotation):
    layer = make(name, rotation)
    for shape in ((128,), (3, 128), (2, 3, 128), (2, 1, 2, 2, 128), (0, 128), (2, 0, 128)):
        for dtype in DTYPES:
            x = torch.randn(shape).to(dtype)
            expected = hq.scaled_mm(
                hq.quantize(x, name, rotation=layer.rotation), layer.quantized_weight(), layer.bias, dtype
            )
            y = layer(x)
            assert y.shape == (*shape[:-1], 48) and y.dtype == dtype and torch.equal(y, expected)


@formats
@rotations
def test_output_is_near_the_linear(name, rotation):
    linear = nn.Linear(128, 48)
    x = torch.randn(32, 128)
    error = (hq.RotatedLinear.from_linear(linear, name, rotation)(x) - linear(x)).norm() / linear(x).norm()
    assert error < (0.02 if name == "int8" else 0.25)


@formats
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_n5_zero_rows(name, static, dtype):
    x = torch.randn(6, 256).to(dtype)
    x[1], x[4] = 0, 0
    g = global_scale_of(x.abs().amax().float()).item() if static and name == "nvfp4" else None
    nonzero = torch.tensor([0, 2, 3, 5])
    for bias in (True, False):
        layer = make(name, k=256, bias=bias, input_global_scale=g).to(dtype)
        row = layer.bias if layer.bias is not None else torch.zeros(48, dtype=dtype)
        y = layer(x)
        for zero in (y[1], y[4], *layer(torch.zeros_like(x))):
            assert torch.equal(zero.view(torch.uint8), row.detach().view(torch.uint8))  # bit for bit
        assert y.isfinite().all()
        together, alone = (hq.quantize(t, name, rotation="regular:64", global_scale=g) for t in (x, x[nonzero]))
        assert torch.equal(together.codes[nonzero], alone.codes) and torch.equal(together.scales[nonzero], alone.scales)
        if name == "int8":
            assert torch.equal(y[nonzero], layer(x[nonzero]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", DTYPES)
def test_a6_bias_in_another_dtype(dtype, bias_dtype):
    layer, x = make("int8"), torch.randn(5, 128).to(dtype)
    assert layer.bias is not None
    without = hq.scaled_mm(hq.quantize(x, "int8", rotation="regular:64"), layer.quantized_weight(), None, torch.float32)
    layer.bias.data = layer.bias.data.to(bias_dtype)
    assert torch.equal(layer(x), (without + layer.bias.float()).to(dtype))


def test_static_global_scale():
    x = torch.randn(5, 128)
    g = 0.004
    layer = make("nvfp4", input_global_scale=g)
    expected = hq.quantize(x, "nvfp4", rotation="regular:64", global_scale=g)
    assert torch.equal(layer(x), hq.scaled_mm(expected, layer.quantized_weight(), layer.bias, torch.float32))
    assert make("nvfp4").input_global_scale is None
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(GlobalScaleError, match="positive and finite"):
            make("nvfp4", input_global_scale=wrong)
    with pytest.raises(GlobalScaleError, match="'int8' has no global scale"):
        make("int8", input_global_scale=1.0)


# ---- what is refused ----------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int8, torch.bool])
@pytest.mark.parametrize("amp", [False, True])
def test_inputs_of_another_dtype(name, dtype, amp):
    layer = make(name)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp), pytest.raises(DtypeError, match=rf"x has dtype {dtype}"):
        layer(torch.ones(3, 128).to(dtype))


def test_inputs_of_another_width():
    for shape in ((3, 64), (128, 3), ()):
        with pytest.raises(ShapeError, match=r"x has shape .*\[..., 128\].*nn.Linear"):
            make("int8")(torch.ones(shape))


def test_b11_layers_that_cannot_exist():
    with pytest.raises(GroupError, match="K=96"):
        hq.RotatedLinear(96, 8, "int8", "regular:256")
    with pytest.raises(BlockError, match="K=40"):
        hq.RotatedLinear(40, 8, "nvfp4")
    with pytest.raises(AccumulatorError):
        hq.RotatedLinear(200_000, 8, "int8")
    for wrong in (nn.Conv1d(64, 8, 1), nn.Embedding(8, 64)):
        with pytest.raises(LayerError, match=f"{type(wrong).__name__} is not an nn.Linear"):
            hq.RotatedLinear.from_linear(wrong, "int8")  # type: ignore[arg-type]
    integers = nn.Linear(64, 8)
    integers.weight = nn.Parameter(integers.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(LayerError, match=r"weight has dtype torch.int8"):
        hq.RotatedLinear.from_linear(integers, "int8")


# ---- casts and moves ----------------------------------------------------------------------------


@formats
@rotations
@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
def test_a5_casts_reach_the_bias_alone(name, rotation, cast):
    layer = make(name, rotation, input_global_scale=0.01 if name == "nvfp4" else None)
    before = parts(layer)
    casted = getattr(nn.Sequential(layer), cast)()[0]
    assert casted is layer and all_equal(parts(layer), before)
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}[cast]
    assert layer.bias is not None and layer.bias.dtype == layer.weight.dtype == dtype
    assert all_equal(parts(layer.to(torch.float16).to("cpu", torch.float32)), before)


@formats
def test_a5_moves_reach_everything(name):
    layer = make(name, SIGNED)
    layer.to("meta")
    assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
    assert layer(torch.ones(3, 128, device="meta")).shape == (3, 48)
    layer.to_empty(device="cpu")
    assert layer.scales.dtype == FORMATS[name].scale.dtype and not layer.codes.is_meta
    layer = make(name)
    before = parts(layer)
    assert all_equal(parts(layer.share_memory()), before) and layer.scales.is_shared()


@formats
def test_meta_then_loaded(name):
    source = make(name, SIGNED)
    with torch.device("meta"):
        empty = hq.RotatedLinear(128, 48, name, SIGNED)
    assert empty.codes.is_meta and empty.scales.is_meta and empty.contract.is_meta
    empty.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(3, 128)
    assert torch.equal(empty(x), source(x))


def test_parameters_without_grad():
    layer = make("nvfp4", SIGNED, input_global_scale=0.01)
    assert set(dict(layer.named_parameters())) == {
        "codes",
        "scales",
        "global_scale",
        "input_global_scale",
        "signs",
        "bias",
    }
    assert not any(p.requires_grad for p in layer.parameters())
    assert [name for name, _ in layer.named_buffers()] == ["nominal", "contract"]
    assert "nominal" not in layer.state_dict()


def test_from_linear_leaves_the_linear_alone():
    linear = nn.Linear(64, 8).eval()
    before = copy.deepcopy(linear.state_dict())
    layer = hq.RotatedLinear.from_linear(linear, "int8", "regular:64")
    assert not layer.training
    layer.bias.data.fill_(3)  # type: ignore[union-attr]
    assert all(torch.equal(before[key], t) for key, t in linear.state_dict().items())


# ---- modes --------------------------------------------------------------------------------------


@formats
def test_a6_inference_mode_both_ways(name):
    x, linear = torch.randn(3, 128), nn.Linear(128, 48)
    outside = hq.RotatedLinear.from_linear(linear, name, "regular:64")
    with torch.inference_mode():
        inside = hq.RotatedLinear.from_linear(linear, name, "regular:64")
        expected = outside(x)
    with torch.no_grad():
        assert torch.equal(inside(x), expected) and torch.equal(outside(x), expected)


@formats
@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a6_autocast_as_nn_linear(name, amp, dtype):
    x, layer = torch.randn(3, 128).to(dtype), make(name)
    expected = layer(x.to(amp))
    with torch.autocast("cpu", amp):
        y = layer(x)
        assert y.dtype == nn.Linear(128, 48)(x).dtype == amp
    assert torch.equal(y, expected)


# ---- plans --------------------------------------------------------------------------------------


@formats
def test_a11_which_kernel_and_why(name):
    plan = make(name).explain(M=17)
    assert isinstance(plan, LinearPlan)
    assert plan.quantize.kernel == plan.scaled_mm.kernel == "reference"
    assert plan.quantize.format == name and plan.quantize.target == "cpu" and plan.quantize.reason
    assert make(name, backend="reference").explain().quantize.reason == "asked for by name"
    assert "format=" + name in repr(make(name)) and "rotation=regular:64" in repr(make(name))


def test_b10_backend_of_a_module_and_of_the_process():
    layer, x = make("int8"), torch.randn(3, 128)
    y = layer(x)
    hq.set_backend("reference")
    assert torch.equal(layer(x), y) and layer.explain().quantize.reason == "asked for by name"


# ---- gradients ----------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_the_dequantized_weight(name, dtype):
    layer = make(name, SIGNED).to(dtype)
    assert layer.bias is not None
    layer.bias.requires_grad_()
    x = torch.randn(2, 3, 128).to(dtype).requires_grad_()
    gradient = torch.randn(2, 3, 48).to(dtype)
    y = layer(x)
    assert torch.equal(y, layer(x.detach()).detach())
    y.backward(gradient)
    g = gradient.float()
    assert x.grad is not None and x.grad.dtype == dtype and layer.bias.grad is not None
    assert torch.allclose(
        x.grad.float(), g @ layer.dequantized_weight(), rtol=1e-2, atol=1e-2 if dtype != torch.float32 else 1e-5
    )
    assert torch.allclose(layer.bias.grad.float(), g.sum((0, 1)), rtol=1e-2, atol=1e-2)
    assert layer.codes.grad is None


def test_gradients_only_where_they_are_wanted():
    layer, x = make("int8"), torch.randn(3, 128)
    assert not layer(x).requires_grad
    wanted = x.clone().requires_grad_()
    with torch.no_grad():
        assert not layer(wanted).requires_grad
    (gradient,) = torch.autograd.grad(layer(wanted).sum(), wanted)
    assert torch.allclose(gradient, layer.dequantized_weight().sum(0).expand(3, -1), atol=1e-5)


def test_a_trained_adapter_before_a_quantized_layer_learns():
    adapter, layer = nn.Linear(128, 128), make("int8")
    before = adapter.weight.detach().clone()
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
    x, target = torch.randn(32, 128), torch.randn(32, 48)
    losses = []
    for _ in range(20):
        loss = (layer(adapter(x)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0] and not torch.equal(adapter.weight, before)
