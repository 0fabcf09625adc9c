"""hadaquant study: the quantization error of known tensors, plain and rotated."""

from __future__ import annotations

from pathlib import Path

import typer

import hadaquant
from hadaquant.errors import UnknownChoice
from hadaquant.study.cases import Case, all_cases
from hadaquant.study.metrics import MARGIN_DB
from hadaquant.study.report import console_for, error_table, write_json
from hadaquant.study.sweep import STUDY_FORMATS, sweep


def study(
    case: list[str] | None = typer.Option(None, help="Only this input; may be repeated."),
    format: list[str] | None = typer.Option(None, help="Only this format; may be repeated."),
    rotation: list[str] | None = typer.Option(
        None, help="This rotation instead of each input's own; may be repeated. matrix:G is a random orthogonal matrix."
    ),
    json: Path | None = typer.Option(None, help="Write the rows to this file too."),
) -> None:
    """Measure whether a rotation lowers the quantization error, on inputs drawn from stated seeds.

    Example: hadaquant study --format nvfp4 --case outlier-channels
    """
    cases = _chosen(case)
    rows = sweep(cases, format or STUDY_FORMATS, rotation)
    table = error_table(rows, cases)
    console_for(table).print(table)
    if json is not None:
        write_json(
            json,
            {
                "hadaquant": hadaquant.__version__,
                "margin_db": MARGIN_DB,
                "cases": {c.name: c.origin for c in cases},
                "rows": [row.to_dict() for row in rows],
            },
        )


def _chosen(names: list[str] | None) -> list[Case]:
    known = {case.name: case for case in all_cases()}
    for name in names or ():
        if name not in known:
            raise UnknownChoice(what="case", value=name, choices=", ".join(known))
    return [known[name] for name in names or known]
