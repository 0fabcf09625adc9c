"""B8: layers that read one tensor quantize it once, and never a stale or foreign one."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from samples import make
from torch import nn

import hadaquant as hq
from hadaquant.errors import LayerError


@pytest.fixture
def quantized(monkeypatch):
    """Inputs that were quantized, in order."""
    seen: list[torch.Tensor] = []
    original = hq.RotatedLinear._quantize_input

    def counting(self, x, front_end):
        seen.append(x)
        return original(self, x, front_end)

    monkeypatch.setattr(hq.RotatedLinear, "_quantize_input", counting)
    return seen


def qkv(name: str = "int8", n: int = 3) -> list[hq.RotatedLinear]:
    layers = [make(name, n=16 * (i + 1)) for i in range(n)]
    for i, layer in enumerate(layers):
        layer.set_weight(torch.randn(16 * (i + 1), 128))
    return layers


def alone(layer: hq.RotatedLinear, x: torch.Tensor) -> torch.Tensor:
    """What the layer gives without its group."""
    group, layer.input_group = layer.input_group, None
    try:
        return layer(x)
    finally:
        layer.input_group = group


@pytest.mark.parametrize("name", ["int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b8_once_for_all_members(name, mode, dtype, quantized):
    layers = qkv(name)
    hq.share_input(layers)
    with mode():
        for _ in range(3):
            x = torch.randn(2, 5, 128).to(dtype)
            expected = [alone(layer, x) for layer in layers]
            quantized.clear()
            assert all(torch.equal(layer(x), y) for layer, y in zip(layers, expected, strict=True))
            assert len(quantized) == 1


def test_b8_with_gradients(quantized):
    layers = qkv()
    hq.share_input(layers)
    x = torch.randn(4, 128, requires_grad=True)
    torch.cat([layer(x) for layer in layers], -1).sum().backward()
    assert len(quantized) == 1 and x.grad is not None
    expected = torch.cat([layer.dequantized_weight() for layer in layers]).sum(0)
    assert torch.allclose(x.grad, expected.expand(4, -1), atol=1e-4)


def test_b8_nothing_without_a_declaration(quantized):
    x = torch.randn(4, 128)
    for layer in qkv():
        layer(x)
    assert len(quantized) == 3


@pytest.mark.parametrize("change", [
    lambda x: x.add_(1),
    lambda x: x.__setitem__((0, 3), 9.0),
    lambda x: x.view(-1)[5:6].fill_(4),
    lambda x: x.t().mul_(2),
])  # fmt: skip
def test_b8_in_place_change_between_members(change, quantized):
    a, b, _ = layers = qkv()
    hq.share_input(layers)
    x = torch.randn(4, 128)
    a(x)
    change(x)
    assert torch.equal(b(x), alone(b, x)) and len(quantized) == 3


def test_b8_another_tensor(quantized):
    a, b, c = layers = qkv()
    hq.share_input(layers)
    x = torch.randn(4, 128)
    y = x.clone()
    a(x)
    for other in (y, x.view(4, 128), x[:2]):
        quantized.clear()
        assert torch.equal(b(other), alone(b, other)) and quantized[0] is other
    assert torch.equal(c(x), alone(c, x))


def test_b8_another_tensor_in_the_same_memory():
    """A new tensor where an old one was, as caching allocators give them."""
    a, b, _ = layers = qkv()
    hq.share_input(layers)
    storage = torch.randn(4, 128)
    a(storage.view(4, 128))
    storage.data.fill_(1)
    x = storage.view(4, 128)
    assert torch.equal(b(x), alone(b, x))


def test_b8_groups_do_not_see_each_other(quantized):
    first, second = qkv(), qkv()
    hq.share_input(first)
    hq.share_input(second)
    x = torch.randn(4, 128)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a(x), alone(a, x)) and torch.equal(b(x), alone(b, x))
    assert len(quantized) == 2 + 6


def test_b8_a_member_called_twice(quantized):
    a, b, _ = layers = qkv()
    hq.share_input(layers)
    x = torch.randn(4, 128)
    a(x)
    a(x)
    b(x)
    assert len(quantized) == 2


def test_b8_under_inference_mode_only_the_group_is_trusted(quantized):
    a, b, _ = layers = qkv()
    hq.share_input(layers)
    with torch.inference_mode():
        x = torch.randn(4, 128)
        a(x)
        y = torch.randn(4, 128)
        assert torch.equal(b(y), alone(b, y))
    z = torch.randn(4, 128)
    a(z)
    with torch.inference_mode():
        quantized.clear()
        b(z)  # made outside: it has a version, which is looked at
        assert not quantized
        z.add_(1)
        assert torch.equal(b(z), alone(b, z))


# ---- nothing outlives ---------------------------------------------------------------------------


@pytest.fixture
def codes(monkeypatch):
    """Weak references to the codes of every quantized input."""
    alive: list[weakref.ref] = []
    original = hq.RotatedLinear._quantize_input

    def watching(self, x, front_end):
        result = original(self, x, front_end)
        alive.append(weakref.ref(result[0]))
        return result

    monkeypatch.setattr(hq.RotatedLinear, "_quantize_input", watching)
    return alive


def test_b8_nothing_outlives_the_last_member(codes):
    layers = qkv()
    hq.share_input(layers)
    x = torch.randn(4, 128)
    for layer in layers:
        layer(x)
    assert len(codes) == 1 and codes[0]() is None


def test_b8_nothing_outlives_the_tensor(codes):
    layers = qkv()
    hq.share_input(layers)
    x = torch.randn(4, 128)
    layers[0](x)
    assert codes[0]() is not None
    del x
    gc.collect()
    assert codes[0]() is None


def test_b8_nothing_outlives_a_tensor_that_dies_in_another_thread(codes):
    layers = qkv()
    hq.share_input(layers)
    held = [torch.randn(4, 128)]
    layers[0](held[0])
    dropping = threading.Thread(target=lambda: (held.clear(), gc.collect()))
    dropping.start()
    dropping.join()
    assert codes[0]() is None


def test_b8_nothing_outlives_a_failure():
    a, b, _ = layers = qkv()
    hq.share_input(layers)
    with pytest.raises(hq.HadaquantError):
        a(torch.ones(4, 128, dtype=torch.int32))
    x = torch.randn(4, 128)
    assert torch.equal(a(x), alone(a, x)) and torch.equal(b(x), alone(b, x))


# ---- threads and copies -------------------------------------------------------------------------


def test_b8_threads(quantized):
    layers = qkv()
    hq.share_input(layers)
    inputs = [torch.randn(3, 128) for _ in range(4)]
    expected = [[alone(layer, x) for layer in layers] for x in inputs]
    quantized.clear()
    together, wrong = threading.Barrier(4), []

    def run(x, ys):
        for _ in range(10):
            for layer, y in zip(layers, ys, strict=True):
                together.wait()  # all four between two members at once
                if not torch.equal(layer(x), y):
                    wrong.append(layer)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(quantized) == 4 * 10


def test_b8_copies_have_a_group_of_their_own(quantized):
    model = nn.ModuleList(qkv())
    hq.share_input(model)  # type: ignore[arg-type]
    x = torch.randn(4, 128)
    model[0](x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        groups = {id(layer.input_group) for layer in again}
        assert len(groups) == 1 and groups != {id(model[0].input_group)}
        quantized.clear()
        for layer in again:
            layer(x)
        assert len(quantized) == 1


# ---- declarations -------------------------------------------------------------------------------


def test_b8_declarations_that_are_refused():
    signs = torch.ones(64)
    for layers in (
        [],
        [make("int8")],
        [make("int8"), make("nvfp4")],
        [make("int8"), make("int8", "regular:16")],
        [make("int8"), make("int8", k=256)],
        [make("int8"), make("int8", backend="reference")],
        [make("nvfp4"), make("nvfp4", input_global_scale=0.5)],
        [make("int8", hq.Rotation("regular", 64, s)) for s in (signs, -signs)],
    ):
        with pytest.raises(
            LayerError, match=f"layer 'group of {len(layers)}': members must be two or more with one format"
        ):
            hq.share_input(layers)
        assert all(layer.input_group is None for layer in layers)
    with pytest.raises(LayerError, match="holds Linear, which quantize no input"):
        hq.share_input([make("int8"), nn.Linear(128, 8)])  # type: ignore[list-item]


def test_b8_equal_tensors_are_one_rotation():
    signs = torch.ones(64)
    hq.share_input([make("int8", hq.Rotation("regular", 64, signs.clone())) for _ in range(2)])
