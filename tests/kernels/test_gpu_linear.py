"""A rotated linear on a GPU: the CPU's bits at every M, in streams, in CUDA graphs, compiled."""

import pytest
import torch
from torch import nn

import hadaquant as hq

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS = (1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 128, 300, 1100)


def layer_of(n: int, k: int, format: str = "int8", bias: bool = True) -> hq.RotatedLinear:
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=bias, dtype=torch.bfloat16)
    return hq.RotatedLinear.from_linear(linear, format, hq.rotation.parse("regular:256").fit(k) or "none")


def inputs(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(4096, 1024), (1544, 3072), (33, 64), (17, 16), (1, 64), (2152, 4304)], ids=str)
def test_s3_s1_int8_gives_the_cpus_bits(shape):
    n, k = shape
    cpu = layer_of(n, k)
    gpu = layer_of(n, k).cuda()
    for m in ROWS:
        x = inputs(m, k)
        assert torch.equal(gpu(x.cuda()).cpu(), cpu(x)), f"M={m}: {gpu.explain(m)}"


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_fp4_is_as_close_as_torch(format):
    layer = layer_of(520, 1024, format)
    gpu = layer_of(520, 1024, format).cuda()
    for m in (1, 17, 300):
        x = inputs(m, 1024)
        q = hq.quantize(x, format, rotation=layer.rotation)
        bias = layer.bias.double()
        exact = q.dequantize().double() @ layer.dequantized_weight().double().T + bias
        ours, torchs = gpu(x.cuda()).cpu(), (q.dequantize() @ layer.dequantized_weight().T + bias.float()).bfloat16()
        error, allowed = ((y.double() - exact).norm() for y in (ours, torchs))
        assert error <= 2 * allowed


@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [1, 16, 300, 1100])
def test_a3_cuda_graph(format, m):
    layer = layer_of(1544, 1024, format).cuda()
    with torch.inference_mode():
        static = inputs(m, 1024).cuda()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(static)
        for seed in (m + 1, m + 2):
            x = torch.randn(m, 1024, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16).cuda()
            static.copy_(x)
            graph.replay()
            assert torch.equal(y, layer(x))


@pytest.mark.parametrize("format", ["int8", "nvfp4"])
def test_a2_two_streams(format):
    layer = layer_of(1544, 1024, format).cuda()
    xs = [inputs(m, 1024).cuda() for m in (1, 300)]
    expected = [layer(x) for x in xs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    results = []
    for _ in range(20):
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(layer(x))
    torch.cuda.synchronize()
    for i, y in enumerate(results):
        assert torch.equal(y, expected[i % 2])


@pytest.mark.parametrize("format", ["int8", "nvfp4"])
def test_a4_compiled_without_breaks(format):
    layer = layer_of(1544, 1024, format).cuda()
    layer(inputs(3, 1024).cuda())
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (1, 2, 17, 300):
        x = inputs(m, 1024).cuda()
        assert torch.equal(compiled(x), layer(x))


def test_l3_offsets_beyond_32_bits():
    free, _ = torch.cuda.mem_get_info()
    if free < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    m, k = 175000, 12288
    x = torch.randn(64, k, dtype=torch.bfloat16, device="cuda").repeat(m // 64 + 1, 1)[:m].contiguous()
    for format in ("int8", "mxfp4"):
        q = hq.quantize(x, format, rotation="regular:256")
        tail = hq.quantize(x[-3:].cpu(), format, rotation="regular:256")
        assert torch.equal(q.codes[-3:].cpu(), tail.codes)
        assert torch.equal(q.scales[-3:].cpu(), tail.scales)


@pytest.mark.parametrize("k", [32, 128])
def test_l4_more_rows_than_a_second_grid_axis_holds(k):
    x = torch.randn(65536 * 4 + 1, k, device="cuda").bfloat16()
    for format in ("int8", "mxfp4"):
        q = hq.quantize(x, format, rotation="sylvester:32")
        tail = hq.quantize(x[-5:].cpu(), format, rotation="sylvester:32")
        assert torch.equal(q.codes[-5:].cpu(), tail.codes)
