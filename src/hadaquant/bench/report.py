"""Results as tables. A ratio is the other's time over ours: above 1 ours is faster."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich import box
from rich.table import Table

from hadaquant.bench.cases import Op
from hadaquant.bench.results import Result


def size(shape: tuple[int, ...]) -> str:
    """A shape as text.

    >>> size((4608, 3072))
    '4608 × 3072'
    """
    return " × ".join(map(str, shape))


def rate(result: Result, variant: str = "ours") -> str:
    """What a variant achieves: operations a second of products, else bytes a second."""
    ms = result.ms.get(variant)
    if ms is None:
        return ""
    if result.flops is not None:
        return f"{_digits(result.flops / ms / 1e9)} TOPS"
    return f"{_digits(result.bytes / ms / 1e6)} GB/s" if result.bytes is not None else ""


def speed_tables(found: Iterable[Result]) -> list[Table]:
    """One table for each op."""
    return [_table(op, list(section)) for op, section in groupby(found, key=lambda result: result.op)]


def _table(op: Op, found: list[Result]) -> Table:
    table = Table(title=f"{op.title}, beside {op.reference_title}", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("format", "rotation", op.axes, "timing"):
        table.add_column(heading)
    for heading in ("µs", "achieved", "ratio", "host µs"):
        table.add_column(heading, justify="right")
    table.add_column("ratio to others", overflow="fold")
    for result in found:
        case, ours = result.case, result.ms.get("ours")
        others = [name for name in result.ms if name not in ("ours", op.reference)]
        table.add_row(
            case.format,
            " ".join(word for word in (case.front_end, case.rotation) if word),
            size(case.shape),
            result.timing,
            "" if ours is None else f"{ours * 1e3:.1f}",
            rate(result),
            _ratio(result.ratio()),
            f"{result.host_us['ours']:.0f}" if "ours" in result.host_us else "",
            ", ".join(f"{name} {_ratio(result.ratio(against=name))}" for name in others),
        )
    return table


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
