"""Output that appears whole or not at all, and what killed runs leave."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from hadaquant.checkpoint.atomic import new_output

KILLED = """
import os, signal, sys
from pathlib import Path
from hadaquant.checkpoint.atomic import new_output
with new_output(Path(sys.argv[1])) as temporary:
    temporary.mkdir()
    (temporary / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_goes_with_the_next(tmp_path):
    out = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", KILLED, str(out)]).returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(".out.*.partial")
    assert (left / "out" / "half").exists()
    for name in (".other.01234567.partial", ".out.mine.partial", ".out.01234567.partial.txt"):
        (tmp_path / name).mkdir()
    with new_output(out) as temporary:
        assert not left.exists()
        temporary.write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".other.01234567.partial", ".out.01234567.partial.txt", ".out.mine.partial", "out"
    ]  # fmt: skip
    assert out.read_text() == "whole"


def test_what_a_living_run_writes_stays(tmp_path):
    out = tmp_path / "out.bin"
    with pytest.raises(KeyError), new_output(out) as first:
        first.write_text("first")
        with new_output(out) as second:
            second.write_text("second")
        assert first.read_text() == "first" and out.read_text() == "second"
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["out.bin"]
