"""``python -m hadaquant`` is the command line."""

from hadaquant.cli import app

if __name__ == "__main__":
    app()
