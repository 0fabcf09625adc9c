"""Write docs/formats.md from the formats' own files: their contracts and their numbers.

python docs/generate.py [--check]
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

from hadaquant import formats
from hadaquant.formats import FORMATS, Format

PAGE = Path(__file__).parent / "formats.md"


def text() -> str:
    """The page."""
    lines = ["# Formats", "", "Written by `make docs` from src/hadaquant/formats. Change it there.", ""]
    lines.append("| name | element | scale rule | block | global scale | bytes for 4096 × 4096 |")
    lines.append("|---|---|---|---|---|---|")
    for f in FORMATS.values():
        block, world = f.block or "row", "yes" if f.has_global_scale else "no"
        nbytes = f.nbytes((4096, 4096))
        lines.append(f"| `{f.name}` | {f.element.name} | {f.scale.name} | {block} | {world} | {nbytes:,} |")
    for module in sorted(m.name for m in pkgutil.iter_modules(formats.__path__)):
        loaded = importlib.import_module(f"{formats.__name__}.{module}")
        defined = [v for v in vars(loaded).values() if isinstance(v, Format)]
        if defined:
            title, _, rest = (loaded.__doc__ or "").strip().partition("\n")
            lines += ["", f"## {', '.join(f.name for f in defined)}", "", title, rest.rstrip()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != text())
    PAGE.write_text(text())
