"""Which kernel runs, and why: a pure decision from a format, a target and a shape.

A plan never runs anything, so it can be asked for hardware that is not here. The ops obey it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass

from hadaquant.errors import BackendError
from hadaquant.formats import Format, get_format
from hadaquant.formats.elements import INT8_MAX
from hadaquant.ops.options import resolve_backend
from hadaquant.ops.target import TARGETS, Target, get_target
from hadaquant.rotation import FUSED_MATRIX_GROUPS, Rotation, parse

log = logging.getLogger("hadaquant")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One op's kernel, the reason, and every candidate that was passed over with its reason."""

    op: str
    format: str
    target: str
    kernel: str
    reason: str
    fast: bool
    rejected: tuple[tuple[str, str], ...] = ()

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


def has_triton() -> bool:
    """Whether Triton is installed. Does not import it."""
    return importlib.util.find_spec("triton") is not None


def _triton_refusal(target: Target) -> str | None:
    if not has_triton():
        return "Triton is not installed: pip install 'hadaquant[triton]'"
    if target.name == "cpu":
        return "Triton needs a GPU: move the tensors there, or set TRITON_INTERPRET=1 to interpret the kernel"
    if target.vendor == "nvidia" and target.arch < 80:
        return f"{target} is older than sm_80, the oldest that is compiled for"
    return None


def _choose(op: str, format: Format, target: Target, backend: str, kernel: str, why: str) -> Plan:
    """The fused kernel unless something speaks against it; plain torch where it is asked for or all there is."""
    backend = resolve_backend(backend)
    refusal = _triton_refusal(target)
    if backend == "triton" and target.name == "cpu" and interpreting():
        target = TARGETS["interpreter"]
        refusal = _triton_refusal(target)

    def plan(name: str, reason: str, fast: bool, *rejected: tuple[str, str]) -> Plan:
        return Plan(
            op=op, format=format.name, target=target.name, kernel=name, reason=reason, fast=fast, rejected=rejected
        )

    if backend == "triton":
        if refusal:
            others = "reference: available, ask for backend='auto' or 'reference'"
            raise BackendError(what=f"{op} with backend='triton' on {target}", reasons=f"triton: {refusal}; {others}")
        return plan(kernel, f"asked for by name; {why}", True)
    if backend == "reference":
        return plan("reference", "asked for by name", target.vendor == "cpu", (kernel, "backend='reference'"))
    if refusal:
        reason = "plain torch, exact, with the same bytes as the kernels"
        return plan("reference", reason, target.vendor == "cpu", (kernel, refusal))
    return plan(kernel, why, True)


def plan_quantize(format: Format, rotation: Rotation, target: Target, backend: str = "auto") -> Plan:
    """The plan of rotate -> scale -> encode -> pack."""
    one = "one pass: rotate, scale, encode and pack in registers"
    kernel = "quantize_rows" if format.block is None else "quantize_blocks"
    if rotation.kind == "matrix" and rotation.group not in FUSED_MATRIX_GROUPS:
        why = f"a matrix of side {rotation.group} is not one of {FUSED_MATRIX_GROUPS}: rotated by its own kernel first"
        return _choose("quantize", format, target, backend, f"rotate+{kernel}", why)
    return _choose("quantize", format, target, backend, kernel, one)


def plan_scaled_mm(format: Format, target: Target, backend: str = "auto") -> Plan:
    """The plan of the matrix product of two quantized matrices."""
    if format.block is None:
        why = f"int8 matrix units, exact int32 sums of terms up to {INT8_MAX}², scales and bias in the epilogue"
        return _choose("scaled_mm", format, target, backend, "int8_mm", why)
    why = "codes times block scales decoded to bfloat16 (exact), multiplied into float32"
    return _choose("scaled_mm", format, target, backend, "fp4_mm", why)


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
    check_product(format, M, N, K)
    rotation.check_k(K)
    return LinearPlan(
        quantize=plan_quantize(format, rotation, target, backend),
        scaled_mm=plan_scaled_mm(format, target, backend),
    )


_told: set[Plan] = set()


def tell(plan: Plan) -> Plan:
    """Log a plan once a process if it is not the fast one for its target."""
    if not plan.fast and plan not in _told:
        _told.add(plan)
        log.warning("%s", plan)
    return plan
