"""hadaquant eval: perplexity of quantized models beside their source."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.markup import escape

import hadaquant
from hadaquant.cli.output import check_output, console, print_table
from hadaquant.study.models import (
    check_never_calibrated_on,
    check_sources,
    evaluate_all,
    with_gains,
    with_sources,
)
from hadaquant.study.perplexity import read_tokens
from hadaquant.study.report import counted, perplexity_table, write_json


def eval_(
    folders: list[Path] = typer.Argument(metavar="DIR", help="Folders of language models, quantized or plain."),
    text: Path = typer.Option(help="UTF-8 text. Never one that was calibrated on."),
    source: Path | None = typer.Option(None, help="The unquantized model, instead of what the folders say."),
    window: int = typer.Option(512, min=2, help="Tokens a window; windows do not overlap."),
    tokens: int | None = typer.Option(None, min=2, help="Use only the first tokens of the text."),
    device: str = typer.Option("cpu", help="cpu, cuda, cuda:1 …"),
    json: Path | None = typer.Option(None, help="Write the results to this file too."),
) -> None:
    """Measure the perplexity of models on a text, each quantized one beside its source.

    Shown with it: how far the predictions are from the source's, and how sure the figures are. With a
    format's unrotated model among the folders, the table says whether a rotation helps.

    Example: hadaquant eval out/int8 out/int8-rotated --text enwiki.txt --tokens 4096
    """
    check_output(json)
    models = with_sources(folders, source)
    ids = read_tokens(text, models[0].tokenizer(), window, tokens)
    check_never_calibrated_on(models, text)
    check_sources(models)
    windows = len(ids) // window
    errors = console(stderr=True)
    with errors.status("") as status:

        def tell(path: Path) -> None:
            what = f"evaluating {path} on {counted(windows, 'window')} of {window} tokens"
            status.update(escape(what))
            if not errors.is_terminal:
                errors.print(what, soft_wrap=True)

        rows = list(evaluate_all(models, ids, window, device, tell))
    rows = with_gains(rows)
    size = f"{counted(windows, 'window')} of {window} tokens, {windows * (window - 1)} predicted"
    print_table(perplexity_table(rows, f"Perplexity on {text.name}: {size}"))
    if json is not None:
        write_json(
            json,
            {
                "hadaquant": hadaquant.__version__,
                "text": str(text),
                "window": window,
                "windows": windows,
                "device": device,
                "rows": [row.to_dict() for row in rows],
            },
        )
