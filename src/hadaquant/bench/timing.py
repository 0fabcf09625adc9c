"""Timers, and a race of variants that take turns.

A hot chip slows whoever comes next, so variants go in shuffled order, round after round, and the median counts.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
Timer = Callable[[], float]

#: ``do_bench``: one call with a cold L2 cache. ``graph``: a call inside a CUDA graph that walks over several buffers.
CUDA_TIMINGS = ("do_bench", "graph")
#: Of a CPU: one call, by the clock.
CPU_TIMINGS = ("wall",)

#: Larger than any L2 cache; overwriting it so many times takes a fast GPU a quarter of a millisecond.
CACHE_BYTES, OVERWRITES = 256 * 2**20, 3
#: How long one measurement repeats a call, in milliseconds, and the fewest and the most repetitions.
REPEAT_MS, FEWEST, MOST = 15.0, 3, 100
#: Shortest graph worth a replay, in milliseconds: what starts it must not count.
GRAPH_MS = 1.0
#: Calls timed on the host without waiting for the GPU, as runs short enough to fill no queue.
HOST_RUNS, HOST_CALLS = 12, 20


def timings_of(device: torch.device) -> tuple[str, ...]:
    """How calls on a device are timed."""
    return CUDA_TIMINGS if device.type == "cuda" else CPU_TIMINGS


def timer(timing: str, calls: Sequence[Call]) -> Timer:
    """A function that gives milliseconds a call. ``calls`` do the same over different buffers."""
    if timing == "graph":
        return _graph(calls)
    if timing == "do_bench":
        return lambda: do_bench(calls[0])
    return lambda: _wall(calls[0])


def do_bench(call: Call) -> float:
    """Median milliseconds of one call on a GPU with a cold L2 cache: what Triton's do_bench measures.

    The cache is overwritten often enough that the host is far ahead when the call begins: its cost is not in it.
    """
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")

    def timed(times: int) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
        for start, end in events:
            for _ in range(OVERWRITES):
                cache.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events)

    return timed(max(FEWEST, min(MOST, int(REPEAT_MS / timed(3)))))


def _wall(call: Call, budget: float = 0.03) -> float:
    times = []
    end = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _graph(calls: Sequence[Call]) -> Timer:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    once = _captured(calls, stream, 1)
    once()
    repeats = min(50, max(1, math.ceil(GRAPH_MS / (once() * len(calls)))))
    return once if repeats == 1 else _captured(calls, stream, repeats)


def _captured(calls: Sequence[Call], stream: torch.cuda.Stream, repeats: int) -> Timer:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()

    def replay() -> float:
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / (repeats * len(calls)))
        return statistics.median(times)

    return replay


def host_us(calls: Sequence[Call]) -> float:
    """Microseconds that Python spends on a call, the GPU working on behind it."""
    times = []
    for _ in range(HOST_RUNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(HOST_CALLS):
            calls[i % len(calls)]()
        times.append((time.perf_counter() - start) / HOST_CALLS)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def race(timers: dict[tuple[str, str], Timer], rounds: int, order: random.Random) -> dict[tuple[str, str], float]:
    """Medians over ``rounds`` of every timer, by its key (variant, timing); each round in another order."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in timers}
    keys = list(timers)
    for _ in range(rounds):
        order.shuffle(keys)
        for key in keys:
            times[key].append(timers[key]())
    return {key: statistics.median(values) for key, values in times.items()}
