"""Shapes and byte counts of every format, and what a name means."""

import pytest
import torch

import hadaquant as hq
from hadaquant.errors import BlockError, UnknownChoice
from hadaquant.formats import FORMATS, get_format


def test_the_five_formats():
    assert sorted(FORMATS) == ["int8", "mxfp4", "mxfp4-ceil", "mxfp4-even", "nvfp4"]
    assert {f.name: f.block for f in FORMATS.values()} == {
        "int8": None,
        "mxfp4": 32,
        "mxfp4-ceil": 32,
        "mxfp4-even": 32,
        "nvfp4": 16,
    }
    assert [f.name for f in FORMATS.values() if f.has_global_scale] == ["nvfp4"]
    assert all(str(f) == name and f.version == 1 for name, f in FORMATS.items())


def test_get_format():
    f = get_format("nvfp4")
    assert get_format(f) is f
    with pytest.raises(UnknownChoice, match=r"unknown format 'fp3'.*int8, mxfp4, mxfp4-ceil, mxfp4-even, nvfp4"):
        get_format("fp3")


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("shape", [(32,), (1, 64), (5, 96), (2, 3, 128), (0, 32), (200, 256)])
def test_shapes_and_bytes_are_those_of_the_tensors(name, shape):
    f, q = FORMATS[name], hq.quantize(torch.randn(shape), name)
    assert q.codes.shape == f.codes_shape(shape) and q.codes.dtype == f.element.codes_dtype
    assert q.scales.shape == f.scales_shape(shape) and q.scales.dtype == f.scale.dtype
    assert q.shape == shape
    assert q.nbytes == f.nbytes(shape)


def test_a1_bytes_a_value():
    assert FORMATS["nvfp4"].nbytes((1024, 1024)) == 0.5625 * 1024**2 + 4
    assert FORMATS["mxfp4"].nbytes((1024, 1024)) == (0.5 + 1 / 32) * 1024**2
    assert FORMATS["int8"].nbytes((1024, 1024)) == 1024**2 + 4 * 1024


@pytest.mark.parametrize(("name", "shape", "tiled"), [
    ("nvfp4", (1, 16), (128, 4)),
    ("nvfp4", (129, 80), (256, 8)),
    ("mxfp4", (2, 64, 160), (128, 8)),
    ("mxfp4", (0, 32), (0, 4)),
])  # fmt: skip
def test_tiled_scales_are_padded(name, shape, tiled):
    assert FORMATS[name].scales_shape(shape, "tiled") == tiled
    assert hq.quantize(torch.randn(shape), name, scale_layout="tiled").scales.shape == tiled


@pytest.mark.parametrize(("name", "k"), [("nvfp4", 8), ("nvfp4", 17), ("mxfp4", 16), ("mxfp4-even", 48), ("nvfp4", 1)])
def test_s7_k_that_the_block_does_not_divide(name, k):
    block = FORMATS[name].block
    with pytest.raises(BlockError, match=rf"K={k} is not a positive multiple of {block}.*{name}.*pad K"):
        hq.quantize(torch.ones(2, k), name)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_k_zero(name):
    with pytest.raises(BlockError, match="K=0"):
        hq.quantize(torch.ones(2, 0), name)


def test_unknown_scale_layout():
    with pytest.raises(UnknownChoice, match=r"scale_layout of format 'nvfp4' 'zigzag'.*linear, tiled"):
        hq.quantize(torch.ones(2, 16), "nvfp4", scale_layout="zigzag")
    with pytest.raises(UnknownChoice, match=r"scale_layout of format 'int8' 'tiled'.*linear"):
        hq.quantize(torch.ones(2, 16), "int8", scale_layout="tiled")


def test_repr_says_what_a_format_is_made_of():
    assert repr(get_format("nvfp4")) == "Format(nvfp4: e2m1, e4m3_global, block 16)"
    assert repr(get_format("int8")) == "Format(int8: int8, absmax, block the whole row)"
    assert all("0x" not in repr(f) for f in FORMATS.values())
