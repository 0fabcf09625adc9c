"""Output that appears whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hadaquant.errors import CheckpointError


def check_new(out: Path) -> None:
    """Refuse an output that exists, or whose parent folder does not.

    Raises:
        CheckpointError.
    """
    if out.exists() or out.is_symlink():
        raise CheckpointError(path=out, rule="exists already", fix="choose another name, or remove it")
    if not out.absolute().parent.is_dir():
        raise CheckpointError(path=out, rule="its parent folder does not exist", fix="create it first")


@contextmanager
def new_output(out: Path) -> Iterator[Path]:
    """A temporary sibling path, to become ``out`` at the end of a ``with`` block that succeeds.

    The block makes a file or a folder of it. Everything is on the disk before it gets its name; when
    the block fails, or is interrupted, nothing stays.

    Raises:
        CheckpointError: ``out`` exists, its parent does not, or the disk refuses (full, read-only).
    """
    check_new(out)
    temporary = out.absolute().parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        yield temporary
        _sync(temporary)
        check_new(out)
        temporary.rename(out)
        _sync_one(out.absolute().parent)
    except OSError as error:
        raise CheckpointError(
            path=out, rule=f"cannot be written ({error})", fix="free space, or choose another place"
        ) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    for folder, _, files in os.walk(path):
        for name in files:
            _sync_one(Path(folder) / name)
        _sync_one(Path(folder))


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
