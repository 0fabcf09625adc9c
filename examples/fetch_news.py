"""Make a plain text of 300 news items from a package of PyPI, to measure layers on.

    python examples/fetch_news.py demo/news.txt

gensim's tests carry the background items of the Lee corpus, one a line. Nothing of it is in the text that
fetch_text.py makes, which models are evaluated on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from wheels import command, extract

PACKAGE = "gensim==4.4.0"
NEWS = "gensim/test/test_data/lee_background.cor"


def fetch(text: Path, cache: Path) -> Path:
    """Write the text, unless it is there."""
    if not text.exists():
        text.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(extract(PACKAGE, NEWS, cache), text)
    return text


def main() -> None:
    command(fetch, "text", __doc__)


if __name__ == "__main__":
    main()
