"""The rooms and who may import whom, file sizes, and what importing the package must not pull in."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "hadaquant"
FILES = sorted(SRC.rglob("*.py"))

#: A room may import lower rooms and itself. The package's own ``__init__`` gathers the public names.
LEVELS = {
    "__main__": 10,
    "cli": 9,
    "study": 8,
    "bench": 8,
    "checkpoint": 7,
    "calibrate": 7,
    "nn": 6,
    "ops": 5,
    "reference": 4,
    "kernels": 4,
    "tensor": 3,
    "contract": 3,
    "layout": 2,
    "front": 2,
    "rotation": 2,
    "formats": 1,
    "errors": 0,
    "_version": 0,
}
#: Rooms above everything that ``import hadaquant`` loads, which may import the package itself.
OUTER = ("__main__", "cli", "study", "bench", "checkpoint")
#: Not needed to use the library, so never loaded before they are used.
OPTIONAL = ("triton", "transformers", "accelerate", "gguf", "matplotlib", "jinja2", "rich", "typer")

every_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports_of(tree: ast.AST) -> set[str]:
    """Every imported module, also those imported inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are written in full"
            from_package = node.module == "hadaquant"
            found |= {f"hadaquant.{alias.name}" for alias in node.names} if from_package else {node.module}
    return found


def definitions(body: list[ast.stmt], of: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Public functions, classes and methods."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield of + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{of}{node.name}.")


@every_file
def test_imports_go_downwards(path):
    room = room_of(path)
    if room == "__init__":
        return
    for name in imports_of(ast.parse(path.read_text())):
        package, _, rest = name.partition(".")
        if package == "hadaquant":
            imported = rest.split(".")[0]
            if imported not in LEVELS:  # the package itself, or a public name of it
                assert room in OUTER, f"{room} imports the package that imports it"
            else:
                assert imported == room or LEVELS[imported] < LEVELS[room], f"{room} imports {name}"


def test_every_room_has_a_level():
    assert {room_of(path) for path in FILES} == {*LEVELS, "__init__"}


@every_file
def test_only_kernels_import_triton(path):
    """And the kernels that a benchmark is to beat."""
    if room_of(path) != "kernels" and path.parent != SRC / "bench" / "baselines":
        assert "triton" not in {name.split(".")[0] for name in imports_of(ast.parse(path.read_text()))}


@every_file
def test_kernels_are_imported_inside_functions_only(path):
    if room_of(path) == "ops":
        top = ast.Module(
            [n for n in ast.parse(path.read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))], []
        )
        assert not [name for name in imports_of(top) if name.startswith("hadaquant.kernels")]


@every_file
def test_files_say_what_they_are(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "no docstring"
    for name, node in definitions(tree.body):
        kernel = any(ast.unparse(d).partition("(")[0].endswith("jit") for d in node.decorator_list)
        overriding = name.endswith(".extra_repr")
        assert kernel or overriding or ast.get_docstring(node), f"{name} has no docstring"


@every_file
def test_no_assert_and_no_print(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: assert is no error message"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"line {node.lineno}: print"


def test_files_stay_short():
    folders = ("src", "tests", "benchmarks", "docs", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert not {path: n for path, n in lines.items() if n >= 400}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_i1_importing_the_package_stays_light():
    assert run(f"import hadaquant, sys; print([m for m in {OPTIONAL} if m in sys.modules])") == "[]"


def test_the_command_line_loads_what_a_command_needs_only_when_it_runs():
    heavy = ("triton", "transformers", "accelerate", "gguf", "matplotlib", "jinja2")
    assert run(f"import hadaquant.cli, sys; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_i1_quantize_and_a_forward_on_the_cpu_without_triton():
    """As if Triton were not installed: its import fails."""
    code = """
import sys
sys.modules["triton"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else real(name, *rest)
import torch, hadaquant as hq
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
hq.quantize_(model, "nvfp4", "regular:64")
print(model(torch.randn(2, 64)).shape)
try:
    hq.quantize(torch.randn(2, 64), "int8", backend="triton")
except hq.HadaquantError as error:
    print(error)
"""
    shape, message = run(code).splitlines()
    assert shape == "torch.Size([2, 8])"
    assert "Triton is not installed: pip install 'hadaquant[triton]'" in message
