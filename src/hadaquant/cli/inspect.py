"""hadaquant inspect: what a checkpoint holds."""

from __future__ import annotations

import typer
from rich.table import Column, Table

from hadaquant.checkpoint.contents import describe
from hadaquant.cli.output import console, number, print_table, rotation_spec, size


def inspect(
    path: str = typer.Argument(help="A .safetensors file, or a folder with such files."),
    rotation: str | None = typer.Option(None, help="For HyperFlow files, which do not say it: regular:256."),
) -> None:
    """Show what a checkpoint holds: its quantized layers, and everything else by kind.

    Reads headers only, so it is quick however large the files are. Works on any .safetensors checkpoint.
    """
    contents, out = describe(path, None if rotation is None else rotation_spec(rotation)), console()
    if contents.layers:
        title = f"Quantized layers, layout {contents.layout}"
        columns = "layer", Column("shape", no_wrap=True), "format", "rotation", number("size"), number("bits/weight")
        table = Table(*columns, title=title, title_justify="left")
        for layer in contents.layers:
            table.add_row(
                layer.name,
                " × ".join(map(str, layer.shape)),
                layer.format if layer.activations == "coded" else f"{layer.format}, full activations",
                layer.rotation,
                size(layer.nbytes),
                f"{layer.bits:.2f}",
            )
        print_table(table, markup=False)
    columns = "tensors", number("count"), "dtype", Column("shape", no_wrap=True), number("size")
    rest = Table(*columns, title="Not quantized", title_justify="left")
    for group in contents.rest:
        rest.add_row(
            group.pattern, str(group.count), group.dtype, " × ".join(map(str, group.shape)), size(group.nbytes)
        )
    if contents.rest:
        print_table(rest, markup=False)
    for key, value in contents.made.items():
        out.print(f"{key}: {value}", soft_wrap=True)
    quantized = sum(layer.nbytes for layer in contents.layers)
    other = sum(group.nbytes for group in contents.rest)
    out.print(
        f"{len(contents.layers)} quantized layers, {size(quantized)}; "
        f"{sum(group.count for group in contents.rest)} other tensors, {size(other)}; "
        f"{contents.files} files, {size(contents.file_bytes)}",
        style="bold",
    )
