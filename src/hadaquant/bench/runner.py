"""Check, then time: every case in turn, its variants in one race, its rows appended as soon as they are there."""

from __future__ import annotations

import gc
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hadaquant.bench import model, products, rows
from hadaquant.bench.cases import OPS, Case
from hadaquant.bench.contest import Absent, Contest, Variant
from hadaquant.bench.record import append, environment
from hadaquant.bench.timing import Timer, host_us, race, timer

CONTESTS: dict[str, Callable[[Case, torch.device], Contest]] = {
    "rotate_quantize": rows.rotate_quantize,
    "front_end": rows.front_end,
    "gemm": products.gemm,
    "linear": products.linear,
    "block": model.block,
    "block_linears": model.block_linears,
}
#: The cost on the host is asked only of calls shorter than this on the GPU, in milliseconds.
HOST_MS = 1.0

#: Seconds after which building a variant is worth a line.
SLOW_BUILD = 3.0

Tell = Callable[[str], None]


@dataclass
class Outcome:
    """Rows as they were recorded; what gave a wrong answer; which cases the time did not reach."""

    rows: list[dict[str, object]] = field(default_factory=list)
    red: list[str] = field(default_factory=list)
    left: list[Case] = field(default_factory=list)


def run(
    cases: Sequence[Case],
    device: torch.device,
    *,
    out: Path | None = None,
    variants: Sequence[str] = (),
    rounds: int = 5,
    seconds: float | None = None,
    tell: Tell = lambda line: None,
) -> Outcome:
    """Check and time cases on a device.

    Args:
        cases: in this order.
        out: rows are appended to this file, a case at a time.
        variants: only these, ours and the reference.
        rounds: in each, every variant is timed once.
        seconds: after so many no further case is begun.
        tell: is given a line of text for what happens.

    Raises:
        CheckpointError: ``out`` cannot be written.
    """
    outcome, here, started = Outcome(), environment(), time.monotonic()
    order = random.Random(0)
    name = uuid.uuid4().hex[:8]
    for i, case in enumerate(cases):
        if seconds is not None and time.monotonic() - started > seconds:
            outcome.left = list(cases[i:])
            break
        began = time.monotonic()
        with torch.inference_mode():
            found = _measure(case, device, variants, rounds, order, outcome.red, tell)
        found = [{"run": name, **here, **row} for row in found]
        if out is not None and found:
            append(out, found, {})
        outcome.rows += found
        tell(f"{case}: {time.monotonic() - began:.1f} s")
        _free(device)
    return outcome


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measure(
    case: Case,
    device: torch.device,
    only: Sequence[str],
    rounds: int,
    order: random.Random,
    red: list[str],
    tell: Tell,
) -> list[dict[str, object]]:
    torch.manual_seed(0)
    reference = OPS[case.op].reference
    try:
        contest = CONTESTS[case.op](case, device)
    except Exception as error:
        red.append(f"{case}: {_of(error)}")
        tell(f"RED {red[-1]}")
        return []
    ready: dict[str, Variant] = {}
    timers: dict[tuple[str, str], Timer] = {}
    for name, build in contest.variants.items():
        if only and name not in (*only, "ours", reference):
            continue
        began = time.monotonic()
        variant, trouble = _build(build)
        if time.monotonic() - began > SLOW_BUILD:
            tell(f"{case}: {name} took {time.monotonic() - began:.1f} s to build and check")
        if variant is not None and trouble is None:
            ready[name] = variant
            timers |= _timers(name, variant, contest.timings, case, tell)
            continue
        if variant is None or not variant.ours:
            tell(f"{case}: without {name}: {trouble}")
            continue
        red.append(f"{case}: {name}: {trouble}")
        tell(f"RED {red[-1]}")
        if name == "ours":
            return []
    times = race(timers, rounds, order)
    hosts = _hosts(ready, times) if device.type == "cuda" else {}
    return [
        {**_what(case), "variant": name, "shape": list(case.shape), "dtype": "bf16", "timing": timing, "ms": _short(ms)}
        | {"bytes": contest.bytes, "flops": contest.flops, "host_us": hosts.get(name)}
        for (name, timing), ms in times.items()
    ]


def _build(build: Callable[[], Variant]) -> tuple[Variant | None, str | None]:
    """The variant, and what is wrong with it; None where it cannot be had here."""
    try:
        variant = build()
    except Absent as why:
        return None, str(why)
    except Exception as error:
        return Variant([]), _of(error)
    try:
        variant.calls[0]()
        return variant, variant.check() if variant.check else None
    except Exception as error:
        return variant, _of(error)


def _timers(
    name: str, variant: Variant, timings: Sequence[str], case: Case, tell: Tell
) -> dict[tuple[str, str], Timer]:
    found = {}
    for timing in timings:
        try:
            found[name, timing] = timer(timing, variant.calls)
        except Exception as error:  # a library that cannot be captured into a graph, say
            tell(f"{case}: {name} without {timing}: {_of(error)}")
    return found


def _hosts(variants: dict[str, Variant], times: dict[tuple[str, str], float]) -> dict[str, float]:
    fast = {name for (name, _), ms in times.items() if ms < HOST_MS}
    return {name: round(host_us(variants[name].calls), 2) for name in fast}


def _what(case: Case) -> dict[str, object]:
    front = {} if case.front_end is None else {"front_end": case.front_end}
    return {"op": case.op, "format": case.format, "rotation": case.rotation, **front}


def _short(ms: float) -> float:
    return float(f"{ms:.5g}")


def _of(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' … '.join(dict.fromkeys((lines[0], lines[-1])))}"[:400]
