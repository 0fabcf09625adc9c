"""Write what the documents can take from the source and from recorded results.

python docs/generate.py [--check]

docs/formats.md comes from the formats' and the rotation's own files, docs/speed.md, its pictures and README.md's
table of speed from benchmarks/results/speed.jsonl, the tables of docs/does-rotation-help.md and docs/calibration.md
from study.jsonl and accuracy.jsonl beside it. With --check nothing is written; the exit status is 1 if a page is old.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from types import ModuleType

import accuracy_tables
import study_tables

from hadaquant import formats, front, rotation
from hadaquant.bench import Case, Op, Result, latest, read
from hadaquant.bench.plot import LABELS, draw
from hadaquant.bench.report import size
from hadaquant.bench.results import WHERE, places
from hadaquant.formats import FORMATS, Format

ROOT = Path(__file__).resolve().parents[1]
SPEED = ROOT / "benchmarks" / "results" / "speed.jsonl"
MODEL = ROOT / "benchmarks" / "results" / "model.jsonl"
BEGIN, END = "<!-- speed: written by make docs -->\n", "<!-- end of speed -->\n"

#: README.md's rows, the best and the worst among them; docs/speed.md has all.
SHOWN = (
    (Case(op="linear", shape=(4608, 9216, 3072)), "graph"),
    (Case(op="linear", shape=(1, 4096, 4096)), "graph"),
    (Case(op="linear", shape=(128, 4096, 4096)), "graph"),
    (Case(op="gemm", shape=(4608, 3072, 12288), rotation="none"), "do_bench"),
    (Case(op="rotate_quantize", shape=(16384, 5120)), "graph"),
    (Case(op="front_end", shape=(16384, 3072), front_end="ada_norm"), "graph"),
    (Case(op="block", shape=(12, 4608, 3072)), "graph"),
    (Case(op="rotate_quantize", shape=(16384, 4096), format="nvfp4", rotation="sylvester:16"), "do_bench"),
    (Case(op="linear", shape=(1, 4096, 4096), format="nvfp4", rotation="sylvester:16"), "graph"),
    (Case(op="linear", shape=(4096, 4096, 4096), format="nvfp4", rotation="sylvester:16"), "graph"),
)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A Markdown table."""
    head = list(head)
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]


