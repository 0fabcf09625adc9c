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

from hadaquant.contract import check_activations
from hadaquant.errors import BackendError, ShapeError
from hadaquant.formats import Format, get_format
from hadaquant.front import NORMS
from hadaquant.ops.candidates import Candidate, product_candidates
from hadaquant.ops.options import resolve_backend, without_products
from hadaquant.ops.target import TARGETS, Target, get_target
from hadaquant.ops.weight_candidates import weight_candidates
from hadaquant.rotation import FUSED_MATRIX_GROUPS, Rotation, parse

log = logging.getLogger("hadaquant")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One op's kernel, the reason, and every other candidate of the format with the reason against it.

    With a backend asked for by name, its candidates alone.

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
    """The two plans of a rotated linear: quantize the input, or rotate it where it stays full; multiply."""

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


def _choose(op: str, format: str, target: Target, backend: str, candidates: list[Candidate]) -> Plan:
    """The first candidate that nothing speaks against; plain torch where it is asked for or all there is.

    ``backend`` is resolved.
    """
    if backend == "triton" and target.name == "cpu" and interpreting():
        target = TARGETS["interpreter"]
    triton = _triton_refusal(target)

    def plan(chosen: Candidate | None, reason: str, fast: bool, against: dict[str, str]) -> Plan:
        needless = f"not needed: {chosen.kernel} comes before it" if chosen else ""
        others = [c.kernel for c in candidates if c is not chosen]
        rejected = tuple((kernel, against.get(kernel, needless)) for kernel in others)
        return Plan(
            op=op,
            format=format,
            target=target.name,
            kernel=chosen.kernel if chosen else "reference",
            reason=reason,
            fast=fast,
            rejected=rejected,
            tile=chosen.tile if chosen else None,
        )

    if backend == "reference":
        against = {c.kernel: "backend='reference'" for c in candidates}
        return plan(None, "asked for by name", target.vendor == "cpu", against)
    if backend != "auto":
        candidates = [c for c in candidates if c.backend == backend]
    refusals = {c.kernel: why for c in candidates if (why := (c.backend == "triton" and triton) or c.refusal)}
    able = [c for c in candidates if c.kernel not in refusals]
    if backend != "auto":
        if not able:
            reasons = "; ".join(f"{k}: {w}" for k, w in refusals.items())
            if backend == "triton":
                reasons = f"triton: {triton}"
            reasons = reasons or f"{backend}: it has no kernel for {op} of {format}"
            others = "reference: available, ask for backend='auto' or 'reference'"
            raise BackendError(what=f"{op} with backend={backend!r} on {target}", reasons=f"{reasons}; {others}")
        return plan(able[0], able[0].why, True, refusals)
    against = {c.kernel: why for c in candidates if (why := refusals.get(c.kernel) or c.unasked)}
    for chosen in able:
        if chosen.kernel not in against:
            return plan(chosen, chosen.why, True, against)
    for chosen in able:
        if not chosen.named_only:
            return plan(chosen, chosen.why, False, against)
    reason = "plain torch, exact, with the same bytes as the kernels"
    return plan(None, reason, target.vendor == "cpu", against)


#: Channels of the largest group that the registers of a thread hold, and that a thread takes at least.
LARGEST_UNIT, LEAST_UNIT = 64, 16
#: Widest row that the registers of eight warps hold.
WIDEST_ROW = 32768


def _rows_in_registers(rotation: Rotation, target: Target, dtype: torch.dtype, k: int) -> str | None:
    """What speaks against holding whole rows in registers."""
    groups = (16, 64, 256, 1024) if rotation.kind == "regular" else (16, 32, 64, 128, 256, 512, 1024)
    if target.vendor != "nvidia":
        return "its layouts are made for 32 lanes and NVIDIA's asynchronous copies"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its loads take two 16-bit floats a word, not {dtype}"
    if rotation.kind not in ("regular", "sylvester") or rotation.group not in groups:
        return f"its layouts hold Hadamard groups of {', '.join(map(str, groups))}, not {rotation}"
    if k % 256 or k > WIDEST_ROW:
        return f"it needs K to be a multiple of 256 up to {WIDEST_ROW}, not {k}"
    return None


def _units_in_threads(rotation: Rotation, target: Target) -> str | None:
    """What speaks against a thread holding whole blocks and groups."""
    if target.vendor != "nvidia":
        return "it is written in NVIDIA's instructions"
    if rotation.kind == "matrix" or rotation.group > LARGEST_UNIT:
        return f"a thread's registers hold Hadamard groups up to {LARGEST_UNIT}, not {rotation}"
    return None


