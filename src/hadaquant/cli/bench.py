"""hadaquant bench: how fast, beside what one would use without it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import typer
from rich.console import Console

from hadaquant.bench import SUITES, choose, default_file, latest, read, run
from hadaquant.bench.cases import OPS
from hadaquant.bench.report import speed_tables
from hadaquant.bench.results import results
from hadaquant.cli.output import check_output, print_table
from hadaquant.errors import BackendError, ShapeError, UnknownChoice


def bench(
    suite: str | None = typer.Option(None, help=f"One of {', '.join(SUITES)}. By default int8, on a CPU cpu."),
    only: str = typer.Option("", "--only", "--ops", help=f"Only these ops, comma-separated, of: {', '.join(OPS)}."),
    formats: str = typer.Option("", help="Only these formats, comma-separated."),
    shapes: str = typer.Option("", help="These instead of the suite's, comma-separated, such as 4608x9216x3072."),
    variants: str = typer.Option("", help="Only these besides ours and what ratios are taken to, comma-separated."),
    rounds: int = typer.Option(5, min=1, help="Rounds in which the variants take turns."),
    seconds: float | None = typer.Option(None, help="Begin no further case after so many seconds."),
    skip: int = typer.Option(0, min=0, help="Leave out so many cases at the start."),
    device: str = typer.Option("cuda", help="cuda, cuda:1 …, or cpu."),
    out: Path | None = typer.Option(
        None, help=f"Append the times to this file. By default {default_file()}; on a CPU they are only shown."
    ),
    show: Path | None = typer.Option(None, help="Time nothing: show the newest times of this file."),
    plot: Path | None = typer.Option(None, help="Draw the times into this folder."),
) -> None:
    """Check that answers are right, then time them beside torch, a device copy, plain Triton and other libraries.

    An op whose answer is wrong is not timed, and the exit code is 1.

    Example: hadaquant bench --only linear --shapes 4608x9216x3072
    """
    logging.getLogger("hadaquant").setLevel(logging.ERROR)  # the checks ask for the slow reference, and know it
    check_output(plot, folder=True, parents=True)
    red: list[str] = []
    if show is not None:
        found = read(show)
    else:
        where = _device(device)
        cases = choose(
            suite or ("cpu" if where.type == "cpu" else "int8"), _list(only), _list(formats), _shapes(shapes)
        )
        out = out or (None if where.type == "cpu" else default_file())
        check_output(out, parents=True)
        log = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        outcome = run(
            cases[skip:],
            where,
            out=out,
            variants=_list(variants),
            rounds=rounds,
            seconds=seconds,
            tell=log.print,
        )
        found, red = results(outcome.rows), outcome.red
        if outcome.left:
            at = len(cases) - len(outcome.left)
            log.print(f"out of time, {len(outcome.left)} cases are left: go on with --skip {at}")
    for table in speed_tables(latest(found)):
        print_table(table, keys=4)
    if found:
        typer.echo("A ratio is the other's time over ours in the same race: above 1 ours is faster.")
    if plot is not None:
        from hadaquant.bench.plot import draw

        for path in draw(latest(found), plot):
            typer.echo(f"drawn: {path}")
    if red:
        typer.echo(f"wrong, so not timed: {len(red)}, see above", err=True)
        raise typer.Exit(1)


def _device(name: str) -> torch.device:
    kind, _, index = name.partition(":")
    if kind not in ("cuda", "cpu") or (index and not index.isdecimal()):
        raise UnknownChoice(what="device", value=name, choices="cuda, cuda:0, cuda:1 …, cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        needs = "it needs a CUDA GPU and Triton, and torch sees no GPU here; --device cpu times the CPU path instead"
        raise BackendError(what=f"the benchmark on {name}", reasons=needs)
    return device


def _list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _shapes(text: str) -> list[tuple[int, ...]]:
    found = []
    for word in _list(text):
        sizes = word.split("x")
        if not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ShapeError(what="a shape", found=repr(word), expected="sizes joined by x", fix="as in 4608x9216x3072")
        found.append(tuple(map(int, sizes)))
    return found
