"""The text of the demo: what stays of wiki markup, and what of a dump."""

import bz2
import runpy
import sys
import zipfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def fetch_text():
    import fetch_text

    return fetch_text


PROSE = "Apples grow on trees, which is known to everyone who has ever sat below one for long enough."


def test_plain_keeps_prose_and_link_labels(fetch_text):
    markup = f"'''{PROSE}''' They are [[fruit|fruits]] of the [[tree]], says [http://example.org the page]."
    assert fetch_text.plain(markup) == f"{PROSE} They are fruits of the tree, says the page."


@pytest.mark.parametrize(
    "noise",
    [
        "<!-- hidden\nlines -->",
        '<ref name="a"/>',
        '<ref name="a">A book, {{cite|x}}</ref>',
        "{{a|{{b|{{c}}}}}}",
        "[[File:Tree.png|thumb|a [[tree]] of [[apple]]s]]",
        "<math>x^2</math>",
        "<br />",
    ],
)
def test_plain_drops_markup_inside_a_line(fetch_text, noise):
    assert fetch_text.plain(PROSE + noise) == PROSE


@pytest.mark.parametrize("start", ["==", "* ", "# ", ":", ";", "|", "!"])
def test_plain_drops_lines_that_are_no_prose(fetch_text, start):
    assert fetch_text.plain(f"{start}{PROSE}\n{PROSE}\nshort") == PROSE


def test_plain_drops_tables_with_tables_inside(fetch_text):
    table = "{| class=x\n|-\n| " + PROSE + "\n{| \n| inner\n|}\n|}"
    assert fetch_text.plain(f"{table}\n{PROSE}") == PROSE


def test_plain_reads_entities(fetch_text):
    assert fetch_text.plain(PROSE.replace("Apples", "Apples&nbsp;&amp; pears")) == PROSE.replace(
        "Apples", "Apples\xa0& pears"
    )


def page(title, text, namespace=0, redirect=False):
    inner = '<redirect title="x"/>' if redirect else ""
    return f"<page><title>{title}</title><ns>{namespace}</ns>{inner}<revision><text>{text}</text></revision></page>"


def test_fetch_takes_articles_from_the_package(fetch_text, tmp_path, monkeypatch):
    xml = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">' + "".join(
        [
            page("A", PROSE),
            page("B", PROSE, redirect=True),
            page("Talk:C", PROSE, namespace=1),
            page("D", "short"),
            page("E", PROSE[::-1]),
        ]
    )
    name = "gensim/test/test_data/enwiki-latest-pages-shortened.bz2"
    commands = []

    def pip(command, **_):
        commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "gensim-1-any.whl", "w") as wheel:
            wheel.writestr(name, bz2.compress((xml + "</mediawiki>").encode()))
            wheel.writestr("gensim/test/test_data/enwiki-table-markup.xml.bz2", b"")

        class Done:
            returncode = 0

        return Done()

    monkeypatch.setattr("subprocess.run", pip)
    text = fetch_text.fetch(tmp_path / "text.txt", tmp_path / "cache")
    assert text.read_text().splitlines() == [PROSE, PROSE[::-1]]
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert commands[0][-1] == "gensim==4.4.0" and "--no-deps" in commands[0]
    # a second time neither downloads nor rewrites
    text.unlink()
    fetch_text.fetch(text, tmp_path / "cache")
    text.write_text("mine")
    fetch_text.fetch(text, tmp_path / "cache")
    assert len(commands) == 1 and text.read_text() == "mine"


def test_news_are_copied_once(tmp_path):
    import fetch_news

    (tmp_path / "lee_background.cor").write_text("A story.\nAnother one.\n")
    text = fetch_news.fetch(tmp_path / "demo" / "news.txt", tmp_path)
    assert text.read_text() == "A story.\nAnother one.\n"
    (tmp_path / "lee_background.cor").write_text("changed")
    assert fetch_news.fetch(text, tmp_path).read_text().startswith("A story.")


def test_a_package_that_cannot_be_had(fetch_text, tmp_path, monkeypatch):
    import wheels

    class Failed:
        returncode = 1

    monkeypatch.setattr("subprocess.run", lambda *_, **__: Failed())
    with pytest.raises(SystemExit, match="pip could not download"):
        wheels.extract("gensim==4.4.0", "*.bz2", tmp_path)


@pytest.mark.parametrize("script", ["fetch_text.py", "fetch_news.py", "fetch_smollm2.py", "demo.py"])
def test_scripts_explain_themselves(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert done.value.code == 0 and "python examples/" in capsys.readouterr().out
