"""What is measured: one line a case. To add a shape, a format or a front end, add a line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hadaquant.errors import ShapeError, UnknownChoice
from hadaquant.formats import FORMATS, get_format
from hadaquant.rotation import parse

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Op:
    """A measured op: what it is called, and the variant that all others are set against.

    ``axes`` names the sizes of a shape.
    """

    name: str
    title: str
    axes: str
    reference: str
    reference_title: str


_BF16 = {"reference": "torch_bf16", "reference_title": "torch bfloat16"}
_COPY = {"reference": "copy", "reference_title": "device copy of as many bytes"}

#: All ops, in the order of tables.
OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(name="linear", title="whole linear, input rotated and quantized", axes="M × N × K", **_BF16),
        Op(name="gemm", title="product alone", axes="M × N × K", **_BF16),
        Op(name="rotate_quantize", title="rotate and quantize", axes="M × K", **_COPY),
        Op(name="front_end", title="front end, rotate and quantize", axes="M × K", **_COPY),
        Op(name="block", title="transformer, a whole step", axes="blocks × tokens × hidden", **_BF16),
        Op(name="block_linears", title="transformer, its linears alone", axes="blocks × tokens × hidden", **_BF16),
    )
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time. Inputs and outputs are bfloat16; ``front_end`` is a kind of ``hadaquant.front``."""

    op: str
    shape: Shape
    format: str = "int8"
    rotation: str = "regular:256"
    front_end: str | None = None

    def __str__(self) -> str:
        words = (self.op, self.format, self.rotation, self.front_end, "x".join(map(str, self.shape)))
        return " ".join(word for word in words if word)


def _each(op: str, shapes: Iterable[Shape], **same: str) -> tuple[Case, ...]:
    return tuple(Case(op=op, shape=shape, **same) for shape in shapes)


#: A diffusion transformer's (hidden 3072), a video model's (5120) and a language model's (4096) linears.
LARGE = ((4608, 9216, 3072), (4608, 12288, 3072), (4608, 3072, 12288), (4608, 3072, 15360), (16384, 5120, 5120))
LARGEST = ((32760, 13824, 5120), (8192, 8192, 8192))
ROWS = tuple((m, 4096, 4096) for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384))
FEW = tuple((m, 4096, 4096) for m in (1, 16, 64, 128, 256, 512))
INPUTS = ((4096, 3072), (16384, 3072), (16384, 5120), (8192, 12288), (8192, 4096), (8192, 13824), (32768, 5120))
FP4_ROWS = tuple((m, n, 4096) for n in (4096, 14336) for m in (1, 16, 64, 1024, 4096))

SUITES: dict[str, tuple[Case, ...]] = {
    "int8": (
        *_each("rotate_quantize", INPUTS),
        *(
            Case(op="rotate_quantize", shape=(16384, 3072), rotation=spec)
            for spec in ("regular:16", "regular:64", "regular:1024", "sylvester:32", "sylvester:256", "sylvester:1024")
        ),
        *(
            Case(op="front_end", shape=shape, front_end=kind)
            for kind in ("rms_norm", "ada_norm", "silu_mul", "gelu_tanh")
            for shape in ((16384, 3072), (4608, 12288))
        ),
        *_each("gemm", (*LARGE, *LARGEST, *FEW), rotation="none"),
        *_each("linear", (*LARGE, *ROWS)),
        *_each("block_linears", ((12, 4608, 3072),)),
        *_each("block", ((12, 4608, 3072),)),
    ),
    "fp4": (
        *(
            Case(op="rotate_quantize", shape=shape, format=name, rotation=spec)
            for name, spec in (("nvfp4", "sylvester:16"), ("mxfp4", "sylvester:32"))
            for shape in ((16384, 4096), (65536, 4096), (16384, 3072))
        ),
        *(
            Case(op="rotate_quantize", shape=(16384, 4096), format=name, rotation=spec)
            for name, spec in (
                ("nvfp4", "none"),
                ("nvfp4", "sylvester:64"),
                ("nvfp4", "sylvester:128"),
                ("mxfp4", "none"),
                ("mxfp4", "sylvester:128"),
                ("mxfp4-ceil", "sylvester:32"),
                ("mxfp4-even", "sylvester:32"),
            )
        ),
        *(
            Case(op="front_end", shape=(16384, 3072), format="nvfp4", rotation="sylvester:16", front_end=kind)
            for kind in ("rms_norm", "ada_norm")
        ),
        *_each("linear", FP4_ROWS, format="nvfp4", rotation="sylvester:16"),
        *_each("linear", FP4_ROWS, format="mxfp4", rotation="sylvester:32"),
    ),
    "quick": (
        *_each("rotate_quantize", ((4096, 3072), (16384, 3072))),
        *_each("gemm", ((4608, 12288, 3072),), rotation="none"),
        *_each("linear", ((1, 4096, 4096), (4608, 12288, 3072))),
    ),
    "cpu": (
        *_each("rotate_quantize", ((256, 1024),)),
        *_each("gemm", ((256, 1024, 1024),), rotation="none"),
        *_each("linear", ((1, 1024, 1024), (256, 1024, 1024))),
    ),
}


def choose(
    suite: str,
    ops: Sequence[str] = (),
    formats: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
) -> list[Case]:
    """The cases of a suite, of some ops and formats alone if any are named.

    ``shapes`` take the place of the suite's own: each case of as many sizes, whose rotation and format divide the
    last of them, is measured at each of them.

    Raises:
        UnknownChoice: a suite, op or format that is none, or nothing is left.
        ShapeError: a shape that no case can have.
    """
    for what, names, known in (("suite", (suite,), SUITES), ("op", ops, OPS), ("format", formats, FORMATS)):
        for name in names:
            if name not in known:
                raise UnknownChoice(what=what, value=name, choices=", ".join(known))
    cases = [case for case in SUITES[suite] if (not ops or case.op in ops) and (not formats or case.format in formats)]
    if not cases:
        held = ", ".join(dict.fromkeys(f"{case.op} {case.format}" for case in SUITES[suite]))
        raise UnknownChoice(what=f"part of suite {suite!r}", value=", ".join((*ops, *formats)), choices=held)
    if not shapes:
        return cases
    found = [replace(case, shape=shape) for case in cases for shape in shapes if not _misfit(case, shape)]
    for shape in shapes:
        if not any(case.shape == shape for case in found):
            reasons = dict.fromkeys(_misfit(case, shape) for case in cases)
            raise ShapeError(
                what="--shapes",
                found="x".join(map(str, shape)),
                expected=" or ".join(reasons),
                fix="give another shape, or another --only or --suite",
            )
    return list(dict.fromkeys(found))


def _misfit(case: Case, shape: Shape) -> str:
    """What a shape of the case would have to be, or nothing if it is."""
    if len(shape) != len(case.shape):
        return f"{OPS[case.op].axes} ({case.op})"
    divisor = math.lcm(parse(case.rotation).group, get_format(case.format).block or 1)
    if shape[-1] % divisor:
        axes = OPS[case.op].axes
        last = axes.rpartition(" ")[2]
        return f"{axes} with {last} a multiple of {divisor} ({case.op} {case.format} {case.rotation})"
    return ""
