"""Quantize SmolLM2-135M to INT8 with and without a rotation, compare perplexities, and study a few layers.

    python examples/demo.py        (or: make demo)

Everything it makes is in demo/: the model, the texts, both quantized folders, the study with its report.html,
results.md and results.json. What is fetched or made from what is fetched is kept for the next time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = Path("examples")
DEMO = Path("demo")
SOURCE, TEXT, NEWS = DEMO / "smollm2", DEMO / "enwiki.txt", DEMO / "news.txt"
PLAIN, ROTATED = DEMO / "int8", DEMO / "int8-regular256"
STUDY = DEMO / "study"
#: An early, a middle and a late block: enough for a verdict in a minute.
BLOCKS = ("layers.0", "layers.11", "layers.22")
HADAQUANT = Path(sysconfig.get_path("scripts")) / "hadaquant"


def run(*command: str | Path) -> tuple[str, float]:
    """Run a command in the repository and return what it printed and how many seconds it took."""
    words = [str(word) for word in command]
    shown = " ".join([Path(words[0]).name, *words[1:]])
    print(f"$ {shown}", flush=True)
    start = time.perf_counter()
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nfailed: {shown}")
    return done.stdout, time.perf_counter() - start


def quantize(out: Path, rotation: str) -> float:
    """Seconds to quantize the model to INT8; the last line of the report is shown."""
    shutil.rmtree(ROOT / out, ignore_errors=True)
    printed, seconds = run(HADAQUANT, "quantize", SOURCE, out, "--format", "int8", "--rotation", rotation)
    print(f"  {printed.strip().splitlines()[-1]}")
    return seconds


def verdict(rows: list[dict[str, Any]]) -> str:
    """One line on whether the rotation helps."""
    source, plain, rotated = rows
    gain = rotated["gain"]["loss"]
    return (
        f"rotation helps: {rotated['helps']} (INT8 perplexity {plain['perplexity']:.2f} plain, "
        f"{rotated['perplexity']:.2f} rotated, full precision {source['perplexity']:.2f}; "
        f"gain {gain['mean']:+.4f} [{gain['low']:+.4f}, {gain['high']:+.4f}] nats a token)"
    )


def study() -> tuple[str, float]:
    """The verdict of a short study in three formats, and the seconds it took."""
    shutil.rmtree(ROOT / STUDY, ignore_errors=True)
    options = ("--out", STUDY, "--rotations", "none,sylvester:16,regular:64,regular:256", "--windows", "4")
    layers = [word for block in BLOCKS for word in ("--layers", block)]
    printed, seconds = run(HADAQUANT, "study", SOURCE, "--calibration", NEWS, *options, "--rows", "128", *layers)
    print(printed)
    return json.loads((ROOT / STUDY / "study.json").read_text(encoding="utf-8"))["verdict"], seconds


def markdown(results: dict[str, Any], seconds: dict[str, float]) -> str:
    """The results as a page."""
    rows = results["rows"]
    lines = [
        f"# SmolLM2-135M on {results['windows']} windows of {results['window']} tokens of {Path(results['text']).name}",
        "",
        "| model | format | rotation | perplexity | weights | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['format']} | {row['rotation']} | {row['perplexity']:.2f} "
            f"| {row['bytes'] / 2**20:.1f} MiB | {row['seconds']:.1f} |"
        )
    steps = ", ".join(f"{step} {took:.1f} s" for step, took in seconds.items())
    return "\n".join([*lines, "", f"{verdict(rows)}", "", results["study"], "", f"Steps: {steps}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, in windows of 512")
    tokens = parser.parse_args().tokens

    seconds: dict[str, float] = {}
    _, seconds["fetch the model"] = run(sys.executable, EXAMPLES / "fetch_smollm2.py", SOURCE)
    _, seconds["fetch the text"] = run(sys.executable, EXAMPLES / "fetch_text.py", TEXT)
    _, seconds["fetch the news"] = run(sys.executable, EXAMPLES / "fetch_news.py", NEWS)
    seconds["quantize plain"] = quantize(PLAIN, "none")
    seconds["quantize rotated"] = quantize(ROTATED, "regular:256")
    output = DEMO / "results.json"
    options = ("--text", TEXT, "--tokens", str(tokens), "--json", output)
    table, seconds["evaluate"] = run(HADAQUANT, "eval", PLAIN, ROTATED, *options)
    print(table)

    results = json.loads((ROOT / output).read_text(encoding="utf-8"))
    results["study"], seconds["study"] = study()
    results |= {"verdict": verdict(results["rows"]), "step_seconds": seconds}
    (ROOT / output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (ROOT / DEMO / "results.md").write_text(markdown(results, seconds), encoding="utf-8")
    print(f"{len(BLOCKS)} of the model's blocks: {results['study']}")
    print(f"The whole model in INT8: {results['verdict']}")
    print(f"{sum(seconds.values()):.0f} s in all; written to {DEMO / 'results.md'} and {STUDY / 'report.html'}")


if __name__ == "__main__":
    main()
