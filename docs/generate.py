"""Write what the documents can take from the source and from recorded results.

python docs/generate.py [--check]

docs/formats.md comes from the formats' and the rotation's own files, docs/speed.md and README.md's table of
speed from benchmarks/results/speed.jsonl. With --check nothing is written; the exit status is 1 if a page is old.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from hadaquant import formats, rotation
from hadaquant.formats import FORMATS, Format

ROOT = Path(__file__).resolve().parents[1]
SPEED = ROOT / "benchmarks" / "results" / "speed.jsonl"
BEGIN, END = "<!-- speed: written by make docs -->\n", "<!-- end of speed -->\n"

#: What each recorded op is called, what it is compared with, and how that is called.
OPS = {
    "linear": ("whole linear, input rotated and quantized", "torch_bf16", "torch bfloat16"),
    "gemm": ("product alone", "torch_bf16", "torch bfloat16"),
    "rotate_quantize": ("rotate and quantize", "copy", "device copy of as many bytes"),
}
#: README.md's rows, the best and the worst among them; docs/speed.md has all.
SHOWN = (
    ("linear", (4608, 9216, 3072), "graph"),
    ("linear", (4608, 3072, 12288), "graph"),
    ("linear", (1, 4096, 4096), "graph"),
    ("linear", (128, 4096, 4096), "graph"),
    ("gemm", (16384, 5120, 5120), "do_bench"),
    ("gemm", (4608, 3072, 12288), "do_bench"),
    ("rotate_quantize", (8192, 4096), "graph"),
    ("rotate_quantize", (16384, 5120), "graph"),
)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A Markdown table."""
    head = list(head)
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]


