"""Plans under a limit, against every combination tried by hand."""

import itertools
import math

import pytest

from hadaquant.errors import PlanError
from hadaquant.study.budget import check_bits, select
from hadaquant.study.layers import Cell, LayerResult

BITS = {"mxfp4": 4.25, "nvfp4": 4.5, "int8": 8.0}


def layer(name, noise, shape=(64, 64), reads=None, rotated=()):
    """``noise``: by format; ``rotated``: (format, spec, noise)."""

    def cell(format, rotation, noise):
        db = -10 * math.log10(noise)
        others = {"quiet_db": db, "weights_db": db, "inputs_db": db}
        return Cell(format=format, rotation=rotation, asked=(rotation,), bits=BITS[format], db=db, **others)

    cells = [cell(format, "none", n) for format, n in noise.items()] + [cell(*r) for r in rotated]
    return LayerResult(name=name, shape=shape, reads=reads or name, rows=8, cells=tuple(cells))


LAYERS = [
    layer("a", {"mxfp4": 0.04, "nvfp4": 0.01, "int8": 0.0001}),
    layer("b", {"mxfp4": 0.30, "nvfp4": 0.20, "int8": 0.0002}, (64, 128)),
    layer("c", {"mxfp4": 0.02, "nvfp4": 0.015, "int8": 0.0001}),
    layer("d", {"mxfp4": 0.05, "nvfp4": 0.04, "int8": 0.0100}),
]


def combinations():
    """(bits a weight, sum of noise) of every choice."""
    weights = [math.prod(x.shape) for x in LAYERS]
    for cells in itertools.product(*(x.cells for x in LAYERS)):
        bits = sum(c.bits * w for c, w in zip(cells, weights, strict=True)) / sum(weights)
        yield bits, sum(c.noise for c in cells)


def noise_of(selection):
    return sum(cell.noise for cell in selection.cells.values())


@pytest.mark.parametrize("bits", [4.25, 4.4, 4.6, 5.5, 6.5, 7.9, 8.0])
def test_a_bit_budget_is_kept_and_well_spent(bits):
    found = select(LAYERS, bits=bits)
    assert found.bits <= bits
    least = min(noise for b, noise in combinations() if b <= bits + 1e-9)
    assert noise_of(found) <= 1.25 * least  # greedy: a step that does not fit may leave bits unspent
    assert found.db == pytest.approx(-10 * math.log10(noise_of(found) / 4))


def test_mixed_precision_falls_out():
    found = select(LAYERS, bits=6.0)
    # b loses most, and is worth eight bits first
    assert {name: cell.format for name, cell in found.cells.items()}["b"] == "int8"
    assert len({cell.format for cell in found.cells.values()}) > 1


def test_an_error_target_is_met_with_few_bits():
    for target in (10.0, 14.0, 18.0, 22.0, 25.0):
        found = select(LAYERS, target_db=target)
        assert found.db >= target
        fewest = min(b for b, noise in combinations() if noise <= 4 * 10 ** (-target / 10))
        assert found.bits <= fewest + 1.0


def test_without_a_limit_each_layer_errs_least():
    assert {cell.format for cell in select(LAYERS).cells.values()} == {"int8"}


def test_limits_that_cannot_be_met():
    with pytest.raises(PlanError, match=r"4\.2 bits a weight are too few: these formats need 4\.250"):
        select(LAYERS, bits=4.2)
    with pytest.raises(PlanError, match=r"60 dB are out of reach: the best is 25\.\d dB"):
        select(LAYERS, target_db=60)


def test_the_best_rotation_of_a_format_is_taken_if_it_pays():
    rotated = [("int8", "regular:64", 0.001), ("int8", "sylvester:64", 0.002), ("nvfp4", "regular:64", 0.0095)]
    found = select([layer("a", {"nvfp4": 0.01, "int8": 0.02}, rotated=rotated)])
    assert (found.cells["a"].format, found.cells["a"].rotation) == ("int8", "regular:64")
    # 0.2 dB are not worth a rotation
    assert select([layer("a", {"nvfp4": 0.01}, rotated=rotated[2:])]).cells["a"].rotation == "none"


def test_only_what_is_allowed():
    rotated = [("int8", "regular:64", 0.001), ("int8", "sylvester:64", 0.002)]
    layers = [layer("a", {"nvfp4": 0.01, "int8": 0.02}, rotated=rotated)]
    for allowed, expected in (
        ({"int8": ["sylvester:64"]}, ("int8", "sylvester:64")),
        ({"int8": ["none"]}, ("int8", "none")),
        ({"int8": None}, ("int8", "regular:64")),
        ({"nvfp4": None}, ("nvfp4", "none")),
    ):
        cell = select(layers, allowed=allowed).cells["a"]
        assert (cell.format, cell.rotation) == expected
    with pytest.raises(PlanError, match="no format of mxfp4 fits a"):
        select(layers, allowed={"mxfp4": None})


def test_a_matrix_has_no_place_in_a_plan():
    layers = [layer("a", {"int8": 0.02}, rotated=[("int8", "matrix:16", 0.001)])]
    assert select(layers).cells["a"].rotation == "none"


def test_layers_that_read_one_tensor_get_one_choice():
    q = layer("q", {"int8": 0.02}, rotated=[("int8", "regular:64", 0.001), ("int8", "sylvester:64", 0.010)])
    k = layer("k", {"int8": 0.02}, rotated=[("int8", "regular:64", 0.019), ("int8", "sylvester:64", 0.011)], reads="q")
    v = layer("v", {"int8": 0.02}, rotated=[("int8", "regular:64", 0.019), ("int8", "sylvester:64", 0.002)])
    found = select([q, k, v]).cells
    assert [found[name].rotation for name in "qkv"] == ["regular:64", "regular:64", "sylvester:64"]


def test_layers_that_were_not_measured_are_left_out():
    skipped = LayerResult(name="z", shape=(4, 4), reads="z", skipped="the text never calls it")
    assert set(select([*LAYERS, skipped]).cells) == {"a", "b", "c", "d"}


def test_bits_that_no_format_can_keep_are_known_from_the_shapes():
    shapes = [(64, 64), (64, 128)]
    for formats, least in ((["int8", "nvfp4", "mxfp4"], 4.25), (["int8"], 8 + 32 * 128 / (64 * 192))):
        check_bits(shapes, formats, least + 1e-9)
        with pytest.raises(PlanError, match=rf"too few: these formats need {least:.3f}; raise --bits"):
            check_bits(iter(shapes), formats, least - 0.01)
    # K = 48 has no blocks of 32, K = 24 none of 16
    with pytest.raises(PlanError, match=f"need {(4.25 * 64 * 64 + 4.5 * 64 * 48 + 32) / (64 * 112):.3f}"):
        check_bits([(64, 64), (64, 48)], ["nvfp4", "mxfp4"], 4.3)
    check_bits([(64, 64), (4, 24)], ["nvfp4", "mxfp4"], 4.25)  # what no format fits is no part of the plan
    check_bits([(4, 24)], ["nvfp4"], 1)
