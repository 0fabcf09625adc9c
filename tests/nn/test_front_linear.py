"""RotatedLinear with a front end: the product of the op's result, its dtype, gradients, and shared inputs."""

import gc
import weakref

import pytest
import torch
from samples import make
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hadaquant as hq
from hadaquant import front, reference
from hadaquant.errors import FrontEndError, ShapeError


def every(x: torch.Tensor) -> list[hq.FrontEnd]:
    w = torch.randn(128).to(x.dtype)
    return [front.rms_norm(w), front.ada_norm(w, -w), front.silu_mul(x * 2), front.gelu_tanh()]


@pytest.mark.parametrize("name", ["int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_of_the_ops_result(name, dtype):
    layer, x = make(name, dtype=dtype), torch.randn(2, 5, 128).to(dtype)
    for front_end in every(x):
        y = layer(x, front_end)
        assert y.dtype == dtype
        assert torch.equal(y, layer(reference.front(x, front_end)).to(dtype))


def test_static_global_scale():
    layer, x = make("nvfp4", input_global_scale=0.01), torch.randn(3, 128)
    assert torch.equal(layer(x, front_end=front.gelu_tanh()), layer(reference.front(x, front.gelu_tanh())))


def test_wrong_width():
    with pytest.raises(ShapeError, match=r"\[..., 128\]"):
        make("int8")(torch.randn(3, 64), front.gelu_tanh())


def test_under_autocast_the_input_is_not_rounded():
    layer, x = make("int8"), torch.randn(3, 128)
    fe = front.rms_norm(torch.randn(128))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, fe)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x, fe).to(torch.bfloat16))


# ---- gradients ----------------------------------------------------------------------------------


def test_gradients_are_refused():
    layer, x, w = make("int8"), torch.randn(3, 128), nn.Parameter(torch.ones(128))
    for args in ((x.requires_grad_(), front.gelu_tanh()), (x.detach(), front.rms_norm(w))):
        with pytest.raises(FrontEndError, match=r"it has no gradient.*call it under torch.no_grad\(\)"):
            layer(*args)
        with torch.no_grad():
            assert not layer(*args).requires_grad
    assert not layer(x.detach(), front.rms_norm(w.detach())).requires_grad


def test_a_trained_bias_has_its_gradient():
    layer, x = make("int8"), torch.randn(3, 128)
    assert layer.bias is not None
    layer.bias.requires_grad_()
    layer(x, front.gelu_tanh()).sum().backward()
    assert layer.bias.grad is not None and layer.bias.grad.tolist() == [3.0] * 48


# ---- compilation --------------------------------------------------------------------------------


def test_a4_a_block_of_norms_and_gates():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(128, eps=1e-5)
            self.gate, self.up = make("int8", n=96), make("int8", n=96)
            hq.share_input([self.gate, self.up])
            self.down = make("nvfp4", k=96, n=128, rotation="sylvester:32")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            norm = front.rms_norm(self.norm.weight, 1e-5)
            return self.down(self.gate(x, norm), front.silu_mul(self.up(x, norm)))

    block = Block()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (2, 17, 33):
            x = torch.randn(m, 128)
            assert torch.equal(compiled(x), block(x))
    assert counter.frame_count <= 2
    torch._dynamo.reset()


# ---- shared inputs ------------------------------------------------------------------------------


@pytest.fixture
def quantized(monkeypatch):
    """Front ends of the inputs that were quantized, in order."""
    seen: list[str] = []
    original = hq.RotatedLinear._quantize_input

    def counting(self, x, front_end):
        seen.append(front_end.spec)
        return original(self, x, front_end)

    monkeypatch.setattr(hq.RotatedLinear, "_quantize_input", counting)
    return seen


def group() -> list[hq.RotatedLinear]:
    layers = [make("int8", n=16 * (i + 1)) for i in range(3)]
    hq.share_input(layers)
    return layers


def alone(layer: hq.RotatedLinear, x: torch.Tensor, fe: hq.FrontEnd | None) -> torch.Tensor:
    shared, layer.input_group = layer.input_group, None
    try:
        return layer(x, fe)
    finally:
        layer.input_group = shared


@torch.no_grad()
def test_b8_one_norm_for_all_members(quantized):
    layers, x, w = group(), torch.randn(4, 128), nn.Parameter(torch.randn(128))
    expected = [alone(layer, x, front.rms_norm(w)) for layer in layers]
    quantized.clear()
    for layer, y in zip(layers, expected, strict=True):
        assert torch.equal(layer(x, front.rms_norm(w)), y)  # a front end made anew, of the same tensor
    assert quantized == ["rms_norm:1e-06"]


@torch.no_grad()
def test_b8_another_front_end_is_another_input(quantized):
    x, w = torch.randn(4, 128), torch.randn(128)
    others = [
        None,
        front.rms_norm(w, 1e-5),
        front.rms_norm(w.clone(), 1e-6),
        front.rms_norm(),
        front.gelu_tanh(),
        front.silu_mul(x),
    ]
    for other in others:
        for first, second in ((front.rms_norm(w), other), (other, front.rms_norm(w))):
            a, b, _ = group()
            a(x, first)
            assert torch.equal(b(x, second), alone(b, x, second))


@torch.no_grad()
def test_b8_a_weight_changed_in_place(quantized):
    (a, b, _), x, w = group(), torch.randn(4, 128), torch.randn(128)
    a(x, front.rms_norm(w))
    w.mul_(3)
    assert torch.equal(b(x, front.rms_norm(w)), alone(b, x, front.rms_norm(w)))


@torch.no_grad()
def test_b8_nothing_outlives_a_front_ends_tensor():
    (a, _, _), x, up = group(), torch.randn(4, 128), torch.randn(4, 128)
    a(x, front.silu_mul(up))
    slot = a.input_group._slot  # type: ignore[union-attr]
    codes = weakref.ref(slot.quantized[0])  # type: ignore[index]
    del up
    gc.collect()
    assert codes() is None
