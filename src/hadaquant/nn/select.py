"""Which layers a name pattern means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from hadaquant.errors import ExpressionError, PatternError

#: Skipped unless told otherwise: an output head is often tied to the embedding and always sensitive.
DEFAULT_SKIP = ("lm_head",)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means a layer.

    A pattern is a run of whole dotted parts anywhere in the name, each of which may hold ``*``;
    ``re:`` starts a regular expression for the whole name.

    >>> matches("layers.1.", "model.layers.10.mlp.up"), matches("layers.1.", "model.layers.1.mlp.up")
    (False, True)
    >>> matches("layers.*.mlp", "model.layers.10.mlp.up"), matches("re:.*up", "model.layers.10.mlp.up")
    (True, True)
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    wanted, parts = pattern.strip(".").split("."), name.split(".")
    runs = (parts[i : i + len(wanted)] for i in range(len(parts) - len(wanted) + 1))
    return any(all(fnmatchcase(part, want) for part, want in zip(run, wanted, strict=True)) for run in runs)


def skipped_by(name: str, skip: Iterable[str]) -> str | None:
    """The first pattern that means the name, or None."""
    return next((pattern for pattern in skip if matches(pattern, name)), None)


def _check_expression(pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ExpressionError(pattern=pattern, why=error) from None


def check_patterns(skip: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a pattern that means no layer: a typo would quantize what was to be kept.

    The default patterns may mean none.

    Raises:
        PatternError: nothing matches.
        ExpressionError: ``re:`` is followed by no regular expression.
    """
    names = list(names)
    for pattern in skip:
        _check_expression(pattern)
        if pattern not in DEFAULT_SKIP and not any(matches(pattern, name) for name in names):
            shown = ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
            raise PatternError(pattern=pattern, layers=shown or "none")
