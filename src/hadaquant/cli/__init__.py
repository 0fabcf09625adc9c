"""The command line. One file per command; this one registers them.

To add a command, write ``cli/<name>.py`` with a function and register it below.
"""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

import hadaquant
from hadaquant.cli import bench, evaluate, explain, inspect, quantize, study
from hadaquant.errors import HadaquantError


class _Commands(TyperGroup):
    """Commands in the order they are registered; a HadaquantError becomes one line and exit code 1."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HadaquantError as error:
            Console(stderr=True).print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hadaquant {hadaquant.__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Rotated low-bit linears: quantize checkpoints to INT8, NVFP4 or MXFP4, look into them, and measure
    whether a rotation helps.

    A model's linears compute y = x·Wᵀ = (x·R)(W·R)ᵀ: the weights are rotated and quantized here, once, the inputs
    while the model runs.

    Start with [bold]hadaquant quantize MODEL OUT --format int8 --rotation regular:256[/].
    """


app.command("quantize")(quantize.quantize)
app.command("inspect")(inspect.inspect)
app.command("explain")(explain.explain)
app.command("study")(study.study)
app.command("eval")(evaluate.eval_)
app.command("bench")(bench.bench)
