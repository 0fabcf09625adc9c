"""Which kernel runs, and why: a pure decision from a format, a target and a shape.

A plan never runs anything, so it can be asked for hardware that is not here. The ops obey it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from dataclasses import dataclass

import torch

from hadaquant.errors import BackendError, ShapeError
from hadaquant.formats import Format, get_format
from hadaquant.ops.options import resolve_backend
from hadaquant.ops.target import TARGETS, Target, get_target
from hadaquant.rotation import FUSED_MATRIX_GROUPS, Rotation, parse

log = logging.getLogger("hadaquant")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One op's kernel, the reason, and every better candidate that was passed over with its reason.

    ``tile``: rows and columns of the output a program makes, where the kernel leaves a choice.
    """

    op: str
    format: str
    target: str
    kernel: str
    reason: str
    fast: bool
    rejected: tuple[tuple[str, str], ...] = ()
    tile: tuple[int, int] | None = None

    def __str__(self) -> str:
        lines = [f"{self.op} [{self.format} on {self.target}] -> {self.kernel}: {self.reason}"]
        lines += [f"  not {name}: {why}" for name, why in self.rejected]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """The two plans of a rotated linear: quantize the input, multiply."""

    quantize: Plan
    scaled_mm: Plan

    def __str__(self) -> str:
        return f"{self.quantize}\n{self.scaled_mm}"


def interpreting() -> bool:
    """Whether Triton kernels are to run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. Looked up once a process, and not imported."""
    return importlib.util.find_spec("triton") is not None


