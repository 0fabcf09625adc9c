"""Front ends through the ops: torch.library's own checks, compilation, and what the plan says."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import hadaquant as hq
from hadaquant import front
from hadaquant.formats import FORMATS, get_format
from hadaquant.ops.plan import plan_quantize
from hadaquant.ops.target import get_target
from hadaquant.rotation import Rotation, parse

ops = torch.ops.hadaquant
FRONT_ENDS = {
    "rms_norm": lambda x: front.rms_norm(torch.ones(64)),
    "rms_norm without weight": lambda x: front.rms_norm(None, 1e-5),
    "ada_norm": lambda x: front.ada_norm(torch.ones(5, 64), torch.ones(64)),
    "silu_mul": lambda x: front.silu_mul(x + 1),
    "gelu_tanh": lambda x: front.gelu_tanh(),
}
front_ends = pytest.mark.parametrize("make", FRONT_ENDS.values(), ids=FRONT_ENDS)


def global_scale(name: str) -> torch.Tensor | None:
    return torch.tensor(0.002) if FORMATS[name].has_global_scale else None


@front_ends
def test_a4_quantize_and_amax(make):
    for x in (torch.randn(5, 64), torch.randn(5, 2, 64, dtype=torch.bfloat16), torch.randn(5, 128)[:, :64]):
        fe = make(x)
        arguments = (fe.spec, fe.factor, fe.shift)
        opcheck(ops.amax, (x, "regular:16", None, None, "auto", *arguments))
        for name in ("int8", "nvfp4"):
            rotation = ("sylvester:8", None, None)
            opcheck(ops.quantize, (x, name, *rotation, global_scale(name), "linear", "auto", *arguments))


@front_ends
def test_a4_compiled_without_a_break(make):
    def verb(x: torch.Tensor) -> torch.Tensor:
        return hq.quantize(x, "nvfp4", rotation="sylvester:16", front_end=make(x)).dequantize()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(verb, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (2, 17, 33):
        x = torch.randn(5, tokens, 64)
        assert torch.equal(compiled(x), verb(x))
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_autocast_changes_nothing():
    x, fe = torch.randn(3, 64), front.rms_norm(torch.randn(64))
    expected = hq.quantize(x, "int8", front_end=fe)
    with torch.autocast("cpu", torch.bfloat16):
        ours = hq.quantize(x, "int8", front_end=fe)
    assert torch.equal(ours.codes, expected.codes) and torch.equal(ours.scales, expected.scales)


@pytest.mark.parametrize("kind", front.KINDS[1:])
def test_the_plan_names_the_front_end(kind):
    target, none = get_target("sm_100"), parse("none")
    blocks = plan_quantize(get_format("nvfp4"), none, target, front_end=kind)
    assert blocks.kernel == "quantize_blocks_front" and kind in blocks.reason
    walk = plan_quantize(get_format("nvfp4"), parse("sylvester:128"), target, front_end=kind)
    assert walk.kernel == "quantize_walk" and kind in walk.reason
    assert plan_quantize(get_format("int8"), none, target, front_end=kind).kernel == "quantize_rows"
    fast = plan_quantize(get_format("int8"), parse("regular:256"), target, front_end=kind)
    assert fast.kernel == "quantize_front_gluon"
    odd = Rotation("matrix", matrix=torch.eye(24))
    assert plan_quantize(get_format("int8"), odd, target, front_end=kind).kernel == "rotate+quantize_rows"
