"""What a format means, in torch alone. Each file that defines a ``Format`` adds it here by itself."""

from __future__ import annotations

import importlib
import pkgutil

from hadaquant.errors import UnknownChoice
from hadaquant.formats.spec import SCALE_LAYOUTS, Format, ScaleLayout

_VOCABULARY = ("elements", "scales", "spec")


def _collect() -> dict[str, Format]:
    found: dict[str, Format] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _VOCABULARY:
            names = vars(importlib.import_module(f"{__name__}.{module.name}"))
            found |= {value.name: value for value in names.values() if isinstance(value, Format)}
    return found


#: Every known format by name.
FORMATS: dict[str, Format] = _collect()


def get_format(format: str | Format) -> Format:
    """The format of a name; a ``Format`` is returned as it is.

    >>> get_format("nvfp4").block
    16

    Raises:
        UnknownChoice: no format has this name.
    """
    if isinstance(format, Format):
        return format
    if format not in FORMATS:
        raise UnknownChoice(what="format", value=format, choices=", ".join(sorted(FORMATS)))
    return FORMATS[format]


__all__ = ["FORMATS", "SCALE_LAYOUTS", "Format", "ScaleLayout", "get_format"]
