"""What hadaquant bench chooses to measure."""

import re

import pytest

from hadaquant.bench import OPS, SUITES, Case, choose
from hadaquant.bench.runner import CONTESTS
from hadaquant.errors import ShapeError, UnknownChoice
from hadaquant.formats import get_format
from hadaquant.front import KINDS
from hadaquant.rotation import parse


def test_every_case_can_exist():
    for case in dict.fromkeys(case for suite in SUITES.values() for case in suite):
        k = case.shape[-1]
        get_format(case.format).check_k(k)
        parse(case.rotation).check_k(k)
        assert len(case.shape) == len(OPS[case.op].axes.split("×"))
        assert (case.op == "front_end") == (case.front_end in KINDS)


def test_no_case_twice():
    for suite in SUITES.values():
        assert len(set(suite)) == len(suite)


def test_every_op_has_a_contest():
    assert list(CONTESTS) and set(CONTESTS) == set(OPS)


def test_choose_by_op_and_format():
    assert {case.op for case in choose("int8", ["gemm", "linear"])} == {"gemm", "linear"}
    assert {case.format for case in choose("fp4", formats=["mxfp4"])} == {"mxfp4"}
    assert choose("quick") == list(SUITES["quick"])


def test_shapes_take_the_place_of_the_suites():
    chosen = choose("int8", ["gemm", "rotate_quantize"], shapes=[(5, 6, 64), (7, 1024)])
    assert Case(op="gemm", shape=(5, 6, 64), rotation="none") in chosen
    assert {case.shape for case in chosen} == {(5, 6, 64), (7, 1024)}
    assert {case.rotation for case in chosen if case.op == "rotate_quantize"} >= {"regular:256", "sylvester:32"}


def test_a_shape_is_measured_where_it_fits():
    chosen = choose("int8", ["rotate_quantize"], shapes=[(4, 64)])
    assert {case.rotation for case in chosen} == {"regular:16", "regular:64", "sylvester:32"}


def test_a_shape_that_fits_nothing_is_refused():
    words = (
        "--shapes has shape 3x3, but M × K with K a multiple of 256 (rotate_quantize int8 regular:256) or "
        "M × N × K (gemm) or M × N × K (linear) is needed; give another shape"
    )
    with pytest.raises(ShapeError, match=re.escape(words)):
        choose("cpu", shapes=[(4, 256), (3, 3)])
    with pytest.raises(ShapeError, match=r"but M × N × K \(gemm\) is needed"):
        choose("cpu", ["gemm"], shapes=[(3, 3)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("int4",), "unknown suite 'int4': choose one of int8"),
        (("int8", ["matmul"]), "unknown op 'matmul': choose one of linear, gemm"),
        (("int8", [], ["fp6"]), "unknown format 'fp6'"),
        (("fp4", ["block"]), "unknown part of suite 'fp4' 'block'"),
    ],
)
def test_unknown_choices(arguments, words):
    with pytest.raises(UnknownChoice, match=words):
        choose(*arguments)
