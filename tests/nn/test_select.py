"""Which layers a pattern means."""

import pytest

from hadaquant.errors import ExpressionError, PatternError
from hadaquant.nn.select import DEFAULT_SKIP, check_patterns, matches, skipped_by

LAYERS = [f"model.layers.{i}.{part}" for i in range(20) for part in ("attn.q", "mlp.up")] + ["lm_head"]


@pytest.mark.parametrize(("pattern", "expected"), [
    ("layers.1.", ["model.layers.1.attn.q", "model.layers.1.mlp.up"]),
    ("layers.1", ["model.layers.1.attn.q", "model.layers.1.mlp.up"]),
    ("1.mlp", ["model.layers.1.mlp.up"]),
    ("layers.1?.mlp", [f"model.layers.{i}.mlp.up" for i in range(10, 20)]),
    ("layers.*.mlp", [f"model.layers.{i}.mlp.up" for i in range(20)]),
    ("up", [f"model.layers.{i}.mlp.up" for i in range(20)]),
    ("lm_head", ["lm_head"]),
    ("head", []),
    ("ayers.1", []),
    ("re:.*head", ["lm_head"]),
    ("re:head", []),
    (r"re:model\.layers\.(3|7)\..*up", ["model.layers.3.mlp.up", "model.layers.7.mlp.up"]),
    ("MODEL", []),
    ("", []),
])  # fmt: skip
def test_c8_no_surprise_matches(pattern, expected):
    assert [name for name in LAYERS if matches(pattern, name)] == expected


def test_first_pattern_that_means_the_name():
    assert skipped_by("lm_head", DEFAULT_SKIP) == "lm_head"
    assert skipped_by("a.b.c", ["x", "b", "c"]) == "b"
    assert skipped_by("a.b.c", []) is None


def test_c8_matching_nothing_is_an_error():
    check_patterns(["layers.1", *DEFAULT_SKIP], ["layers.1.up"])  # the default may mean none
    with pytest.raises(PatternError, match=r"pattern 'layers.99' matches no layer.*… \(41 in all\)"):
        check_patterns(["up", "layers.99"], LAYERS)
    with pytest.raises(PatternError, match="the layers are none"):
        check_patterns(["x"], [])


def test_an_expression_that_is_none_says_why():
    with pytest.raises(ExpressionError, match=r"pattern 're:\[\(': .* \(unterminated character set at position 0\)"):
        check_patterns(["re:[("], LAYERS)
