"""QuantizedTensor: a container that knows its shape, size and meaning."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

import hadaquant as hq
from hadaquant.errors import DtypeError, GroupError, ShapeError
from hadaquant.formats import FORMATS


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("rotation", ["none", "sylvester:16", "regular:64"])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 128)])
def test_round_trip_in_the_original_basis(name, rotation, shape):
    x = torch.randn(shape)
    q = hq.quantize(x, name, rotation=rotation)
    restored = q.dequantize()
    assert q.shape == restored.shape == shape and restored.dtype == torch.float32
    assert (restored - x).norm() < (0.01 if name == "int8" else 0.16) * x.norm()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", [(128,), (5, 96), (3, 50, 160)])
def test_tiled_scales_decode_the_same(name, shape):
    x = torch.randn(shape)
    linear, tiled = (hq.quantize(x, name, rotation="sylvester:32", scale_layout=s) for s in ("linear", "tiled"))
    assert torch.equal(linear.codes, tiled.codes)
    assert torch.equal(linear.dequantize(), tiled.dequantize())


def test_to_another_device():
    signs = torch.tensor([1.0, -1.0] * 8)
    q = hq.quantize(torch.randn(4, 32), "nvfp4", rotation=hq.Rotation("sylvester", 16, signs))
    there = q.to("meta")
    assert there.device.type == "meta" and there.shape == q.shape
    assert all(t is not None and t.is_meta for t in (there.scales, there.global_scale, there.rotation.signs))
    assert there.dequantize().is_meta
    assert hq.quantize(torch.randn(4, 32), "int8").to("meta").global_scale is None


def test_frozen():
    q = hq.quantize(torch.randn(4, 32), "int8")
    with pytest.raises(FrozenInstanceError):
        q.codes = q.codes  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_s6_scales_that_do_not_belong_to_the_codes(name):
    q = hq.quantize(torch.randn(32, 32), name)
    right = q.scales
    for wrong in (right[:1], right[0], right[None], right[..., None], right.new_zeros(())):
        with pytest.raises(ShapeError, match=r"scales \(linear\) has shape"):
            replace(q, scales=wrong).dequantize()
    with pytest.raises(DtypeError, match=r"scales has dtype torch.float16"):
        replace(q, scales=right.to(torch.float16)).dequantize()
    with pytest.raises(DtypeError, match=r"codes has dtype torch.int32"):
        replace(q, codes=q.codes.to(torch.int32)).dequantize()
    with pytest.raises(GroupError):
        replace(q, rotation=hq.Rotation("sylvester", 64)).dequantize()


def test_codes_carry_no_gradient():
    x = torch.randn(4, 32, requires_grad=True)
    q = hq.quantize(x, "int8")
    assert not q.scales.requires_grad and not q.dequantize().requires_grad


def test_a_short_description():
    q = hq.quantize(torch.randn(4, 64), "nvfp4", rotation="sylvester:16")
    assert repr(q) == "QuantizedTensor(nvfp4, rotation=sylvester:16, shape=[4, 64], device=cpu, 148 bytes)"
    tiled = hq.quantize(torch.randn(4, 64), "mxfp4", scale_layout="tiled")
    assert str(tiled).endswith("device=cpu, 640 bytes, tiled scales)")
    layers = [hq.RotatedLinear(64, 8, "int8") for _ in range(2)]
    assert repr(hq.share_input(layers)) == "InputGroup(size=2)"
