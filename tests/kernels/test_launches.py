"""What is launched on a GPU, without one: every launcher gives its kernel all arguments and constants, as addresses.

Triton's compiler and driver are stood in for; plans are those of sm_90, tensors lie on the CPU.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from triton.runtime.jit import JITFunction

import hadaquant as hq
from hadaquant import kernels
from hadaquant.errors import DtypeError, ShapeError
from hadaquant.front import NONE
from hadaquant.kernels import runtime
from hadaquant.ops import direct, library, plan, target, weight_only
from hadaquant.ops.plan import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="the interpreter takes tensors")

K, N = 512, 264


class Driver:
    """Keeps what is compiled and launched."""

    def __init__(self):
        self.compiled, self.launched = [], []

    def warmup(self, kernel, *arguments, grid, **config):
        names = kernel.arg_names
        options = {"num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg"}
        constants = set(config) - options
        assert constants == set(names[len(arguments) :]), kernel
        self.compiled.append(kernel.__name__)

        def run(*given):
            operands = given[9 : 9 + len(arguments)]  # grid, stream, function, metadata, two hooks
            assert len(given) == 9 + len(names), kernel
            for name, first, later in zip(names, arguments, operands, strict=False):
                of_tensor = isinstance(first, torch.Tensor | torch.dtype)
                assert isinstance(later, int) if of_tensor else type(later) is type(first), (kernel, name, later)
            self.launched.append(kernel.__name__)

        metadata = SimpleNamespace(shared=0)
        return SimpleNamespace(run=run, n_regs=64, metadata=metadata, function=0, packed_metadata=())


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(JITFunction, "warmup", lambda kernel, *a, **how: driver.warmup(kernel, *a, **how))
    monkeypatch.setattr(
        "triton.runtime.driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 0))
    )
    stand_ins = {
        "by_address": lambda _: True,
        "launches_overlap": lambda _: True,
        "multiprocessors": lambda _: 132,
        "shared_bytes": lambda _: 227 * 1024,
        "converts_to_e4m3": lambda _: True,
    }
    caches = []
    for module in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"hadaquant.kernels.{module.name}")
        for name, value in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
        if hasattr(module, "_launches"):
            monkeypatch.setattr(module, "_launches", {})
        caches += [f for f in vars(module).values() if hasattr(f, "cache_clear")]
    for module in (library, direct, weight_only, plan):
        if hasattr(module, "target_of"):
            monkeypatch.setattr(module, "target_of", lambda _: target.TARGETS["sm_90"])
    monkeypatch.setattr(library, "unwatched", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    caches += [direct._prepared, library._made]
    for cache in caches:
        cache.cache_clear()
    yield driver
    for cache in caches:
        cache.cache_clear()


def layer_of(format: str, rotation: str, **how) -> hq.RotatedLinear:
    linear = nn.Linear(K, N, dtype=torch.bfloat16)
    layer = hq.RotatedLinear.from_linear(linear, format, rotation, backend="reference", **how)
    layer.backend = "auto"
    return layer.requires_grad_(False)


WAYS = [("int8", "regular:256"), ("int8", "none"), ("nvfp4", "sylvester:16"), ("nvfp4", "sylvester:128"),
        ("mxfp4", "regular:64"), ("mxfp4", "none")]  # fmt: skip
ROWS = (1, 4, 16, 40, 64, 200, 1100)


@pytest.mark.parametrize(("format", "rotation"), WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", [{}, {"activations": "full"}, {"input_global_scale": 0.01}], ids=str)
@pytest.mark.parametrize("seen", [True, False])
def test_linears(gpu, monkeypatch, format, rotation, dtype, how, seen):
    if "input_global_scale" in how and format != "nvfp4":
        pytest.skip("it has no global scale")
    monkeypatch.setattr("hadaquant.nn.linear.unwatched", lambda _: not seen)
    layer = layer_of(format, rotation, **how)
    norm, scale = hq.front.rms_norm(torch.ones(K)), torch.ones(K, dtype=torch.bfloat16)
    for m in ROWS:
        if how.get("activations") == "full" and m > 64 and format == "int8":
            continue  # by torch's product, which is CUDA's
        x = torch.randn(m, K, dtype=dtype)
        for front_end in (None, norm, hq.front.ada_norm(scale, scale), hq.front.silu_mul(x), hq.front.gelu_tanh()):
            before = len(gpu.launched)
            assert layer(x, front_end).shape == (m, N)
            assert len(gpu.launched) >= before + 2, (m, front_end)


@pytest.mark.parametrize(("format", "rotation"), WAYS)
@pytest.mark.parametrize("activations", ["coded", "full"])
def test_what_the_ops_refuse_is_refused(gpu, monkeypatch, format, rotation, activations):
    monkeypatch.setattr("hadaquant.nn.linear.unwatched", lambda _: True)
    layer = layer_of(format, rotation, activations=activations)
    gpu.launched.clear()
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(DtypeError):
            layer(torch.ones(4, K, dtype=dtype))
    assert not gpu.launched
    monkeypatch.setattr("hadaquant.nn.linear.unwatched", lambda _: False)  # which takes the CPU's tensors for the GPU's
    layer.scales = nn.Parameter(layer.scales.to("meta"), requires_grad=False)
    with pytest.raises(ShapeError, match=r"w_scales on device meta.*move it there"):
        layer(torch.ones(4, K, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="bias on device meta"):
        x, w = torch.randn(4, K), hq.quantize(torch.randn(N, K), format, backend="reference")
        hq.scaled_mm(hq.quantize(x, format, backend="reference"), w, torch.ones(N, device="meta"), torch.bfloat16)


def test_another_front_end_that_does_nothing_is_none(gpu, monkeypatch):
    monkeypatch.setattr("hadaquant.nn.linear.unwatched", lambda _: True)
    layer, wide = layer_of("int8", "regular:256"), torch.randn(4, 2 * K, dtype=torch.bfloat16)
    found = []
    monkeypatch.setattr("hadaquant.nn.linear.direct_linear", lambda x, front_end, *_: found.append(front_end))
    layer(wide[:, :K], hq.FrontEnd("none"))
    assert found == [NONE]


@pytest.mark.parametrize("spec", ["none", "sylvester:16", "regular:256", "matrix:64", "matrix:48"])
def test_verbs(gpu, spec):
    kind, _, group = spec.partition(":")
    side = int(group or 1)
    rotation = hq.Rotation("matrix", side, matrix=torch.eye(side)) if kind == "matrix" else spec
    x = torch.randn(5, 768, dtype=torch.bfloat16)
    hq.rotate(x, rotation)
    for format in ("int8", "nvfp4", "mxfp4"):
        before = len(gpu.launched)
        hq.quantize(x, format, rotation=rotation)
        hq.quantize(x, format, rotation=rotation, scale_layout="tiled" if format != "int8" else "linear")
        assert len(gpu.launched) >= before + 2


def test_a_kernel_is_compiled_once_for_all_arguments_of_a_kind(gpu):
    x = torch.randn(4, K, dtype=torch.bfloat16)

    def compiled(x):
        before = len(gpu.compiled)
        hq.rotate(x, "sylvester:16")
        return len(gpu.compiled) - before

    odd = torch.randn(4 * K + 1, dtype=torch.bfloat16)[1:].view(4, K)
    assert compiled(x) == 1 and compiled(x.clone()) == 0 and compiled(torch.cat([x, x])) == 0
    assert compiled(x.float()) == 1 and compiled(x.half()) == 1
    assert compiled(odd) == 1, "not on a 16-byte boundary"
    assert compiled(x[:1, :16]) == 1, "one unit"


def test_kinds():
    x = torch.zeros(32, dtype=torch.int8)
    assert runtime._kind(x) == runtime._kind(x[16:]) != runtime._kind(x[1:])
    assert runtime._kind(3) == runtime._kind(5) != runtime._kind(16)
    assert runtime._kind(1) not in (runtime._kind(3), runtime._kind(16))
    assert runtime._kind(16) == runtime._kind(32) != runtime._kind(2**31)
