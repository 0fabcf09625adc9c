"""Make a text to calibrate on, 300 short news stories, from a package of PyPI.

    python examples/fetch_news.py demo/news.txt

gensim's tests carry the background corpus of Lee, Pincombe and Welsh (2005): a story a line. It has nothing
in common with the articles of fetch_text.py, on which the demo evaluates.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fetch_text import PACKAGE
from wheels import extract

STORIES = "gensim/test/test_data/lee_background.cor"


def fetch(text: Path, cache: Path) -> Path:
    """Write the text, unless it is there."""
    if not text.exists():
        stories = extract(PACKAGE, STORIES, cache)
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(stories.read_text(encoding="utf-8"), encoding="utf-8")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("demo/cache"), help="where the downloaded file is kept")
    arguments = parser.parse_args()
    print(fetch(arguments.text, arguments.cache))


if __name__ == "__main__":
    main()
