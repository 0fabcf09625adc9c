"""How the commands print."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from hadaquant.errors import CheckpointError, RotationError
from hadaquant.rotation import parse


def console(stderr: bool = False) -> Console:
    """A console that prints text as it is; into a file or a pipe 200 wide, unless COLUMNS says otherwise."""
    stream = sys.stderr if stderr else sys.stdout
    free = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, markup=False, highlight=False, width=200 if free else None)


def print_table(table: Table, keys: int = 1, markup: bool = True) -> None:
    """Print a table without cutting a number, whatever the width.

    Columns without content are left out. What does not fit beside the first ``keys`` columns follows below, beside
    the same ones again. A file or a pipe gets it in one piece, unless COLUMNS says how wide it is.
    """
    out = Console(highlight=False, markup=markup)
    endless = not out.is_terminal and "COLUMNS" not in os.environ
    if endless:
        out.width = 100_000
    for part in list(_parts(table, keys, out)):
        if endless:
            out.width = out.measure(part).maximum
        out.print(part)


def _parts(table: Table, keys: int, out: Console) -> Iterator[Table]:
    """Tables that fit, each with the key columns and as many of the others as there is room for."""
    cells = [list(column.cells) for column in table.columns]
    whole = [i < keys or column.no_wrap or column.justify == "right" for i, column in enumerate(table.columns)]
    # keys and numbers keep their line; other cells may be folded between words
    needs = [
        max(size.maximum if keep else size.minimum for size in map(out.measure, (column.header, *found)))
        for column, found, keep in zip(table.columns, cells, whole, strict=True)
    ]

    def fits(columns: list[int]) -> bool:
        # a column takes three more than its content, and the frame one
        return sum(needs[i] + 3 for i in columns) + 1 <= out.width

    rest, first = [i for i in range(keys, len(cells)) if any(cells[i])], True
    while rest:
        chosen = [*range(keys), rest.pop(0)]
        while rest and fits([*chosen, rest[0]]):
            chosen.append(rest.pop(0))
        part = Table(
            title=table.title if first else None,
            caption=None if rest else table.caption,
            title_justify=table.title_justify,
            caption_justify=table.caption_justify,
            box=table.box,
        )
        for i in chosen:
            column = table.columns[i]
            # where even this does not fit, folded is better than cut
            part.add_column(column.header, justify=column.justify, no_wrap=whole[i] and fits(chosen), overflow="fold")
        for row, like in enumerate(table.rows):
            part.add_row(*(cells[i][row] for i in chosen), end_section=like.end_section)
        yield part
        first = False


def check_output(path: Path | None, *, folder: bool = False, parents: bool = False) -> None:
    """Refuse an output that could not be written, before time is spent on what goes into it.

    Args:
        path: None, where nothing is to be written.
        folder: it becomes a folder, not a file.
        parents: folders above it that are missing are made when it is written.

    Raises:
        CheckpointError: a folder where a file is to be or the other way round, no folder to put it into, or no
            permission.
    """
    if path is None:
        return
    place = path.absolute()
    if place.exists() and place.is_dir() != folder:
        rule, fix = ("is a file", "give a folder") if folder else ("is a folder", "give a file in a folder")
        raise CheckpointError(path=path, rule=rule, fix=fix)
    above = place.parent
    while parents and not above.exists():
        above = above.parent
    if not above.is_dir():
        missing = "its parent folder does not exist", "create it first"
        rule, fix = (f"{above} is a file", "choose another place") if above.exists() else missing
        raise CheckpointError(path=path, rule=rule, fix=fix)
    if not os.access(place if place.exists() else above, os.W_OK):
        raise CheckpointError(path=path, rule="cannot be written: no permission", fix="choose another place")


def log_progress(out: Console, seconds: float = 10.0) -> Callable[[str, int, int], None]:
    """A progress for what is no terminal: a line now and then, at most one in so many seconds."""
    last = time.monotonic()

    def progress(name: str, done: int, total: int) -> None:
        nonlocal last
        if not out.is_terminal and time.monotonic() - last >= seconds:
            last = time.monotonic()
            out.print(f"{done / max(total, 1):4.0%} {name}", soft_wrap=True)

    return progress


def number(heading: str) -> Column:
    """A column of numbers."""
    return Column(heading, justify="right")


def rotation_spec(text: str) -> str:
    """A rotation that a command can be given, as it was typed.

    Raises:
        RotationError: it is none of these, or has a group that cannot be.
    """
    kind, _, group = text.partition(":")
    if text != "none" and not (kind in ("sylvester", "regular") and group.isdecimal()):
        rule = "a rotation is written 'none', 'sylvester:G' or 'regular:G'"
        raise RotationError(value=repr(text), rule=rule, fix="for example 'sylvester:16' or 'regular:256'")
    parse(text)
    return text


def size(nbytes: int) -> str:
    """Bytes with a binary unit.

    >>> size(1536), size(7)
    ('1.5 KiB', '7 B')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    value, units = nbytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}"
