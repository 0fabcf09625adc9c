"""Make a plain text of English Wikipedia articles (CC-BY-SA) from a package of PyPI.

    python examples/fetch_text.py demo/enwiki.txt

gensim's tests carry the start of a dump: 106 articles in wiki markup. Kept are the paragraphs of
prose, a line each; headings, lists, tables, footnotes and templates go.
"""

from __future__ import annotations

import bz2
import html
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from wheels import command, extract

PACKAGE = "gensim==4.4.0"
DUMP = "gensim/test/test_data/enwiki-latest-*-shortened.bz2"

#: What a line of prose does not start with: headings, lists, indents, rests of tables.
_NOT_PROSE = tuple("=*#:;|!{}")
#: Shorter lines are captions and leftovers.
_SHORTEST = 80

_ONCE = [
    (r"<!--.*?-->", ""),
    (r"<ref[^>]*/>", ""),
    (r"<ref\b.*?</ref>", ""),
    (r"<(math|gallery|table|timeline|code|syntaxhighlight|pre)\b.*?</\1>", ""),
]
#: These nest, so they are taken away from the inside until none is left.
_NESTED = [
    r"\{\{[^{}]*\}\}",
    r"\{\|(?:(?!\{\||\|\}).)*\|\}",
    r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]",
]
_LAST = [
    (r"\[\[(?:[^|\[\]]*\|)?([^\[\]]*)\]\]", r"\1"),  # a link becomes its label
    (r"\[https?://\S+ ?([^\]]*)\]", r"\1"),
    (r"'{2,}", ""),
    (r"<[^>]+>", ""),
]


def plain(markup: str) -> str:
    """The prose of an article, a paragraph a line.

    >>> plain("'''Apples''' are [[fruit|fruits]]{{cite}} of trees.<ref>Book</ref> " + "They are eaten. " * 5)[:32]
    'Apples are fruits of trees. They'
    """
    for pattern, label in _ONCE:
        markup = re.sub(pattern, label, markup, flags=re.DOTALL)
    for pattern in _NESTED:
        found = 1
        while found:
            markup, found = re.subn(pattern, "", markup, flags=re.DOTALL)
    for pattern, label in _LAST:
        markup = re.sub(pattern, label, markup)
    lines = (line.strip() for line in html.unescape(markup).splitlines())
    return "\n".join(line for line in lines if len(line) >= _SHORTEST and not line.startswith(_NOT_PROSE))


def articles(dump: Path) -> Iterator[str]:
    """The markup of each article of a dump, without redirects and other pages."""
    with bz2.open(dump) as xml:
        for _, element in ElementTree.iterparse(xml):
            namespace, _, tag = element.tag.rpartition("}")
            if tag != "page":
                continue
            names = {"": namespace.removeprefix("{")}
            if element.findtext("ns", namespaces=names) == "0" and element.find("redirect", names) is None:
                yield element.findtext("revision/text", "", names)
            element.clear()


def fetch(text: Path, cache: Path) -> Path:
    """Write the text, unless it is there."""
    if not text.exists():
        prose = [plain(markup) for markup in articles(extract(PACKAGE, DUMP, cache))]
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text("\n".join(article for article in prose if article) + "\n", encoding="utf-8")
    return text


def main() -> None:
    command(fetch, "text", __doc__)


if __name__ == "__main__":
    main()
