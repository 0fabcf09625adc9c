"""Does a rotation help? Measured: on tensors of known shape, and as the perplexity of a model."""

from hadaquant.study.cases import Case, all_cases, narrow_cases, wide_cases
from hadaquant.study.metrics import helps, quiet_error, relative_l2, sqnr_db
from hadaquant.study.perplexity import Comparison, Gain, Perplexity, perplexity
from hadaquant.study.rotations import random_orthogonal
from hadaquant.study.sweep import Row, compare, sweep

__all__ = [
    "Case",
    "Comparison",
    "Gain",
    "Perplexity",
    "Row",
    "all_cases",
    "compare",
    "helps",
    "narrow_cases",
    "perplexity",
    "quiet_error",
    "random_orthogonal",
    "relative_l2",
    "sqnr_db",
    "sweep",
    "wide_cases",
]
