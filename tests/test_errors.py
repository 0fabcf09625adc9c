"""Every error says what was found, by which rule, and what to do."""

import pickle

import pytest

from hadaquant import errors
from hadaquant.errors import HadaquantError

CLASSES = [
    c
    for c in vars(errors).values()
    if isinstance(c, type) and issubclass(c, HadaquantError) and c is not HadaquantError
]

#: Keyword arguments of every class, and what its message must hold: value, rule, fix.
EXAMPLES = {
    "UnknownChoice": (
        {"what": "format", "value": "fp3", "choices": "int8, nvfp4"},
        ("'fp3'", "unknown format", "choose one of int8, nvfp4"),
    ),
    "RotationError": (
        {"value": "'regular:8'", "rule": "a power of four", "fix": "use 16"},
        ("regular:8", "a power of four", "use 16"),
    ),
    "FrontEndError": (
        {"value": "'rms_norm'", "rule": "eps is 0", "fix": "give 1e-6"},
        ("rms_norm", "eps is 0", "give 1e-6"),
    ),
    "GroupError": (
        {"k": 96, "group": 64, "rotation": "sylvester:64", "suggestion": " (32)"},
        ("K=96", "not a multiple of the group 64", "use a group that divides K (32), or"),
    ),
    "BlockError": ({"k": 24, "block": 16, "format": "nvfp4"}, ("K=24", "multiple of 16", "pad K")),
    "ShapeError": (
        {"what": "x", "found": (3,), "expected": (4,), "fix": "reshape"},
        ("(3,)", "(4,) is needed", "reshape"),
    ),
    "DtypeError": (
        {"what": "x", "found": "int8", "expected": "float32", "fix": "convert"},
        ("int8", "float32 is needed", "convert"),
    ),
    "MismatchError": (
        {"what": "x's format", "found": "int8", "expected": "nvfp4"},
        ("int8", "nvfp4 is needed", "quantize x and w in the same way"),
    ),
    "GlobalScaleError": (
        {"value": 0, "rule": "must be positive", "fix": "leave it out"},
        ("0", "must be positive", "leave it out"),
    ),
    "AccumulatorError": ({"k": 200000, "limit": 133144, "term": "127²"}, ("K=200000", "exceeds 133144", "split K")),
    "BackendError": (
        {"what": "quantize", "reasons": "triton: no GPU; reference: available, ask for it"},
        ("quantize", "no GPU", "ask for it"),
    ),
    "AlreadyQuantized": (
        {"name": "up", "found": "int8"},
        ("up", "already quantized", "quantize the high-precision original"),
    ),
    "ExpressionError": (
        {"pattern": "re:[", "why": "unterminated character set at position 0"},
        ("'re:['", "unterminated character set", "leave re: out"),
    ),
    "PatternError": ({"pattern": "uo", "layers": "up, down"}, ("'uo'", "matches no layer", "the layers are up, down")),
    "LayerError": ({"layer": "up", "rule": "no weight", "fix": "skip it"}, ("'up'", "no weight", "skip it")),
    "CheckpointError": (
        {"path": "a.json", "rule": "not JSON", "fix": "write it again"},
        ("a.json", "not JSON", "write it again"),
    ),
    "PredictionError": (
        {"model": "out/int8", "wrong": 3, "predicted": 511, "window": 2, "why": "up holds NaN or Inf"},
        ("out/int8", "3 of the 511 tokens of window 2", "up holds NaN or Inf"),
    ),
    "PlanError": (
        {"plan": "plan.json", "rule": "is for another model", "fix": "study this one"},
        ("plan.json", "is for another model", "study this one"),
    ),
    "MissingExtra": (
        {"what": "a plot", "package": "matplotlib", "extra": "report"},
        ("a plot", "'matplotlib', which is not installed", "pip install 'hadaquant[report]'"),
    ),
}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_message_has_value_rule_and_fix(cls):
    fields, parts = EXAMPLES[cls.__name__]
    error = cls(**fields)
    assert error.fields == fields
    assert all(part in str(error) for part in parts)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls and str(again) == str(error) and again.fields == fields


def test_a_missing_package_is_an_import_error():
    with pytest.raises(ImportError):
        raise errors.MissingExtra(what="a plot", package="matplotlib", extra="report")


def test_one_class_catches_all():
    assert issubclass(HadaquantError, ValueError) and all(c.__doc__ for c in CLASSES)
    assert str(HadaquantError(message="as it is")) == "as it is"
