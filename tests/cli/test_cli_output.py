"""Tables at any width, and places to write to."""

import os

import pytest
from rich.table import Column, Table

from hadaquant.cli.output import check_output, console, log_progress, number, print_table
from hadaquant.errors import CheckpointError

CELLS = ("a-model-of-some-length", "nvfp4", "23.4567 [21.0123, 25.9876]", "0.1234", "81.4 %", "")
HEADINGS = ("model", "format", "perplexity", "KL", "same", "gain")


def printed(capsys, rows=(CELLS,)):
    table = Table(*HEADINGS[:2], *map(number, HEADINGS[2:]), title="A title", caption="A caption")
    for row in rows:
        table.add_row(*row)
    print_table(table)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [60, 66, 80, 100, 300])
def test_no_number_is_cut_and_no_line_is_too_long(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = printed(capsys)
    for words in (*CELLS[:-1], *HEADINGS[:-1], "A title", "A caption"):
        assert any(words in line for line in lines), words
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines) and "gain" not in "".join(lines)  # a column without content is left out
    # what comes below says whose it is, too
    assert sum("a-model" in line for line in lines) == {60: 3, 66: 2, 80: 2}.get(width, 1)


def test_a_pipe_gets_one_piece(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed(capsys, [(*CELLS[:-1], "+0.0123 [+0.0100, +0.0150]")] * 2)
    assert sum("23.4567" in line and "+0.0150]" in line for line in lines) == 2


def test_words_fold_before_numbers_give_way(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("layer", number("µs"), Column("others"))
    table.add_row("up", "1234.5", "one 1.00, two 2.00, three 3.00, four 4.00")
    print_table(table)
    out = capsys.readouterr().out
    assert "1234.5" in out and "three 3.00" in out and max(map(len, out.splitlines())) <= 40


def test_a_key_keeps_its_line_and_nothing_is_lost_where_nothing_fits(capsys, monkeypatch):
    for width in (60, 20):
        monkeypatch.setenv("COLUMNS", str(width))
        table = Table("layer", "rotation", number("error"))
        table.add_row("model.layers.mlp.down_proj", "regular:64 (group fitted, as 256 does not divide)", "0.0123456789")
        print_table(table)
        out = capsys.readouterr().out
        assert ("model.layers.mlp.down_proj" in out and "0.0123456789" in out) == (width == 60)
        assert "…" not in out and max(map(len, out.splitlines())) <= width
        letters = "".join(c for c in out if c.isalnum() or c in "._")
        assert letters.count("0") >= 2 and all(letters.count(c) >= 3 for c in "del")


def test_a_log_hears_of_progress_now_and_then(capsys):
    often, seldom = log_progress(console(stderr=True), seconds=0), log_progress(console(stderr=True), seconds=1000)
    for done in range(3):
        often("up", done, 2)
        seldom("down", done, 2)
    assert capsys.readouterr().err.splitlines() == ["  0% up", " 50% up", "100% up"]


def test_an_output_that_can_be_written_is_let_through_and_not_touched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there"
    there.write_text("as it was")
    check_output(None)
    for path in (there, tmp_path / "new", type(there)("new")):
        check_output(path)
    check_output(tmp_path, folder=True)
    check_output(tmp_path / "new", folder=True)
    check_output(tmp_path / "a" / "b" / "new", parents=True)
    assert list(tmp_path.iterdir()) == [there] and there.read_text() == "as it was"


def test_an_output_that_cannot_be_written(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for path, options, words in (
        (tmp_path, {}, "is a folder; give a file in a folder"),
        (file, {"folder": True}, "is a file; give a folder"),
        (tmp_path / "none" / "x", {}, "its parent folder does not exist; create it first"),
        (tmp_path / "none" / "x", {"folder": True}, "its parent folder does not exist; create it first"),
        (file / "x", {}, f"{file} is a file; choose another place"),
        (file / "none" / "x", {"parents": True}, f"{file} is a file; choose another place"),
    ):
        with pytest.raises(CheckpointError) as found:
            check_output(path, **options)
        assert str(found.value) == f"{path}: {words}"
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    for path in (file, tmp_path / "new"):
        with pytest.raises(CheckpointError, match="no permission"):
            check_output(path)
    assert asked == [(file, os.W_OK), (tmp_path, os.W_OK)]  # of a new file its folder is asked
