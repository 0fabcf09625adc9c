"""hadaquant study: does a rotation help? Of a model layer by layer, or of known tensors."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import hadaquant
from hadaquant.cli.output import check_output, console, log_progress, print_table
from hadaquant.errors import MissingExtra, UnknownChoice
from hadaquant.nn.select import DEFAULT_SKIP
from hadaquant.study.cases import Case, all_cases
from hadaquant.study.conduct import FORMATS, ROTATIONS, Answer, Question, conduct
from hadaquant.study.metrics import MARGIN_DB
from hadaquant.study.page import quantize_command, write_report
from hadaquant.study.report import SHARED, counted, error_table, trial_table, verdict_table, write_json
from hadaquant.study.sweep import STUDY_FORMATS, sweep


def study(
    model: Path | None = typer.Argument(None, help="A folder of a language model. Left out: tensors of known shape."),
    calibration: Path | None = typer.Option(None, help="UTF-8 text whose inputs the layers are measured on."),
    text: Path | None = typer.Option(None, help="Another text, to test the verdict on by perplexity."),
    out: Path | None = typer.Option(None, help="The study's folder, MODEL-study if left out. A killed run goes on."),
    formats: str | None = typer.Option(None, help=f"Comma-separated. For a model, by default, {', '.join(FORMATS)}."),
    rotations: str | None = typer.Option(
        None,
        help=f"Comma-separated. For a model, by default, {', '.join(ROTATIONS)}. random:G has random signs, "
        "matrix:G is a random orthogonal matrix.",
    ),
    bits: float | None = typer.Option(
        None, help="The plan's limit: bits a weight, on average over the linears studied, scales included."
    ),
    target_db: float | None = typer.Option(None, help="The plan's aim: signal over the layers' mean noise."),
    tokens: int | None = typer.Option(None, min=2, help="Use only the first tokens of --text."),
    windows: int = typer.Option(16, min=1, help="Windows of the calibration text, spread over it."),
    window: int = typer.Option(512, min=2, help="Tokens a window."),
    rows: int = typer.Option(256, min=2, help="Inputs of each layer that are kept and measured on."),
    layers: list[str] = typer.Option(
        [], metavar="PATTERN", help="Study only these, written as for --skip; may be repeated."
    ),
    skip: list[str] = typer.Option(
        list(DEFAULT_SKIP),
        metavar="PATTERN",
        help="Leave these: whole dotted parts of a name such as layers.0 or mlp.*, or re:REGEX, which must match the "
        "whole name. May be repeated; replaces the default.",
    ),
    device: str = typer.Option("cpu", help="cpu, cuda, cuda:1 …"),
    case: list[str] | None = typer.Option(None, help="Without MODEL: only this tensor; may be repeated."),
    json: Path | None = typer.Option(None, help="Without MODEL: write the rows to this file too."),
) -> None:
    """Measure whether a rotation helps: of each layer of a model and of the model, or of tensors of known shape.

    Writes plan.json, which quantize --plan obeys, report.html, and the figures behind them.

    Example: hadaquant study MODEL --calibration prose.txt --text news.txt --bits 4.6
    """
    if model is None:
        _study_cases(case, _split(formats), _split(rotations), json)
        return
    if calibration is None:
        raise typer.BadParameter("a model is studied on a text: give --calibration")
    if bits is not None and target_db is not None:
        raise typer.BadParameter("--bits and --target-db are two ways to ask: give one")
    question = Question(
        model=model,
        calibration=calibration,
        out=Path(f"{model.resolve().name}-study") if out is None else out,
        text=text,
        tokens=tokens,
        formats=_split(formats) or FORMATS,
        rotations=_split(rotations) or ROTATIONS,
        bits=bits,
        target_db=target_db,
        windows=windows,
        window=window,
        rows=rows,
        skip=skip,
        only=layers,
        device=device,
    )
    check_output(question.out, folder=True)
    answer = _conduct(question)
    _show(answer, question)
    try:
        page = write_report(answer, question.out, shlex.join(("hadaquant", *sys.argv[1:])))
    except MissingExtra as error:
        console(stderr=True).print(f"warning: there is no report.html: {error}", style="yellow", soft_wrap=True)
    else:
        console().print(f"Report: {page}", soft_wrap=True)


def _conduct(question: Question) -> Answer:
    errors = console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None)

        log = log_progress(errors)

        def tell(what: str) -> None:
            if not errors.is_terminal:
                errors.print(what, soft_wrap=True)
            bar.update(task, description=what, completed=0, total=None)

        def progress(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)
            log(name, done, total)

        return conduct(question, progress, tell)


def _show(answer: Answer, question: Question) -> None:
    tables = [verdict_table(answer.verdicts, answer.outcome)]
    if answer.trials:
        tables.append(trial_table(answer.trials, str(answer.text)))
    for table in tables:
        print_table(table, keys=2)
    out = Console(highlight=False)
    for name, reason in ((r.name, r.skipped) for r in answer.results if r.skipped):
        out.print(f"[yellow]not measured: {escape(name)}: {escape(reason)}[/]", soft_wrap=True)
    used = answer.settings
    on = f"Measured on {counted(used.windows, 'window')} of {used.window} tokens of {used.calibration}"
    if used.windows < question.windows:
        on += f", all that it holds of the {question.windows:,} asked for"
    out.print(escape(on), soft_wrap=True)
    chosen = answer.selection
    out.print(f"Plan: {chosen.bits:.3f} bits a weight, {chosen.db:.1f} dB, over {answer.scope}", soft_wrap=True)
    out.print(SHARED, soft_wrap=True)
    out.print(f"Quantize so: {escape(quantize_command(answer, question.out))}", soft_wrap=True)
    for verdict in answer.verdicts:
        out.print(f"{verdict.format}: {escape(answer.evidence(verdict))}.", soft_wrap=True)
    out.print(f"[bold]Does the rotation help? {escape(answer.sentence)}[/]", soft_wrap=True)


def _split(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _study_cases(case: list[str] | None, formats: list[str], rotations: list[str], json: Path | None) -> None:
    check_output(json)
    cases = _chosen(case)
    rows = sweep(cases, formats or STUDY_FORMATS, rotations or None)
    table = error_table(rows, cases)
    print_table(table, keys=2)
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
