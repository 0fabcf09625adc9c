"""What the documents say is so: their code and commands run, their pages are current, their links lead somewhere."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from hadaquant.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def run(code: str, source: Path = ROOT / "src", **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(source), **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readmes_code_runs():
    (code,) = blocks("README.md")
    error, *_ = re.findall(r"tensor\(([\d.]+)", run(code))
    assert 0.005 < float(error) < 0.015  # its comment says about 0.01


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


@pytest.fixture
def model(tmp_path):
    """A folder with a tiny language model and its tokenizer."""
    pytest.importorskip("transformers")
    made = runpy.run_path(str(ROOT / "tests" / "study" / "tiny_llama.py"))
    made["tiny_llama"]().save_pretrained(tmp_path / "model")
    made["byte_tokenizer"]().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_readmes_commands_run(model, tmp_path):
    lines = [
        line for block in blocks("README.md", "sh") for line in block.splitlines() if line.startswith("hadaquant ")
    ]
    assert {line.split()[1] for line in lines} == {command.name for command in app.registered_commands}
    (tmp_path / "text").write_text("Rotated, quantized and read again. " * 40)
    places = {"MODEL": model, "OUT": tmp_path / "out", "OUT.safetensors": tmp_path / "out.safetensors"}
    places["FILE"] = tmp_path / "text"
    (tmp_path / "prose").write_text("Measured on one text, and tested on another. " * 30)
    places |= {"PROSE": tmp_path / "prose", "STUDY": tmp_path / "study", "PLANNED": tmp_path / "planned"}
    places["STUDY/plan.json"] = tmp_path / "study" / "plan.json"
    for line in lines:
        words = [str(places.get(word, word)) for word in shlex.split(line, comments=True)[1:]]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{line}\n{done.output}"
    assert "model.layers.0.mlp.up_proj.comfy_quant" in load_file(places["OUT.safetensors"])


def test_generated_pages_are_current():
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@every_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@every_page
def test_files_that_are_named_exist(page):
    """Paths with a folder in them, given from the root, the package, the documents or the page's own folder."""
    named = re.findall(r"\b(?:\w+/)+[\w*-]+\.(?:py|md|jsonl)\b", page.read_text(encoding="utf-8"))
    places = (ROOT, ROOT / "src" / "hadaquant", ROOT / "docs", page.parent)
    made = {"src/hadaquant/formats/mxfp4_16.py"}  # the reader's own
    missing = [name for name in named if name not in made and not any((place / name).exists() for place in places)]
    assert not missing


@every_page
def test_tables_have_equal_rows(page):
    for match in re.finditer(r"(?:^\|.*\|\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        rows = [re.sub(r"`[^`]*`", "", row) for row in match.group().splitlines()]
        assert len({row.count("|") for row in rows}) == 1, rows[0]


@pytest.fixture
def tree_with_a_new_format(tmp_path):
    """A copy of the sources, and in it the file that docs/add-a-format.md tells its reader to write."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (code,) = blocks("docs/add-a-format.md")
    (tmp_path / "src" / "hadaquant" / "formats" / "mxfp4_16.py").write_text(code)
    return tmp_path / "src"


USE = """
import torch, hadaquant as hq
from safetensors.torch import save_file
print(hq.__file__)
x, w = torch.randn(5, 64), torch.randn(48, 64)
a = hq.quantize(x, "mxfp4-16", rotation="sylvester:16", backend="reference")
b = hq.quantize(x, "mxfp4-16", rotation="sylvester:16", backend="triton")
print(torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and a.scales.shape == (5, 4))
print(bool((a.dequantize() - x).norm() < 0.2 * x.norm()))
linear = torch.nn.Linear(64, 48)
layers = [hq.RotatedLinear.from_linear(linear, "mxfp4-16", "regular:64", backend=b) for b in ("reference", "triton")]
y = linear(x).detach()
print(all(bool((layer(x) - y).norm() < 0.3 * y.norm()) for layer in layers))
save_file({"a.weight": w}, "plain.safetensors")
hq.quantize_checkpoint("plain.safetensors", "coded.safetensors", "mxfp4-16", "regular:64")
loaded = hq.load("coded.safetensors", torch.nn.ModuleDict({"a": torch.nn.Linear(64, 48, bias=False)}))
print(torch.equal(loaded["a"].codes, hq.quantize(w, "mxfp4-16", rotation="regular:64").codes))
print(hq.explain("mxfp4-16", 16, 48, 64, "sm_120").quantize.kernel)
"""


def test_a_format_is_one_file(tree_with_a_new_format, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, *answers = run(USE, tree_with_a_new_format, TRITON_INTERPRET="1").splitlines()
    assert Path(file).is_relative_to(tree_with_a_new_format)
    assert answers == ["True"] * 4 + ["quantize_blocks"]


def test_a_rule_without_its_twin_is_told(tree_with_a_new_format):
    file = tree_with_a_new_format / "hadaquant" / "formats" / "mxfp4_16.py"
    new_rule = 'scale=replace(E8M0_CEIL, name="e8m0_new")'
    file.write_text("from dataclasses import replace\n" + file.read_text().replace("scale=E8M0_CEIL", new_rule))
    use = """
import torch, hadaquant as hq
hq.quantize(torch.randn(2, 32), "mxfp4-16")
try:
    hq.quantize(torch.randn(2, 32), "mxfp4-16", backend="triton")
except Exception as error:
    while error:
        print(error)
        error = error.__cause__
"""
    assert "a scale rule without a device twin" in run(use, tree_with_a_new_format, TRITON_INTERPRET="1")
