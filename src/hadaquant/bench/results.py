"""What was recorded, as ratios."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hadaquant.bench.cases import OPS, Case, Op
from hadaquant.errors import CheckpointError

#: Where and with what a row was measured.
REVISION = ", revision "
WHERE = "{gpu}, torch {torch}, Triton {triton}, {date}" + REVISION + "{git}"


@dataclass
class Result:
    """What one race gave: milliseconds of each variant, and microseconds of its cost on the host."""

    case: Case
    timing: str
    run: str
    where: str
    bytes: int | None
    flops: int | None
    ms: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)

    @property
    def op(self) -> Op:
        """The measured op."""
        return OPS[self.case.op]

    def ratio(self, variant: str = "ours", against: str | None = None) -> float | None:
        """The time of another variant, by default the op's reference, over this one's; None if either is missing."""
        mine, others = self.ms.get(variant), self.ms.get(against or self.op.reference)
        return None if mine is None or others is None else others / mine


def results(rows: Iterable[dict]) -> list[Result]:
    """Rows as recorded, gathered by run, case and timing."""
    found: dict[tuple[str, Case, str], Result] = {}
    for row in rows:
        case = Case(
            op=row["op"],
            shape=tuple(row["shape"]),
            format=row["format"],
            rotation=row["rotation"],
            front_end=row.get("front_end"),
        )
        new = Result(case, row["timing"], row["run"], WHERE.format(**row), row["bytes"], row["flops"])
        result = found.setdefault((row["run"], case, row["timing"]), new)
        result.ms[row["variant"]] = row["ms"]
        if row["host_us"] is not None:
            result.host_us[row["variant"]] = row["host_us"]
    return list(found.values())


def places(found: Iterable[Result]) -> list[str]:
    """The machines and versions of some results, each once, with all their revisions."""
    revisions: dict[str, dict[str, None]] = {}
    for result in found:
        place, _, revision = result.where.rpartition(REVISION)
        revisions.setdefault(place, {})[revision] = None
    return [f"{place}{REVISION}{', '.join(each)}" for place, each in revisions.items()]


def latest(found: Iterable[Result]) -> list[Result]:
    """The newest result of each case and timing, by op, in the order in which they were first measured."""
    newest = {(result.case, result.timing): result for result in found}
    order = list(OPS)
    return sorted(newest.values(), key=lambda result: order.index(result.case.op))


def read(path: Path) -> list[Result]:
    """All results of a file.

    Raises:
        CheckpointError: there is no such file, or it holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return results(json.loads(line) for line in lines if line.strip())
    except OSError as error:
        rule = error.strerror or str(error)
        raise CheckpointError(path=path, rule=rule, fix="give a file that hadaquant bench wrote") from error
    except (ValueError, KeyError, TypeError) as error:
        rule = f"it holds a line that is no measurement ({error})"
        raise CheckpointError(path=path, rule=rule, fix="give a file that hadaquant bench wrote") from error
