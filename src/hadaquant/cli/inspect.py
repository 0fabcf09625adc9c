"""hadaquant inspect: what a checkpoint holds."""

from __future__ import annotations

import typer
from rich.table import Column, Table

from hadaquant.checkpoint.contents import LayerContents, describe, number_free
from hadaquant.cli.output import console, number, print_table, rotation_spec, size


def inspect(
    path: str = typer.Argument(help="A .safetensors file, or a folder with such files."),
    rotation: str | None = typer.Option(None, help="For HyperFlow files, which do not say it: regular:256."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="List every layer, not every kind of layers."),
) -> None:
    """Show what a checkpoint holds: its quantized layers, and everything else, by kind.

    Reads headers only, so it is quick however large the files are. Works on any .safetensors checkpoint.
    """
    contents, out = describe(path, None if rotation is None else rotation_spec(rotation)), console()
    if contents.layers:
        title = f"Quantized layers, layout {contents.layout}"
        columns = "layer", number("count"), Column("shape", no_wrap=True), "format", "rotation"
        table = Table(*columns, number("size"), number("bits/weight"), title=title, title_justify="left")
        kinds: dict[tuple, list[LayerContents]] = {}
        for layer in contents.layers:
            name = layer.name if verbose else number_free(layer.name)
            same = name, layer.shape, layer.format, layer.activations, layer.rotation, layer.nbytes
            kinds.setdefault(same, []).append(layer)
        for (name, shape, format, activations, rotation, nbytes), layers in kinds.items():
            table.add_row(
                name if len(layers) > 1 else layers[0].name,
                "" if verbose else str(len(layers)),
                " × ".join(map(str, shape)),
                format if activations == "coded" else f"{format}, full activations",
                rotation,
                size(nbytes * len(layers)),
                f"{layers[0].bits:.2f}",
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