def plan_rotate(rotation: Rotation, target: Target, backend: str = "auto") -> Plan:
    """The plan of a rotation alone."""
    why = "butterflies in registers"
    if rotation.kind == "matrix":
        why = "a float32 matrix product, never TF32"
    return _choose("rotate", "float32", target, without_products(backend), [Candidate(kernel="rotate", why=why)])


def plan_amax(
    rotation: Rotation, target: Target, backend: str = "auto", *, k: int = 4096, front_end: str = "none"
) -> Plan:
    """The plan of the largest magnitude of a rotated tensor with rows of K elements. ``front_end``: its kind."""
    refusal = _units_in_threads(rotation, target)
    if front_end != "none":
        refusal = f"a front end knows rows: {front_end}"
    elif k % LEAST_UNIT:
        refusal = f"K={k} is no multiple of {LEAST_UNIT}"
    why = "one look at each block or group in a thread's registers, the next one on its way"
    candidates = [
        Candidate(kernel="amax_fast", why=why, refusal=refusal),
        Candidate(kernel="amax", why="tiles in registers"),
    ]
    return _choose("amax", "float32", target, without_products(backend), candidates)


def plan_quantize(
    format: Format,
    rotation: Rotation,
    target: Target,
    backend: str = "auto",
    *,
    dtype: torch.dtype = torch.bfloat16,
    k: int = 4096,
    front_end: str = "none",
) -> Plan:
    """The plan of front -> rotate -> scale -> encode -> pack for rows of K elements of a dtype.

    ``front_end``: its kind.
    """
    backend = without_products(backend)
    one = "one pass: rotate, scale, encode and pack in registers"
    kernel = "quantize_rows" if format.block is None else "quantize_blocks"
    if rotation.kind == "matrix" and rotation.group not in FUSED_MATRIX_GROUPS:
        why = f"a matrix of side {rotation.group} is not one of {FUSED_MATRIX_GROUPS}: rotated by its own kernel first"
        return _choose("quantize", format.name, target, backend, [Candidate(kernel=f"rotate+{kernel}", why=why)])
    if format.block is not None and front_end != "none":
        kernel, one = (
            "quantize_walk",
            f"one walk over the rows: {front_end}, rotate, scale, encode and pack in registers",
        )
    candidates = [Candidate(kernel=kernel, why=one)]
    if format.block is None:
        why = "whole rows in registers, the next one on its way, one exchange through shared memory"
        refusal = _rows_in_registers(rotation, target, dtype, k)
        fast = "quantize_rows_gluon" if front_end == "none" else "quantize_front_gluon"
        candidates.insert(0, Candidate(kernel=fast, why=why, refusal=refusal))
    else:
        why = "a thread a block or group: rotate, scale, encode and pack in its registers, the next one on its way"
        refusal = _units_in_threads(rotation, target)
        block = 16 if format.has_global_scale else 32
        if not refusal and format.block != block:
            refusal = f"it writes {block} codes a scale, not {format.block}"
        fast = "quantize_blocks_fast"
        if front_end != "none":
            fast, why = "quantize_blocks_front", f"a program a row: {front_end}, then {why}"
            if not refusal and front_end in NORMS and k > WIDEST_ROW:
                refusal = f"its threads hold rows of up to {WIDEST_ROW} elements, not {k}"
        candidates.insert(0, Candidate(kernel=fast, why=why, refusal=refusal))
    return _choose("quantize", format.name, target, backend, candidates)


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
    candidates = product_candidates(format, target, m, n, k, out_dtype)
    return _choose("scaled_mm", format.name, target, resolve_backend(backend), candidates)


def plan_weight_mm(
    format: Format,
    target: Target,
    backend: str = "auto",
    *,
    m: int = 4096,
    n: int = 4096,
    k: int = 4096,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Plan:
    """The plan of the matrix product of bfloat16 [M, K] and a quantized [N, K]."""
    candidates = weight_candidates(format, target, m, n, k, out_dtype)
    return _choose("weight_mm", format.name, target, resolve_backend(backend), candidates)


def explain(
    format: str | Format,
    M: int,
    N: int,
    K: int,
    target: str | Target = "sm_90",
    *,
    rotation: str | Rotation = "none",
    activations: str = "coded",
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
    if check_activations(activations) == "full":
        return LinearPlan(
            quantize=plan_rotate(rotation, target, backend),
            scaled_mm=plan_weight_mm(format, target, backend, m=M, n=N, k=K),
        )
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
