"""RotatedLinear: copies, files, what loading refuses, and the weight as others see it."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from samples import DTYPES, MATRIX, SIGNED, all_equal, make, parts
from torch import nn

import hadaquant as hq
from hadaquant.errors import LayerError, ShapeError
from hadaquant.formats import FORMATS

formats = pytest.mark.parametrize("name", sorted(FORMATS))
rotations = pytest.mark.parametrize("rotation", ["none", "sylvester:32", "regular:64", SIGNED, MATRIX], ids=str)


# ---- copies and files ---------------------------------------------------------------------------


@formats
@rotations
def test_a9_copies_and_files(name, rotation):
    layer = make(name, rotation, input_global_scale=0.01 if name == "nvfp4" else None)
    x = torch.randn(3, 128)
    y = layer(x)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    how: dict[str, Any] = {"input_global_scale": 1.0} if name == "nvfp4" else {}
    for load in ({}, {"assign": True}):
        loaded = hq.RotatedLinear(128, 48, name, rotation, **how)
        loaded.load_state_dict(state, strict=True, **load)
        assert torch.equal(loaded(x), y)
    whole = io.BytesIO()
    torch.save(layer, whole)
    whole.seek(0)
    for again in (
        copy.deepcopy(layer),
        copy.copy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(whole, weights_only=False),
    ):
        assert torch.equal(again(x), y) and all_equal(parts(again), parts(layer))
        assert again.format == layer.format and again.rotation == layer.rotation


def model_of(*layers: nn.Module) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(layers)})


@pytest.mark.parametrize(("other", "difference"), [
    (("int8", "regular:16"), "rotation: stored 'regular:64', expected 'regular:16'"),
    (("int8", "sylvester:64"), "rotation: stored 'regular:64', expected 'sylvester:64'"),
    (("int8", SIGNED), "signs: stored False, expected True"),
    (("nvfp4", "regular:64"), "format: stored 'int8', expected 'nvfp4'"),
    (("mxfp4-even", "regular:64"), "format: stored 'int8', expected 'mxfp4-even'"),
])  # fmt: skip
@pytest.mark.parametrize("strict", [True, False])
def test_a9_c4_another_format_or_rotation_is_refused(other, difference, strict):
    state = model_of(make("int8"), make("int8")).state_dict()
    target = model_of(make("int8"), make(*other))
    with pytest.raises(LayerError) as caught:
        target.load_state_dict(state, strict=strict)
    assert "layer 'blocks.1'" in str(caught.value) and difference in str(caught.value)


def test_c4_another_shape_or_version_is_refused():
    with pytest.raises(LayerError, match=r"layer 'RotatedLinear': shape: stored \[48, 128\], expected \[48, 256\]"):
        make("int8", k=256).load_state_dict(make("int8").state_dict())
    state = make("int8").state_dict()
    text = bytes(state["contract"].tolist()).replace(b'"version":1', b'"version":2')
    state["contract"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    with pytest.raises(LayerError, match="version 2, this library reads 1"):
        make("int8").load_state_dict(state)


@pytest.mark.parametrize("strict", [True, False])
def test_c4_codes_without_their_contract_are_refused(strict):
    state = {f"up.{key}": t for key, t in make("int8").state_dict().items() if key != "contract"}
    with pytest.raises(LayerError, match="layer 'up': its codes come without the contract"):
        nn.ModuleDict({"up": make("int8")}).load_state_dict(state, strict=strict)


def test_c4_a_plain_weight_is_not_a_rotated_one():
    with pytest.raises(RuntimeError, match=r"Missing key.*contract"):
        make("int8").load_state_dict(nn.Linear(128, 48).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        nn.Linear(128, 48).load_state_dict(make("int8").state_dict())


@pytest.mark.parametrize("key", ["scales", "codes"])
def test_scales_and_codes_of_another_dtype_are_refused(key):
    state = make("int8").state_dict()
    state[key] = state[key].to(torch.bfloat16)
    with pytest.raises(LayerError, match=rf"layer 'RotatedLinear': {key} is stored as torch.bfloat16, not torch"):
        make("int8").load_state_dict(state)
    state = make("int8").state_dict()
    state["bias"] = state["bias"].to(torch.bfloat16)
    make("int8").load_state_dict(state)


@pytest.mark.parametrize("key", ["global_scale", "input_global_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_n22_implausible_global_scales_are_refused_by_name(key, value):
    layer = make("nvfp4", input_global_scale=0.01)
    state = layer.state_dict()
    state[key] = torch.tensor(value)
    with pytest.raises(LayerError, match=rf"layer 'up': {key} is {value}, not a positive finite number"):
        nn.ModuleDict({"up": layer}).load_state_dict({f"up.{k}": t for k, t in state.items()})


# ---- the weight, as others see it ---------------------------------------------------------------


@formats
@rotations
def test_a10_dequantize_change_and_set_again(name, rotation):
    layer = make(name, rotation)
    w = nn.Linear(128, 48)
    layer.set_weight(w.weight)
    restored = layer.dequantized_weight()
    assert restored.shape == (48, 128) and restored.dtype == torch.float32
    assert (restored - w.weight).norm() < (0.01 if name == "int8" else 0.16) * w.weight.norm()
    changed = restored + torch.randn(48, 4) @ torch.randn(4, 128) * 0.05
    before = {id(p) for p in layer.parameters()}
    layer.set_weight(changed)
    assert {id(p) for p in layer.parameters()} == before and layer.format.name == name
    expected = hq.quantize(changed, name, rotation=layer.rotation)
    assert torch.equal(layer.codes, expected.codes) and torch.equal(layer.scales, expected.scales)
    assert torch.equal(layer.dequantized_weight(), expected.dequantize())
    with pytest.raises(ShapeError, match=r"weight has shape \(128, 48\), but \(48, 128\)"):
        layer.set_weight(changed.t())


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_reads_as_the_dequantized_one(dtype):
    layer = make("int8").to(dtype)
    w, plain = layer.weight, layer.dequantized_weight().to(dtype)
    assert w.shape == (48, 128) and w.dtype == dtype and w.device.type == "cpu" and not w.requires_grad
    assert torch.equal(w + 0, plain) and torch.equal(w.t(), plain.t()) and torch.equal(w[3], plain[3])
    x = torch.randn(2, 128).to(dtype)
    assert torch.equal(nn.functional.linear(x, w, layer.bias), nn.functional.linear(x, plain, layer.bias))
    assert torch.equal(torch.empty(48, 128, dtype=dtype).copy_(w), plain)
    assert torch.equal(torch.stack([w, w]), torch.stack([plain, plain]))
    assert "dequantized weight of RotatedLinear" in repr(w)


def test_weight_cannot_be_written():
    layer = make("int8")
    out: Any = layer.weight
    for write in (
        lambda: layer.weight.add_(1),
        lambda: layer.weight.copy_(torch.zeros(48, 128)),
        lambda: torch.zero_(layer.weight),
        lambda: torch.add(torch.ones(48, 128), 1, out=out),
    ):
        with pytest.raises(
            LayerError, match=r"RotatedLinear\(in_features=128.*cannot be changed in place; use set_weight"
        ):
            write()
    with pytest.raises((AttributeError, KeyError)):
        layer.weight = nn.Parameter(torch.zeros(48, 128))  # type: ignore[misc]
