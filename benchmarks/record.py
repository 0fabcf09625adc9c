"""One line of JSON for each thing measured: where, when, with what."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def revision() -> str:
    """The checkout's revision; ``HADAQUANT_GIT`` says it where a copy of the tree has no git."""
    if "HADAQUANT_GIT" in os.environ:
        return os.environ["HADAQUANT_GIT"]
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return git.stdout.strip()


def environment() -> dict[str, object]:
    """git revision, date, GPU and versions."""
    import triton

    return {
        "git": revision(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def append(name: str, rows: list[dict[str, object]], folder: Path = RESULTS) -> Path:
    """Append rows, each with the environment, to ``folder/name.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    here = environment()
    with path.open("a") as f:
        for row in rows:
            f.write(json.dumps({**here, **row}) + "\n")
    return path
