"""Output that appears whole or not at all."""

from __future__ import annotations

import os
import re
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
    """A temporary path beside ``out``, to become ``out`` at the end of a ``with`` block that succeeds.

    The block makes a file or a folder of it. Everything is on the disk before it gets its name; when
    the block fails, or is interrupted, nothing stays. What a run that was killed has left goes with the next one.

    Raises:
        CheckpointError: ``out`` exists, its parent does not, or the disk refuses (full, read-only).
    """
    check_new(out)
    _remove_leftovers(out)
    home = out.absolute().parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    lock = None
    try:
        home.mkdir()
        lock = _lock(home)
        yield home / out.name
        _sync(home)
        check_new(out)
        (home / out.name).rename(out)
        _sync_one(out.absolute().parent)
    except OSError as error:
        raise CheckpointError(
            path=out, rule=f"cannot be written ({error})", fix="free space, or choose another place"
        ) from error
    finally:
        if lock is not None:
            os.close(lock)
        shutil.rmtree(home, ignore_errors=True)


def _remove_leftovers(out: Path) -> None:
    """Remove what killed runs to the same output left: folders of such a name that no process holds."""
    for home in out.absolute().parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.partial", home.name):
            lock = _lock(home)
            if lock is not None:
                shutil.rmtree(home, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds a folder until it is closed or its process ends; None if another does, or none can."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


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
