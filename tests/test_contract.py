"""A layer's contract as bytes, and what a reader refuses."""

import pytest
import torch

from hadaquant.contract import Contract
from hadaquant.errors import LayerError
from hadaquant.formats import get_format
from hadaquant.rotation import Rotation, parse

CONTRACT = Contract.of(get_format("nvfp4"), parse("regular:256"), (48, 512))


def test_bytes_are_readable_and_stable():
    tensor = CONTRACT.to_tensor()
    assert tensor.dtype == torch.uint8
    assert bytes(tensor.tolist()).decode() == (
        '{"format":"nvfp4","format_version":1,"rotation":"regular:256","shape":[48,512],"signs":false,"version":1}'
    )
    assert Contract.from_tensor(tensor, "up") == CONTRACT
    assert Contract.from_dict(CONTRACT.to_dict(), "up") == CONTRACT


def test_signs_are_told():
    signed = Contract.of(get_format("int8"), Rotation("sylvester", 4, torch.ones(4)), (8, 8))
    assert signed.signs and Contract.from_tensor(signed.to_tensor(), "up") == signed


def test_full_activations_are_told_and_coded_ones_are_what_was_written_before():
    full = Contract.of(get_format("nvfp4"), parse("regular:256"), (48, 512), "full")
    assert Contract.from_tensor(full.to_tensor(), "up") == full != CONTRACT
    assert full.to_dict() == {**CONTRACT.to_dict(), "activations": "full"}
    with pytest.raises(LayerError, match="activations: stored 'full', expected 'coded'"):
        CONTRACT.check_same(full, "up")


@pytest.mark.parametrize(("change", "message"), [
    ({"version": 2}, r"layer 'up': its contract has version 2, this library reads 1; upgrade"),
    ({"version": 2, "block": 8}, r"layer 'up': its contract has version 2"),
    ({"format_version": 2}, r"layer 'up': format 'nvfp4' has version 2, this library reads 1"),
    ({"format": "nvfp5"}, r"layer 'up': its format 'nvfp5' is unknown here \(known: int8"),
    ({"activations": "int8"}, r"layer 'up': its activations 'int8' are unknown here \(known: coded, full\); upgrade"),
    ({"colour": "red"}, r"layer 'up': its contract has fields .*colour"),
])  # fmt: skip
def test_c4_from_a_future_version(change, message):
    with pytest.raises(LayerError, match=message):
        Contract.from_dict({**CONTRACT.to_dict(), **change}, "up")


@pytest.mark.parametrize("fields", [None, [], "x", {}, {"format": "nvfp4"}])
def test_damaged(fields):
    with pytest.raises(LayerError, match="layer 'up': its contract has fields"):
        Contract.from_dict(fields, "up")


@pytest.mark.parametrize("tensor", [
    torch.zeros(0, dtype=torch.uint8),
    torch.full((9,), 255, dtype=torch.uint8),
    torch.rand(8),
    CONTRACT.to_tensor()[:-3],
])  # fmt: skip
def test_not_json(tensor):
    with pytest.raises(LayerError, match="layer 'up'"):
        Contract.from_tensor(tensor, "up")


def test_every_difference_is_named():
    other = Contract.of(get_format("int8"), Rotation("regular", 64, torch.ones(64)), (48, 256))
    with pytest.raises(LayerError) as caught:
        CONTRACT.check_same(other, "up")
    text = str(caught.value)
    assert text.startswith("layer 'up': ") and text.endswith("convert with the stored format and rotation")
    for part in (
        "format: stored 'int8', expected 'nvfp4'",
        "rotation: stored 'regular:64', expected 'regular:256'",
        "signs: stored True, expected False",
        "shape: stored [48, 256], expected [48, 512]",
    ):
        assert part in text
    CONTRACT.check_same(CONTRACT, "up")
