"""Check, then time: every case in turn, its variants in one race, its rows appended as soon as they are there."""

from __future__ import annotations

import gc
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hadaquant.bench import model, products
from hadaquant.bench import rows as row_contests
from hadaquant.bench.cases import OPS, Case
from hadaquant.bench.contest import Absent, Contest, Variant
from hadaquant.bench.record import append, environment
from hadaquant.bench.timing import Timer, host_us, race, timer

CONTESTS: dict[str, Callable[[Case, torch.device], Contest]] = {
    "rotate_quantize": row_contests.rotate_quantize,
    "front_end": row_contests.front_end,
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

    rows: list[dict[str, Any]] = field(default_factory=list)
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
    name = uuid.uuid4().hex[:8]
    judge = _Judge(device, set(variants), rounds, random.Random(0), outcome, tell)
    for i, case in enumerate(cases):
        began = time.monotonic()
        if seconds is not None and began - started > seconds:
            outcome.left = list(cases[i:])
            break
        with torch.inference_mode():
            rows = [{"run": name, **here, **row} for row in judge.measure(case)]
        if out is not None and rows:
            append(out, rows, {})
        outcome.rows += rows
        tell(f"{case}: {time.monotonic() - began:.1f} s")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return outcome


@dataclass
class _Judge:
    """Who may start, and how fast they are."""

    device: torch.device
    only: set[str]
    rounds: int
    order: random.Random
    outcome: Outcome
    tell: Tell

    def measure(self, case: Case) -> list[dict[str, Any]]:
        """A row for each variant and timing; none if our own answer is wrong."""
        torch.manual_seed(0)
        try:
            contest = CONTESTS[case.op](case, self.device)
        except Exception as error:
            self._fault(f"{case}: {_of(error)}")
            return []
        entrants = self._entrants(case, contest)
        if "ours" not in entrants:
            return []
        times = race(self._timers(case, contest, entrants), self.rounds, self.order)
        hosts = self._hosts(entrants, times)
        front = {} if case.front_end is None else {"front_end": case.front_end}
        what = {"op": case.op, "format": case.format, "rotation": case.rotation, **front}
        size = {"shape": list(case.shape), "dtype": "bf16"}
        least = {"bytes": contest.bytes, "flops": contest.flops}
        return [
            {**what, "variant": name, **size, "timing": timing, "ms": float(f"{ms:.5g}"), **least}
            | {"host_us": hosts.get(name)}
            for (name, timing), ms in times.items()
        ]

    def _entrants(self, case: Case, contest: Contest) -> dict[str, Variant]:
        """The variants that are here and right. Ours is asked first; if it is wrong, nobody starts."""
        found = {}
        for name, build in contest.variants.items():
            if self.only and name not in {*self.only, "ours", OPS[case.op].reference}:
                continue
            began = time.monotonic()
            variant, trouble = _build(build)
            took = time.monotonic() - began
            if took > SLOW_BUILD:
                self.tell(f"{case}: {name} took {took:.1f} s to build and check")
            if variant is not None and trouble is None:
                found[name] = variant
            elif variant is None or not variant.ours:
                self.tell(f"{case}: without {name}: {trouble}")
            else:
                self._fault(f"{case}: {name}: {trouble}")
                if name == "ours":
                    break
        return found

    def _timers(self, case: Case, contest: Contest, entrants: dict[str, Variant]) -> dict[tuple[str, str], Timer]:
        found = {}
        for name, variant in entrants.items():
            for timing in contest.timings:
                try:
                    found[name, timing] = timer(timing, variant.calls)
                except Exception as error:  # what cannot be captured into a graph, say
                    text = f"{case}: {name} by {timing}: {_of(error)}"
                    self._fault(text) if variant.ours else self.tell(text)
        return found

    def _hosts(self, entrants: dict[str, Variant], times: dict[tuple[str, str], float]) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        short = {name for (name, _), ms in times.items() if ms < HOST_MS}
        return {name: round(host_us(entrants[name].calls), 2) for name in short}

    def _fault(self, text: str) -> None:
        self.outcome.red.append(text)
        self.tell(f"wrong, so not timed: {text}")


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


def _of(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' … '.join(dict.fromkeys((lines[0], lines[-1])))}"[:400]
