"""Few rows of full activations on a GPU: as close to the exact product as torch, in every tile; a layer in a graph."""

import pytest
import torch

import hadaquant as hq
from hadaquant.ops.plan import interpreting

from .test_weight_only import assert_close, operands

pytestmark = pytest.mark.skipif(interpreting() or not torch.cuda.is_available(), reason="needs a GPU")

#: Rows of x, N, K and the tile.
CASES = [
    (1, 4096, 4096, (8, 16)),
    (2, 40, 32, (8, 16)),
    (11, 520, 1056, (8, 16)),
    (16, 520, 1056, (16, 16)),
    (15, 520, 1056, (16, 32)),
    (40, 520, 1056, (32, 16)),
]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_every_tile(format):
    for m, n, k, tile in CASES:
        x, w = operands(m, n, k, format, "cuda")
        assert_close(x, w, None, torch.bfloat16, "weight_few_rows", tile)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_outputs_with_a_bias(dtype):
    x, w = operands(3, 33, 96, "nvfp4", "cuda")
    assert_close(x, w, torch.randn(33, device="cuda").to(dtype), dtype, "weight_few_rows", (8, 16))


@pytest.mark.parametrize("n", [1, 17, 22473])
def test_s3_odd_numbers_of_outputs(n):
    assert_close(*operands(2, n, 96, "nvfp4", "cuda"), None, torch.bfloat16, "weight_few_rows", (8, 16))


def test_a_nan_stays_in_its_row_and_its_column():
    x, w = torch.randn(5, 128).bfloat16(), torch.randn(40, 128)
    layers = []
    for weight in (w, w.clone().index_put_((torch.tensor(7), torch.tensor(33)), torch.tensor(torch.inf))):
        layer = hq.RotatedLinear(128, 40, "mxfp4", bias=False, activations="full", device="cuda")
        layer.set_weight(weight.cuda())
        layers.append(layer)
    clean, bad = x.cuda(), x.cuda()
    bad[1, 3] = torch.nan
    y, expected = layers[1](bad), layers[0](clean)
    assert y[1].isnan().all() and y[:, 7].isnan().all()
    keep = torch.ones_like(y, dtype=torch.bool)
    keep[1], keep[:, 7] = False, False
    assert torch.equal(y[keep], expected[keep])


@pytest.mark.parametrize("format", ["int8", "nvfp4"])
def test_a3_a_layer_in_a_cuda_graph(format):
    linear = torch.nn.Linear(512, 256, dtype=torch.bfloat16)
    cpu = hq.RotatedLinear.from_linear(linear, format, "sylvester:16", activations="full")
    layer = hq.RotatedLinear.from_linear(linear.cuda(), format, "sylvester:16", activations="full")
    for m in (1, 20):
        x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            expected = layer(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            y.zero_()
            graph.replay()
            assert torch.equal(y, expected), layer.explain(m)
            near = cpu(x.cpu()).float()
            assert (y.cpu().float() - near).norm() <= 2.0**-8 * near.norm()
