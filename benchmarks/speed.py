"""Speed of the INT8 path on a GPU, each time beside a device copy or torch bfloat16 of the same run.

    python benchmarks/speed.py [--out FOLDER]

First the answer is checked, bit for bit, then it is timed: ``do_bench`` (a cold L2 cache before each
call) and ``graph`` (a CUDA graph of calls over several buffers). Variants take turns in shuffled order,
since a hot chip slows whoever comes next. Appends to results/speed.jsonl.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from record import RESULTS, append
from torch import nn
from triton.testing import do_bench

import hadaquant as hq
from hadaquant.kernels.gemm import scaled_mm
from hadaquant.kernels.quantize import quantize

Calls = list[Callable[[], object]]
RUN = uuid.uuid4().hex[:8]
ROUNDS = 5
FORMAT, DTYPE = hq.get_format("int8"), torch.bfloat16


def graph_ms(calls: Calls, inner: int = 2) -> float:
    """Milliseconds a call in a CUDA graph that walks over the calls' different buffers."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(inner):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / (inner * len(calls)))
    return statistics.median(times)


def race(variants: dict[str, Calls], what: dict[str, object], timings: tuple[str, ...]) -> list[dict[str, object]]:
    """One row a variant and timing, medians over shuffled rounds."""
    times: dict[tuple[str, str], list[float]] = {(v, t): [] for v in variants for t in timings}
    order = list(variants)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for name in order:
            for timing in timings:
                calls = variants[name]
                ms = (
                    do_bench(calls[0], warmup=4, rep=15, return_mode="median")
                    if timing == "do_bench"
                    else graph_ms(calls)
                )
                times[name, timing].append(ms)
    rows = []
    for (variant, timing), values in times.items():
        ms = statistics.median(values)
        rows.append({"run": RUN, **what, "variant": variant, "timing": timing, "ms": round(ms, 5), "host_us": None})
    best = {t: statistics.median(times["ours", t]) for t in timings}
    ratios = {f"{v}/{t}": round(statistics.median(times[v, t]) / best[t], 3) for v, t in times if v != "ours"}
    print(
        what["op"], what["rotation"], what["shape"], {t: round(v * 1e3, 1) for t, v in best.items()}, ratios, flush=True
    )
    return rows


def expect(same: bool, what: str) -> None:
    if not same:
        sys.exit(f"{what}: the bits differ, nothing is timed")


def rotate_quantize(m: int, k: int, spec: str) -> list[dict[str, object]]:
    r = hq.rotation.parse(spec)
    buffers = max(3, -(-400_000_000 // (3 * m * k)))
    xs = [torch.randn(m, k, device="cuda", dtype=DTYPE) for _ in range(buffers)]
    plain = quantize(xs[0], FORMAT, r, None, kernel="quantize_rows")
    ours = quantize(xs[0], FORMAT, r, None, kernel="quantize_rows_gluon")
    expect(all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)), f"rotate_quantize {m} {k} {spec}")
    half = m * k * 3 // 2
    copies = [
        (torch.empty(half, dtype=torch.uint8, device="cuda"), torch.empty(half, dtype=torch.uint8, device="cuda"))
        for _ in xs
    ]
    variants: dict[str, Calls] = {
        "copy": [lambda a=a, b=b: b.copy_(a) for a, b in copies],
        "ours": [lambda x=x: quantize(x, FORMAT, r, None, kernel="quantize_rows_gluon") for x in xs],
        "plain_triton": [lambda x=x: quantize(x, FORMAT, r, None, kernel="quantize_rows") for x in xs],
    }
    what = {"op": "rotate_quantize", "format": "int8", "rotation": spec, "shape": [m, k], "dtype": "bf16"}
    return race(variants, {**what, "bytes": 3 * m * k, "flops": None}, ("do_bench", "graph"))


def product(m: int, n: int, k: int) -> list[dict[str, object]]:
    x, w = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device="cuda") for rows in (m, n))
    sx, sw = torch.rand(m, device="cuda"), torch.rand(n, device="cuda")
    xb, wb = (torch.randn(rows, k, device="cuda", dtype=DTYPE) for rows in (m, n))

    def run(kernel: str) -> torch.Tensor:
        return scaled_mm(x, sx, None, w, sw, None, FORMAT, None, DTYPE, kernel=kernel)

    expect(torch.equal(run("int8_mm_hopper"), run("int8_mm")), f"product {m} {n} {k}")
    variants: dict[str, Calls] = {
        "ours": [lambda: run("int8_mm_hopper")],
        "plain_triton": [lambda: run("int8_mm")],
        "torch_bf16": [lambda: torch.mm(xb, wb.T)],
    }
    what = {"op": "gemm", "format": "int8", "rotation": "none", "shape": [m, n, k], "dtype": "bf16"}
    return race(variants, {**what, "bytes": None, "flops": 2 * m * n * k}, ("do_bench",))


def linear(m: int, n: int, k: int) -> list[dict[str, object]]:
    weights = 8 if m <= 1024 else 1
    dense = [nn.Linear(k, n, bias=False, dtype=DTYPE, device="cuda") for _ in range(weights)]
    layers = [hq.RotatedLinear.from_linear(layer, "int8", "regular:256") for layer in dense]
    x = torch.randn(m, k, device="cuda", dtype=DTYPE)
    on_cpu = hq.RotatedLinear.from_linear(dense[0].cpu(), "int8", "regular:256")
    dense[0].cuda()
    few = min(m, 40)
    rows = layers[0](x[:few]).cpu()
    expect(torch.equal(rows, on_cpu(x[:few].cpu())), f"linear {few} {n} {k}")
    variants: dict[str, Calls] = {
        "ours": [lambda f=f: f(x) for f in layers],
        "torch_bf16": [lambda f=f: f(x) for f in dense],
    }
    what = {"op": "linear", "format": "int8", "rotation": "regular:256", "shape": [m, n, k], "dtype": "bf16"}
    return race(variants, {**what, "bytes": None, "flops": 2 * m * n * k}, ("graph",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    with torch.inference_mode():
        for m, n, k in (
            *((m, 4096, 4096) for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)),
            (4608, 9216, 3072),
            (4608, 12288, 3072),
            (4608, 3072, 12288),
            (4608, 3072, 15360),
            (16384, 5120, 5120),
        ):
            append("speed", linear(m, n, k), out)
        for m, k in ((4096, 3072), (16384, 3072), (16384, 5120), (8192, 12288), (32768, 5120), (8192, 4096)):
            append("speed", rotate_quantize(m, k, "regular:256"), out)
        for spec in ("regular:64", "sylvester:32"):
            append("speed", rotate_quantize(16384, 3072, spec), out)
        for m, n, k in (
            (4608, 9216, 3072),
            (4608, 12288, 3072),
            (4608, 3072, 12288),
            (16384, 5120, 5120),
            (32760, 13824, 5120),
            (8192, 8192, 8192),
        ):
            append("speed", product(m, n, k), out)


if __name__ == "__main__":
    main()