def _triton_refusal(target: Target) -> str | None:
    if not has_triton():
        return "Triton is not installed: pip install 'hadaquant[triton]'"
    if target.name == "cpu":
        return "Triton needs a GPU: move the tensors there, or set TRITON_INTERPRET=1 to interpret the kernel"
    if target.vendor == "nvidia" and target.arch < 80:
        return f"{target} is older than sm_80, the oldest that is compiled for"
    return None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel, why it would be chosen, and what speaks against it, if anything does."""

    kernel: str
    why: str
    refusal: str | None = None
    tile: tuple[int, int] | None = None


def _choose(op: str, format: str, target: Target, backend: str, candidates: list[Candidate]) -> Plan:
    """The first candidate that nothing speaks against; plain torch where it is asked for or all there is."""
    backend = resolve_backend(backend)
    if backend == "triton" and target.name == "cpu" and interpreting():
        target = TARGETS["interpreter"]
    refusal = _triton_refusal(target)

    def plan(
        name: str, reason: str, fast: bool, rejected: list[tuple[str, str]], tile: tuple[int, int] | None = None
    ) -> Plan:
        return Plan(
            op=op,
            format=format,
            target=target.name,
            kernel=name,
            reason=reason,
            fast=fast,
            rejected=tuple(rejected),
            tile=tile,
        )

    if backend == "reference":
        why = "backend='reference'"
        return plan("reference", "asked for by name", target.vendor == "cpu", [(c.kernel, why) for c in candidates])
    if refusal and backend == "triton":
        others = "reference: available, ask for backend='auto' or 'reference'"
        raise BackendError(what=f"{op} with backend='triton' on {target}", reasons=f"triton: {refusal}; {others}")
    if refusal:
        reason = "plain torch, exact, with the same bytes as the kernels"
        return plan("reference", reason, target.vendor == "cpu", [(c.kernel, refusal) for c in candidates])
    refused = [(c.kernel, c.refusal) for c in candidates if c.refusal]
    chosen = next(c for c in candidates if not c.refusal)
    return plan(chosen.kernel, chosen.why, True, refused, chosen.tile)


#: Widest row that the registers of eight warps hold.
WIDEST_ROW = 32768


def _rows_in_registers(rotation: Rotation, target: Target, dtype: torch.dtype, k: int) -> str | None:
    """What speaks against holding whole rows in registers."""
    groups = (16, 64, 256) if rotation.kind == "regular" else (16, 32, 64, 256)
    if target.vendor != "nvidia":
        return "its layouts are made for 32 lanes and NVIDIA's asynchronous copies"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its loads take two 16-bit floats a word, not {dtype}"
    if rotation.kind not in ("regular", "sylvester") or rotation.group not in groups:
        return f"its layouts hold Hadamard groups of {', '.join(map(str, groups))}, not {rotation}"
    if k % 256 or k > WIDEST_ROW:
        return f"it needs K to be a multiple of 256 up to {WIDEST_ROW}, not {k}"
    return None


def plan_rotate(rotation: Rotation, target: Target, backend: str = "auto") -> Plan:
    """The plan of a rotation alone, and of the largest magnitude after it."""
    why = "butterflies in registers"
    if rotation.kind == "matrix":
        why = "a float32 matrix product, never TF32"
    return _choose("rotate", "float32", target, backend, [Candidate(kernel="rotate", why=why)])


def plan_quantize(
    format: Format,
    rotation: Rotation,
    target: Target,
    backend: str = "auto",
    *,
    dtype: torch.dtype = torch.bfloat16,
    k: int = 4096,
) -> Plan:
    """The plan of rotate -> scale -> encode -> pack for rows of K elements of a dtype."""
    one = "one pass: rotate, scale, encode and pack in registers"
    kernel = "quantize_rows" if format.block is None else "quantize_blocks"
    if rotation.kind == "matrix" and rotation.group not in FUSED_MATRIX_GROUPS:
        why = f"a matrix of side {rotation.group} is not one of {FUSED_MATRIX_GROUPS}: rotated by its own kernel first"
        return _choose("quantize", format.name, target, backend, [Candidate(kernel=f"rotate+{kernel}", why=why)])
    candidates = [Candidate(kernel=kernel, why=one)]
    if format.block is None:
        why = "whole rows in registers, the next one on its way, one exchange through shared memory"
        refusal = _rows_in_registers(rotation, target, dtype, k)
        candidates.insert(0, Candidate(kernel="quantize_rows_gluon", why=why, refusal=refusal))
    return _choose("quantize", format.name, target, backend, candidates)


#: Most rows for which the integer cores, and then slices of K over warps, beat tiles (measured on an H200).
GEMV_ROWS, FEW_ROWS = 2, 16


def small_tile(m: int, n: int, target: Target) -> tuple[int, int] | None:
    """Tile of a product of few rows: the largest whose count is within two for each multiprocessor.

    None where even the largest small tile comes in greater numbers. Measured on an H200.
    """
    if m <= FEW_ROWS:
        return 16, 32
    if m <= 64:
        return (64, 32) if -(-n // 32) <= target.multiprocessors else (64, 64)
    for rows, columns in ((64, 64), (128, 64)):
        if -(-m // rows) * -(-n // columns) <= 2 * target.multiprocessors:
            return rows, columns
    return None


def _int8_candidates(target: Target, m: int, n: int, k: int, out_dtype: torch.dtype) -> list[Candidate]:
    nvidia = None if target.vendor == "nvidia" else "it is written in NVIDIA's instructions"
    gemv = nvidia or (f"M={m} is above {GEMV_ROWS}" if m > GEMV_ROWS else None) or (f"K={k} % 4" if k % 4 else None)
    few = nvidia or (f"M={m} is above {FEW_ROWS}" if m > FEW_ROWS else None)
    if not few and -(-n // 16) > 2 * target.multiprocessors:
        few = f"N={n} fills the multiprocessors without slicing K"
    hopper = None
    if target.name != "sm_90":
        hopper = "it is written for the warpgroup instructions of sm_90"
    elif small_tile(m, n, target) is not None:
        hopper = f"M={m}, N={n} are too few 128x256 tiles to fill the multiprocessors"
    elif k % 16 or n % 8:
        hopper = f"TMA needs K % 16 == 0 and N % 8 == 0, not K={k}, N={n}"
    elif out_dtype not in (torch.bfloat16, torch.float16):
        hopper = f"its staging buffers hold 16-bit outputs, not {out_dtype}"
    return [
        Candidate(kernel="int8_gemv", why="four products an instruction, each weight read once", refusal=gemv),
        Candidate(kernel="int8_few_rows", why="warps take slices of K, each weight read once", refusal=few),
        Candidate(kernel="int8_mm_hopper", why="warpgroup matrix units fed by TMA, exact int32 sums", refusal=hopper),
        Candidate(
            kernel="int8_mm",
            why="tiles on the int8 matrix units, exact int32 sums",
            tile=small_tile(m, n, target) or (128, 128),
        ),
    ]


def plan_scaled_mm(
    format: Format,
    target: Target,
    backend: str = "auto",
    *,
    m: int = 4096,
    n: int = 4096,
    k: int = 4096,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Plan:
    """The plan of the matrix product of two quantized matrices [M, K] and [N, K]."""
    if format.block is None:
        return _choose("scaled_mm", format.name, target, backend, _int8_candidates(target, m, n, k, out_dtype))
    why = "codes times block scales decoded to bfloat16 (exact), multiplied into float32"
    return _choose("scaled_mm", format.name, target, backend, [Candidate(kernel="fp4_mm", why=why)])


def explain(
    format: str | Format,
    M: int,
    N: int,
    K: int,
    target: str | Target = "sm_90",
    *,
    rotation: str | Rotation = "none",
    backend: str = "auto",
) -> LinearPlan:
    """Which kernels a rotated linear x[M, K] · W[N, K]ᵀ would run on a target, and why.

    Runs nothing and needs no such hardware. ``print`` it, or read ``.quantize`` and ``.scaled_mm``.

    Raises:
        UnknownChoice, BlockError, GroupError, AccumulatorError: the linear cannot exist.
        BackendError: no kernel of the asked backend fits, with each candidate's reason.
    """
    from hadaquant.ops.checks import check_product

    format, rotation, target = get_format(format), parse(rotation), get_target(target)
    if not all(isinstance(size, int) and size > 0 for size in (M, N, K)):
        raise ShapeError(what="the linear", found=(M, N, K), expected="M, N, K ≥ 1, whole", fix="give M N K")
    check_product(format, M, N, K)
    rotation.check_k(K)
    return LinearPlan(
        quantize=plan_quantize(format, rotation, target, backend, k=K),
        scaled_mm=plan_scaled_mm(format, target, backend, m=M, n=N, k=K),
    )


_told: set[Plan] = set()


def tell(plan: Plan) -> Plan:
    """Log a plan once a process if it is not the fast one for its target."""
    if not plan.fast and plan not in _told:
        _told.add(plan)
        log.warning("%s", plan)
    return plan
