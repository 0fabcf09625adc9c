"""How the commands print."""

from __future__ import annotations

import sys

from rich.console import Console


def console(stderr: bool = False) -> Console:
    """A console that prints text as it is, and does not fold lines for a file or a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, markup=False, highlight=False, width=None if stream.isatty() else 200)


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