def formats_page() -> str:
    """docs/formats.md."""
    lines = ["# Formats and rotations", ""]
    lines += [
        "The numerics contract. Written by `make docs` from src/hadaquant/formats and rotation.py; change it there."
    ]
    head = ("name", "element", "scale rule", "scale dtype", "block", "global scale", "bits an element, 4096 × 4096")
    rows = []
    for f in FORMATS.values():
        dtype = str(f.scale.dtype).removeprefix("torch.")
        bits = 8 * f.nbytes((4096, 4096)) / 4096**2
        world = "float32" if f.has_global_scale else "none"
        rows.append((f"`{f.name}`", f.element.name, f.scale.name, dtype, f.block or "row", world, f"{bits:.3f}"))
    lines += ["", *table(head, rows)]
    for element in {f.element.name: f.element for f in FORMATS.values() if f.element.packed}.values():
        values = ", ".join(f"{v:g}" for v in element.values[: len(element.values) // 2])
        lines += ["", f"Values of {element.name}, codes 0 to {len(element.values) // 2 - 1}: {values}."]
        lines += [f"The top bit of its {element.bits} is the sign."]
    for module in sorted(m.name for m in pkgutil.iter_modules(formats.__path__)):
        loaded = importlib.import_module(f"{formats.__name__}.{module}")
        defined = [v for v in vars(loaded).values() if isinstance(v, Format)]
        if defined:
            lines += ["", f"## {', '.join(f.name for f in defined)}", "", *docstring(loaded)]
    lines += ["", "## Rotations", "", *docstring(rotation), "", *BUTTERFLIES.strip().splitlines(), ""]
    groups = [2**i for i in range(1, rotation.MAX_GROUP.bit_length())]
    steps = [" ".join(f"{radix}:{stride}" for radix, stride in rotation.stages(g)) for g in groups]
    lines += table(("group", "stages, radix:stride"), zip(groups, steps, strict=True))
    return "\n".join(lines) + "\n"


BUTTERFLIES = """
A Hadamard rotation is a run of butterfly stages in float32, additions and subtractions only, and one multiply by
RN(1/√group) at the end; signs come first. A radix-4 stage takes x0, x1, x2, x3, a stride apart, and makes
a = x0 + x1, b = x2 + x3, c = x0 − x1, d = x2 − x3, then a + b, c + d, a − b, c − d (`sylvester`) or
a + d, a − d, b + c, b − c (`regular`). A radix-2 stage makes x0 + x1, x0 − x1. Stages run in this order:
"""


def docstring(module: ModuleType) -> list[str]:
    """Lines of a module's docstring, its first a paragraph."""
    text: str = module.__doc__ or ""
    return text.strip().splitlines()


Key = tuple[str, str, tuple[int, ...], str]


def measured() -> tuple[dict[Key, dict[str, float]], list[str]]:
    """Milliseconds by variant of each op, rotation, shape and timing, all of the latest run; where runs were made."""
    runs: dict[Key, dict[str, dict[str, float]]] = {}
    where: dict[str, str] = {}
    for line in SPEED.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        key = (row["op"], row["rotation"], tuple(row["shape"]), row["timing"])
        runs.setdefault(key, {}).setdefault(row["run"], {})[row["variant"]] = row["ms"]
        where[row["run"]] = "{gpu}, torch {torch}, Triton {triton}, {date}, revision {git}".format(**row)
    latest = {key: list(of_key.items())[-1] for key, of_key in runs.items()}
    used = dict.fromkeys(where[run] for run, _ in latest.values())
    return {key: times for key, (_, times) in latest.items()}, list(used)


def speed_page() -> str:
    """docs/speed.md."""
    found, where = measured()
    rows = []
    for (op, spec, shape, timing), times in found.items():
        what, baseline, called = OPS[op]
        plain = f"{times['plain_triton'] / times['ours']:.2f}" if "plain_triton" in times else ""
        ratio = f"{times[baseline] / times['ours']:.2f}"
        rows.append((what, size(shape), spec, timing, f"{times['ours'] * 1e3:.1f}", called, ratio, plain))
    head = ("what", "shape", "rotation", "timing", "µs", "beside", "ratio", "plain kernel / ours")
    return "\n".join([*SPEED_HEAD.strip().splitlines(), "", *(f"* {w}" for w in where), "", *table(head, rows), ""])


SPEED_HEAD = """
# Speed of INT8

Written by `make docs` from benchmarks/results/speed.jsonl, which `python benchmarks/speed.py` appends to on a GPU.

Shapes are M × N × K, or M × K without a product; inputs are bfloat16. A ratio is the other's time over ours in the
same run: above 1 we are faster. `do_bench` is a call with a cold L2 cache, `graph` a call inside a CUDA graph that
walks over several buffers. Times are medians over rounds in shuffled order. Before it was timed, each fast kernel's
output was compared bit for bit with its plain twin's, and up to 40 rows of the linear's with the CPU's. Times of
different runs do not compare: large products run at the power limit. NVFP4 and MXFP4 are not measured yet.
"""


def size(shape: tuple[int, ...]) -> str:
    """A shape as text."""
    return " × ".join(map(str, shape))


def speed_table() -> str:
    """README.md's table of speed."""
    found, where = measured()
    rows = []
    for op, shape, timing in SHOWN:
        what, baseline, called = OPS[op]
        times = found[op, "none" if op == "gemm" else "regular:256", shape, timing]
        rows.append((what, size(shape), timing, called, f"{times[baseline] / times['ours']:.2f}"))
    lines = [f"{'; '.join(where)}:", "", *table(("INT8, `regular:256`", "shape", "timing", "against", "ratio"), rows)]
    return "\n".join(lines) + "\n"


def readme() -> str:
    """README.md with its table of speed as it should be."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + speed_table() + END + after


if __name__ == "__main__":
    pages = {"docs/formats.md": formats_page(), "docs/speed.md": speed_page(), "README.md": readme()}
    if "--check" in sys.argv:
        old = [name for name, text in pages.items() if (ROOT / name).read_text(encoding="utf-8") != text]
        sys.exit(f"old: {', '.join(old)}; run make docs" if old else 0)
    for name, text in pages.items():
        (ROOT / name).write_text(text, encoding="utf-8")
