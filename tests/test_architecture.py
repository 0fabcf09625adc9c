"""The rooms and who may import whom, file sizes, and what importing the package must not pull in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "hadaquant"
FILES = sorted(SRC.rglob("*.py"))

#: A module may import modules of lower levels, and its own room.
LEVELS = {
    "cli": 9,
    "study": 8,
    "checkpoint": 7,
    "nn": 6,
    "ops": 5,
    "reference": 4,
    "kernels": 4,
    "tensor": 3,
    "contract": 3,
    "layout": 2,
    "rotation": 2,
    "formats": 1,
    "errors": 0,
    "_version": 0,
}


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "hadaquant"}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_downwards(path):
    room = room_of(path)
    if room == "__init__":
        return  # the package itself gathers the public names
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "hadaquant" or len(parts) < 2 or parts[1] == room:
            continue
        if parts[1] in LEVELS:
            assert LEVELS[parts[1]] < LEVELS[room], f"{room} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_files_stay_short_and_say_what_they_are(path):
    text = path.read_text()
    assert len(text.splitlines()) < 400
    assert ast.get_docstring(ast.parse(text)), "no docstring"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_only_kernels_import_triton(path):
    if room_of(path) != "kernels":
        assert not {name for name in imports_of(path) if name.split(".")[0] == "triton"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_public_functions_are_documented_and_nothing_asserts(path):
    tree = ast.parse(path.read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], "assert is no error message"
    for node in tree.body:
        public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        kernel = isinstance(node, ast.FunctionDef) and node.decorator_list and room_of(path) == "kernels"
        if public and not kernel:
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_i1_importing_the_package_stays_light():
    heavy = ("triton", "transformers", "matplotlib", "rich", "typer")
    code = f"import hadaquant, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
