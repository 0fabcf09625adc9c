"""Layers whose activations stay full: weights alone are quantized."""

import copy

import pytest
import torch
from samples import DTYPES, MATRIX, SIGNED, make
from torch import nn

import hadaquant as hq
from hadaquant import front, reference
from hadaquant.contract import Contract
from hadaquant.errors import DtypeError, GlobalScaleError, LayerError, ShapeError, UnknownChoice
from hadaquant.formats import FORMATS

formats = pytest.mark.parametrize("name", sorted(FORMATS))
rotations = pytest.mark.parametrize("rotation", ["none", "sylvester:32", "regular:64", SIGNED, MATRIX], ids=str)


def by_hand(layer: hq.RotatedLinear, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The layer in float64 from its own values: the rotated input rounded to bfloat16, the decoded weight."""
    h = hq.rotate(x, layer.rotation).to(torch.bfloat16).double()
    q = layer.quantized_weight()
    w = reference.decode(q.codes, q.scales, q.global_scale, q.format).double()
    y = h @ w.T
    return (y if layer.bias is None else y + layer.bias.double()).to(dtype)


@formats
@rotations
def test_output_is_that_of_rounded_inputs_and_decoded_weights(name, rotation):
    layer = make(name, rotation, activations="full")
    for shape in ((128,), (3, 128), (2, 3, 128), (0, 128), (2, 0, 128)):
        for dtype in DTYPES:
            x = torch.randn(shape).to(dtype)
            y, expected = layer(x), by_hand(layer, x, dtype)
            assert y.shape == (*shape[:-1], 48) and y.dtype == dtype
            assert torch.allclose(y, expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


@formats
def test_codes_are_those_of_a_coded_layer_and_the_inputs_error_is_gone(name):
    linear = nn.Linear(256, 64)
    full, coded = (hq.RotatedLinear.from_linear(linear, name, "regular:64", activations=a) for a in ("full", "coded"))
    assert torch.equal(full.codes, coded.codes) and torch.equal(full.scales, coded.scales)
    x = torch.randn(64, 256)
    ideal = x @ full.dequantized_weight().T + linear.bias
    full_error, coded_error = ((layer(x) - ideal).norm() / ideal.norm() for layer in (full, coded))
    assert full_error < 2.0**-8 and full_error < coded_error / 2


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_l4_every_row_is_independent_of_the_batch(name):
    layer = make(name, activations="full")
    x = torch.randn(9, 128)
    x[4, 3], x[5, 7] = torch.nan, torch.inf
    y = layer(x)
    assert y[4].isnan().all() and y[5].isnan().any()
    keep = torch.tensor([i not in (4, 5) for i in range(9)])
    assert y[keep].isfinite().all()


def test_front_ends_and_gradients():
    layer = make("nvfp4", activations="full")
    x, weight = torch.randn(5, 128), torch.rand(128)
    h = torch.ops.hadaquant.rotate_round(reference.front(x, front.rms_norm(weight)), "regular:64", None, None, "auto")
    q = layer.quantized_weight()
    args = (q.codes, q.scales, q.global_scale, layer.bias, "nvfp4", torch.float32, "auto")
    assert torch.equal(layer(x, front.rms_norm(weight)), torch.ops.hadaquant.weight_mm(h, *args))
    x.requires_grad_()
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.dequantized_weight().sum(0).expand(5, 128), atol=1e-4)


def test_autocast_and_compile():
    layer = make("nvfp4", activations="full")
    x = torch.randn(4, 128)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, layer(x.bfloat16()))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_b8_a_group_rotates_once_and_shares_only_one_kind_of_activations(monkeypatch):
    q, k = (make("nvfp4", n=n, activations="full") for n in (48, 16))
    x = torch.randn(3, 128)
    alone = q(x), k(x)
    calls = []
    original = hq.RotatedLinear._quantize_input
    monkeypatch.setattr(hq.RotatedLinear, "_quantize_input", lambda *a: calls.append(1) or original(*a))
    hq.share_input([q, k])
    assert all(torch.equal(a, b) for a, b in zip((q(x), k(x)), alone, strict=True)) and len(calls) == 1
    with pytest.raises(LayerError, match="members must be"):
        hq.share_input([make("nvfp4", activations="full"), make("nvfp4")])


def test_quantize_converts_a_model():
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32))
    before = copy.deepcopy(model)
    report = hq.quantize_(model, "nvfp4", "sylvester:16", activations="full")
    assert len(report.quantized) == 2 and all(m.activations == "full" for m in (model[0], model[2]))
    assert "activations=full" in repr(model) and "activations" not in repr(make("nvfp4"))
    x = torch.randn(16, 128)
    coded = copy.deepcopy(before)
    hq.quantize_(coded, "nvfp4", "sylvester:16")
    errors = [(m(x) - before(x)).norm() for m in (model, coded)]
    assert errors[0] < errors[1]


def test_a_state_dict_of_the_other_kind_is_refused():
    full, coded = make("nvfp4", activations="full"), make("nvfp4")
    full.load_state_dict(make("nvfp4", activations="full").state_dict())
    with pytest.raises(LayerError, match="activations: stored 'coded', expected 'full'"):
        full.load_state_dict(coded.state_dict())
    with pytest.raises(LayerError, match="activations: stored 'full', expected 'coded'"):
        coded.load_state_dict(full.state_dict())
    assert b"activations" not in bytes(coded.contract.tolist())
    assert Contract.from_tensor(full.contract, "up").activations == "full"


def test_bad_choices():
    with pytest.raises(UnknownChoice, match="unknown activations 'bf16': choose one of coded, full"):
        make("nvfp4", activations="bf16")
    model = nn.Sequential(nn.Linear(64, 8))
    with pytest.raises(UnknownChoice, match="unknown activations"):
        hq.quantize_(model, "nvfp4", activations="16")
    assert type(model[0]) is nn.Linear
    with pytest.raises(GlobalScaleError, match="full activations are not scaled"):
        hq.RotatedLinear(64, 8, "nvfp4", activations="full", input_global_scale=1.0)


def test_the_ops_refuse_what_does_not_fit():
    q = hq.quantize(torch.randn(8, 64), "nvfp4")
    w = (q.codes, q.scales, q.global_scale)
    mm = torch.ops.hadaquant.weight_mm
    with pytest.raises(DtypeError, match=r"x has dtype torch\.float32"):
        mm(torch.randn(2, 64), *w, None, "nvfp4", torch.float32, "auto")
    with pytest.raises(ShapeError, match=r"x has shape \(2, 32\)"):
        mm(torch.randn(2, 32).bfloat16(), *w, None, "nvfp4", torch.float32, "auto")
    with pytest.raises(ShapeError, match="bias has shape"):
        mm(torch.randn(2, 64).bfloat16(), *w, torch.ones(9), "nvfp4", torch.float32, "auto")


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_the_order_in_which_a_kernel_reads_the_input_changes_nothing(name):
    x, w = torch.randn(3, 2, 256), hq.quantize(torch.randn(8, 256), name)
    rotated = (x, "regular:64", None, None, "auto", "none", None, None)
    h, turned = (torch.ops.hadaquant.rotate_round(*rotated, by_nibble) for by_nibble in (False, True))
    assert not torch.equal(h, turned)
    rest = (w.codes, w.scales, w.global_scale, None, name, torch.float32, "auto")
    y = torch.ops.hadaquant.weight_mm(h, *rest)
    assert torch.equal(torch.ops.hadaquant.weight_mm(turned, *rest, True), y)
    with pytest.raises(ShapeError, match="K a multiple of 128 by nibble"):
        torch.ops.hadaquant.rotate_round(x[..., :64], *rotated[1:], True)


@pytest.mark.parametrize("name", ["int8", "nvfp4", "mxfp4"])
def test_a4_opcheck(name):
    q = hq.quantize(torch.randn(8, 64), name)
    x = torch.randn(3, 64)
    torch.library.opcheck(torch.ops.hadaquant.rotate_round, (x, "regular:16", None, None, "auto"))
    args = (x.bfloat16(), q.codes, q.scales, q.global_scale, torch.randn(8), name, torch.bfloat16, "auto")
    torch.library.opcheck(torch.ops.hadaquant.weight_mm, args)
