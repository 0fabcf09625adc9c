"""One line of JSON for each thing measured: where, when, with what."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from hadaquant.errors import CheckpointError

#: Where a checkout keeps what was measured, below its root.
RESULTS = Path("benchmarks") / "results"


def revision() -> str | None:
    """The checkout's revision; ``HADAQUANT_GIT`` says it where a copy of the tree has no git. None if nothing does."""
    if "HADAQUANT_GIT" in os.environ:
        return os.environ["HADAQUANT_GIT"]
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return git.stdout.strip()


def environment() -> dict[str, object]:
    """git revision, date, GPU and versions."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "git": revision(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": triton,
    }


def default_file() -> Path:
    """``benchmarks/results/speed.jsonl`` in a checkout, else ``speed.jsonl``."""
    return RESULTS / "speed.jsonl" if RESULTS.is_dir() else Path("speed.jsonl")


def append(path: Path, rows: Iterable[Mapping[str, object]], here: Mapping[str, object] | None = None) -> None:
    """Append rows to a file of JSON lines, each behind its environment (``here``, or the present one).

    Raises:
        CheckpointError: the file cannot be written.
    """
    here = environment() if here is None else here
    lines = [json.dumps({**here, **row}) + "\n" for row in rows]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as f:
            f.writelines(lines)
    except OSError as error:
        raise CheckpointError(path=path, rule=error.strerror or str(error), fix="give a file in a folder") from error