def formats_page() -> str:
    """docs/formats.md."""
    lines = ["# Formats, rotations and front ends", ""]
    lines += [
        "The numerics contract. Written by `make docs` from src/hadaquant/formats, rotation.py and front.py: change it"
        " there."
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
    lines += ["", "## Front ends", "", *docstring(front)]
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


def measured() -> list[Result]:
    """The newest of everything that was timed."""
    return latest(read(SPEED))


def speed_page() -> str:
    """docs/speed.md."""
    found = measured()
    lines = [*SPEED_HEAD.strip().splitlines(), "", *(f"* {place}" for place in places(found))]
    for name, text in PICTURES.items():
        if (ROOT / "docs" / name).exists():
            lines += ["", f"![{text}]({name})"]
    for op, section in groupby(found, key=lambda result: result.op):
        lines += ["", f"## {op.title[0].upper()}{op.title[1:]}", "", *speed_section(op, list(section))]
    return "\n".join([*lines, *model_section()]) + "\n"


SPEED_HEAD = """
# Speed

Written by `make docs` from benchmarks/results/speed.jsonl, to which `hadaquant bench` appends on a GPU.

Inputs are bfloat16. A ratio is the other's time over ours in the same race: above 1 we are faster. `do_bench` is a
call with a cold L2 cache, `graph` a call inside a CUDA graph that walks over several buffers, so that data come from
memory. In a race the variants take turns in shuffled order, and medians count: a hot chip slows whoever comes next, and
large products run at the power limit. So times of different races do not compare. *Host* is what one eager
call costs in Python and launches, in microseconds.

*plain Triton* is what one writes first: products in tiles of 128 × 128 by pointers (*best tile*: of seven to eight
tiles), inputs by three kernels that rotate, reduce and quantize (*one kernel*: where a block is as large as the group).
*torch.compile* is the same in plain torch with 16-bit rotations, compiled; of the transformer, its bfloat16 blocks.
*cuBLASLt and torch* is `torch._int_mm` with scales in torch. All of it is in src/hadaquant/bench.

Before anything was timed, its bits were compared with the reference's (FP4 products: at most twice the error of
torch's own float32 product). No test times anything: a slow machine fails nothing.
"""

#: Pictures of docs/speed.md, which ``hadaquant bench --plot docs`` draws.
PICTURES = {
    f"speed-{family}-{kind}.png": f"{family.upper()}: {text}"
    for family in ("int8", "fp4")
    for kind, text in (
        ("products", "speed beside torch in bfloat16"),
        ("rows", "rotate and quantize beside a copy"),
        ("roofline", "products under the measured roofs"),
    )
}


def model_section() -> list[str]:
    """What benchmarks/model_on_gpu.py found of real models, the newest of each."""
    if not MODEL.exists():
        return []
    found = [json.loads(line) for line in MODEL.read_text(encoding="utf-8").splitlines()]
    key = ("what", "model", "format", "rotation", "prompt", "variant", "dtype")
    newest = list({tuple(row.get(name) for name in key): row for row in found}.values())
    lines = ["", "## A real model", "", *MODEL_TEXT.strip().splitlines(), ""]
    counts = ("dtype", "layers", "differing_inputs", "differing_outputs")
    rows = [
        (row["model"], f"{row['format']}, {row['rotation']}", *(row[n] for n in counts), f"{row['share_of_bound']:.2f}")
        for row in newest
        if row["what"] == "linears"
    ]
    head = ("model", "format", "dtype", "linears", "differing codes and scales", "differing outputs", "share of bound")
    lines += [*table(head, rows), ""]
    rows = []
    for row in (row for row in newest if row["what"] == "greedy"):
        first = row.get("first_difference")
        numbers = (f"{row[name]:.2g}" for name in ("largest_logit_difference", "smallest_margin"))
        margin = "" if first is None else f"{first['margin']:.2g}"
        same = f"{row['same_tokens']} of {row['tokens']}"
        rows.append((row["model"], f"{row['format']}, {row['rotation']}", row["prompt"], same, *numbers, margin))
    head = (
        "model",
        "format",
        "prompt",
        "same tokens",
        "logits differ by",
        "smallest margin",
        "margin where tokens part",
    )
    lines += table(head, rows)
    speeds = [row for row in newest if row["what"] == "decode"]
    if speeds:
        rows = [(row["model"], row["format"], row["variant"], f"{row['tokens_a_second']:.0f}") for row in speeds]
        lines += ["", *table(("model", "beside", "weights", "tokens a second, batch 1, CUDA graphs"), rows)]
    return [*lines, "", *(f"* {place}" for place in dict.fromkeys(WHERE.format(**row) for row in newest))]


MODEL_TEXT = """
One quantized folder on the GPU and on the CPU (`python benchmarks/model_on_gpu.py`). First each linear on what it reads
on the CPU for a prompt: bytes of its coded input and numbers of its output that differ, and the largest error beside
the bound of products (twice torch's own error in that dtype, and a float32 rounding). Outputs of `int8` have to be
equal, FP4's within the bound; a float32 output of NVFP4 misses it by 0.1 %, since matrix units cut their sums short.

Then greedy tokens, all but the linears in float64: linears then read the same on both devices. In float32 a norm that
differs in its last bit turns a code, and thirty layers make that as large as the quantization's own noise. Logits are
compared while all tokens before them agree; the margin is between the two best.
"""


def speed_section(op: Op, found: list[Result]) -> list[str]:
    """The table of one op: a row a case and timing, a column for each other variant."""
    others = list(dict.fromkeys(name for result in found for name in result.ms if name not in ("ours", op.reference)))
    rows = []
    for result in found:
        case = result.case
        host = f"{result.host_us['ours']:.0f}" if "ours" in result.host_us else ""
        ratios = (ratio(result.ratio(against=name)) for name in (op.reference, *others))
        basis = ", ".join(word for word in (case.format, case.front_end, case.rotation) if word and word != "none")
        rows.append((size(case.shape), basis, result.timing, f"{result.ms['ours'] * 1e3:.1f}", host, *ratios))
    names = [LABELS.get(name, name) for name in others]
    return table((op.axes, "format", "timing", "µs", "host", op.reference_title, *names), rows)


def ratio(value: float | None) -> str:
    """A ratio as text."""
    return "" if value is None else f"{value:.2f}"


def speed_table() -> str:
    """README.md's table of speed."""
    found = {(result.case, result.timing): result for result in measured()}
    shown = [found[key] for key in SHOWN if key in found]
    rows = []
    for result in shown:
        case, op = result.case, result.op
        kind = ", ".join(word for word in (case.format, case.front_end, case.rotation) if word and word != "none")
        rows.append((op.title, kind, size(case.shape), result.timing, op.reference_title, ratio(result.ratio())))
    head = ("what", "format", "shape", "timing", "against", "ratio")
    return "\n".join([f"{'; '.join(places(shown))}:", "", *table(head, rows)]) + "\n"


def readme() -> str:
    """README.md with its table of speed as it should be."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + speed_table() + END + after


if __name__ == "__main__":
    if "--check" not in sys.argv:
        draw(measured(), ROOT / "docs")
    pages = {"docs/formats.md": formats_page(), "docs/speed.md": speed_page(), "README.md": readme()}
    pages["docs/does-rotation-help.md"] = study_tables.page()
    pages["docs/calibration.md"] = accuracy_tables.page()
    if "--check" in sys.argv:
        old = [name for name, text in pages.items() if (ROOT / name).read_text(encoding="utf-8") != text]
        sys.exit(f"old: {', '.join(old)}; run make docs" if old else 0)
    for name, text in pages.items():
        (ROOT / name).write_text(text, encoding="utf-8")
