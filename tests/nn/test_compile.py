"""a4: compiled without a graph break, in at most two compilations, with equal bits."""

import pytest
import torch
from samples import MATRIX, SIGNED, make
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hadaquant as hq


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(module: nn.Module, k: int = 128) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        module(torch.randn(3, k))  # eager first
        compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
        for m in (1, 2, 17, 33, 1):
            x = torch.randn(m, k)
            assert torch.equal(compiled(x), module(x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("rotation", ["none", "regular:64", SIGNED, MATRIX], ids=str)
def test_a4_a_layer(name, rotation):
    check(make(name, rotation))


def test_a4_static_scale_and_no_bias():
    check(make("nvfp4", input_global_scale=0.01))
    torch._dynamo.reset()
    check(make("int8", bias=False).to(torch.float32))


def test_a4_a_model_with_shared_inputs():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (make("int8") for _ in range(3))
            hq.share_input([self.q, self.k, self.v])
            self.out = make("nvfp4", k=48 * 2, n=128, rotation="sylvester:32")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.cat((self.q(x) * self.k(x), self.v(x)), -1))

    check(Attention())


def test_a4_the_verbs():
    def verbs(x: torch.Tensor) -> torch.Tensor:
        q = hq.quantize(x, "nvfp4", rotation="sylvester:16", scale_layout="tiled")
        w = hq.quantize(x, "int8", rotation="sylvester:16", backend="reference")
        return q.dequantize() + hq.rotate(x, "regular:64") + hq.scaled_mm(w, w, out_dtype=torch.float32).sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(verbs, backend=counter, fullgraph=True, dynamic=True)
    for m in (1, 2, 17):
        x = torch.randn(m, 128)
        assert torch.equal(compiled(x), verbs(x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_a4_under_autocast(amp):
    layer = make("int8")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(4, 128)
    with torch.no_grad(), torch.autocast("cpu", amp):
        y = compiled(x)
        assert y.dtype == amp and torch.equal(y, layer(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does so itself
def test_a4_with_gradients():
    layer = make("int8")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    x, z = (torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    y, expected = compiled(x), layer(z)
    assert torch.equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    assert x.grad is not None and z.grad is not None and torch.equal(x.grad, z.grad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # Inductor's own imports
def test_a4_with_inductor():
    layer = make("nvfp4")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (1, 2, 17):
            x = torch.randn(m, 128)
            assert torch.equal(compiled(x), layer(x))
