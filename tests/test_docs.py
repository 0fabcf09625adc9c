"""What the documents say is so: the README's code runs, formats.md is current, a format is one file."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(code: str, source: Path = ROOT / "src", **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(source), **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readmes_code_runs():
    found = blocks("README.md")
    assert found
    for code in found:
        run(code)


def test_formats_page_is_current():
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], check=False)
    assert done.returncode == 0, "run `make docs`"


def test_a_format_is_one_file(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (code,) = blocks("docs/add-a-format.md")
    (tmp_path / "src" / "hadaquant" / "formats" / "mxfp4_16.py").write_text(code)
    use = f"""
import torch, hadaquant as hq
x = torch.randn(5, 64)
a = hq.quantize(x, "mxfp4-16", rotation="sylvester:16")
b = hq.quantize(x, "mxfp4-16", rotation="sylvester:16", backend="triton")
same = torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)
print(hq.__file__.startswith({str(tmp_path)!r}), same, bool((a.dequantize() - x).norm() < 0.2 * x.norm()))
"""
    assert run(use, tmp_path / "src", TRITON_INTERPRET="1").split() == ["True"] * 3
