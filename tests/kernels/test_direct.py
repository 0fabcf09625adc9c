"""A linear called without the dispatcher gives the bits of its ops. It runs on a GPU only."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import hadaquant as hq
from hadaquant.errors import ShapeError
from hadaquant.front import NONE
from hadaquant.ops import direct

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

K, N = 1024, 1544


def layer_of(
    bias: bool = True,
    rotation: str | hq.Rotation = "regular:256",
    dtype: torch.dtype = torch.bfloat16,
    format: str = "int8",
    g: float | None = None,
    activations: str = "coded",
):
    torch.manual_seed(0)
    linear = nn.Linear(K, N, bias=bias, dtype=dtype, device="cuda")
    how = {"input_global_scale": g, "activations": activations}
    return hq.RotatedLinear.from_linear(linear, format, rotation, **how).requires_grad_(False)


def by_ops(layer: hq.RotatedLinear, x: torch.Tensor, front_end: hq.FrontEnd = NONE) -> torch.Tensor:
    if layer.activations == "full":
        h = layer._rotate_input(x, front_end, False)
        w = (layer.codes, layer.scales, layer.global_scale, layer.bias)
        return torch.ops.hadaquant.weight_mm(h, *w, layer.format.name, x.dtype, layer.backend, False)
    codes, scales, g = layer._quantize_input(x, front_end)
    w = (layer.codes, layer.scales, layer.global_scale, layer.bias)
    return torch.ops.hadaquant.scaled_mm(codes, scales, g, *w, layer.format.name, x.dtype, layer.backend)


def directly(layer: hq.RotatedLinear, x: torch.Tensor, front_end: hq.FrontEnd = NONE) -> torch.Tensor | None:
    how = (layer.format.name, layer.rotation_spec, layer.backend, x.dtype, layer.activations == "full")
    return direct.direct_linear(x, front_end, layer._parameters, *how)


@pytest.mark.parametrize(
    ("format", "rotation", "g", "rows"),
    [
        ("nvfp4", "sylvester:16", 0.004, (1, 4, 9, 64, 300, 1100)),
        ("nvfp4", "none", None, (1, 9, 300)),
        ("mxfp4", "regular:64", None, (9, 300)),
    ],
)
def test_fp4_same_bits_at_any_number_of_rows(format, rotation, g, rows):
    layer = layer_of(True, rotation, format=format, g=g)
    for m in rows:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        x[m // 2, 5] = torch.nan
        y, other = directly(layer, x), by_ops(layer, x)
        assert y is not None
        assert torch.equal(y.isnan(), other.isnan())
        assert torch.equal(y.nan_to_num(), other.nan_to_num())
        assert torch.equal(layer(x).nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("m", [1, 5, 300, 1100])
@pytest.mark.parametrize("kind", ["rms_norm", "bare_norm", "ada_norm", "silu_mul", "gelu_tanh"])
def test_same_bits_behind_a_front_end(kind, m):
    layer, wide = layer_of(), torch.randn(2, m, 2 * K, device="cuda", dtype=torch.bfloat16)
    x, up = wide.chunk(2, dim=-1)  # halves of a wider tensor
    scale, shift = torch.randn(2, 2, K, device="cuda", dtype=torch.bfloat16)
    front_end = {
        "rms_norm": lambda: hq.front.rms_norm(scale[0].float()),
        "bare_norm": lambda: hq.front.rms_norm(),
        "ada_norm": lambda: hq.front.ada_norm(scale, shift),
        "silu_mul": lambda: hq.front.silu_mul(up),
        "gelu_tanh": lambda: hq.front.gelu_tanh(),
    }[kind]()
    y = directly(layer, x, front_end)
    assert y is not None and y.shape == (2, m, N)
    assert torch.equal(y, by_ops(layer, x, front_end))
    assert torch.equal(layer(x, front_end), y)


def test_front_ends_that_do_not_fit_are_refused():
    layer, x = layer_of(), torch.randn(4, K, device="cuda", dtype=torch.bfloat16)
    for weight in (torch.ones(K - 1, device="cuda"), torch.ones(K)):
        with pytest.raises(ShapeError):
            layer(x, hq.front.rms_norm(weight))


@pytest.mark.parametrize(("format", "rotation"), [("nvfp4", "sylvester:16"), ("mxfp4", "regular:64"), ("int8", "none")])
@pytest.mark.parametrize("bias", [False, True])
def test_same_bits_of_full_activations(format, rotation, bias):
    layer = layer_of(bias, rotation, format=format, activations="full")
    for m in (1, 9, 16, 64, 300, 1100):
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        y = directly(layer, x)
        assert (y is None) == (format == "int8" and m > 64)  # by torch's product, in chunks
        assert torch.equal(layer(x), by_ops(layer, x))
        assert y is None or torch.equal(layer(x), y)


def test_fp4_in_a_graph():
    layer, x = layer_of(format="nvfp4", rotation="sylvester:16"), torch.randn(64, K, device="cuda").bfloat16()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, by_ops(layer, x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m", [1, 2, 3, 16, 17, 64, 128, 300, 1024, 4000])
def test_same_bits_at_any_number_of_rows(m, bias):
    layer, x = layer_of(bias), torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
    y = directly(layer, x)
    assert y is not None
    assert torch.equal(y, by_ops(layer, x))
    assert torch.equal(layer(x), y)


def test_signs_and_float16():
    signs = torch.randint(0, 2, (256,), generator=torch.Generator().manual_seed(2)) * 2 - 1
    layer = layer_of(rotation=hq.Rotation("sylvester", 256, signs=signs), dtype=torch.float16)
    x = torch.randn(5, K, device="cuda", dtype=torch.float16)
    y = directly(layer, x)
    assert y is not None
    assert torch.equal(y, by_ops(layer, x))


def test_what_it_leaves_to_the_ops():
    layer, x = layer_of(), torch.randn(4, K, device="cuda", dtype=torch.bfloat16)
    odd = torch.randn(4 * K + 1, device="cuda", dtype=torch.bfloat16)[1:].view(4, K)
    for other in (odd, x.float(), torch.randn(4, 2 * K, device="cuda", dtype=torch.bfloat16)[:, ::2], x[:0]):
        assert directly(layer, other) is None
        assert torch.equal(layer(other), by_ops(layer, other))
    assert not direct.unwatched(nn.Parameter(x))
    assert direct.unwatched(x)


def test_changed_weights_are_used_and_wrong_ones_refused():
    layer, x = layer_of(), torch.randn(4, K, device="cuda", dtype=torch.bfloat16)
    before = layer(x)
    layer.set_weight(torch.randn(N, K, device="cuda"))
    assert not torch.equal(layer(x), before)
    assert torch.equal(layer(x), by_ops(layer, x))
    layer.scales = nn.Parameter(torch.ones(N - 1, device="cuda"), requires_grad=False)
    with pytest.raises(ShapeError):
        layer(x)


def test_threads_and_streams():
    layer = layer_of()
    xs = [torch.randn(m, K, device="cuda", dtype=torch.bfloat16) for m in (1, 40, 4000, 4000) for _ in range(8)]
    expected = [by_ops(layer, x) for x in xs]
    torch.cuda.synchronize()

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            y = layer(x)
            torch.cuda.current_stream().synchronize()
            return y

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, xs))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_in_a_graph():
    layer, x = layer_of(), torch.randn(4000, K, device="cuda", dtype=torch.bfloat16)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, by_ops(layer, x))


@pytest.mark.parametrize(("format", "m"), [("int8", 1), ("mxfp4", 1), ("mxfp4", 16), ("mxfp4", 128)])
def test_weights_quantized_in_the_launch_before(format, m):
    # launches overlap, yet nothing may read a weight before the kernel that writes it is done
    x, w = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in (m, 4096))
    rotation = "regular:256" if format == "int8" else "regular:16"
    qx, qw = (hq.quantize(t, format, rotation=rotation) for t in (x, w))
    torch.cuda.synchronize()
    expected = hq.scaled_mm(qx, qw).cpu()
    found = []
    for _ in range(50):
        qx, qw = (hq.quantize(t, format, rotation=rotation) for t in (x, w))
        found.append(hq.scaled_mm(qx, qw))
        qw.codes.zero_()  # the next weight gets this memory
    assert all(torch.equal(y.cpu(), expected) for y in found)
