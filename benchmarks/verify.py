"""On a GPU: the kernels' bytes against the CPU reference's, on large inputs, and what Triton's own cast does.

    python benchmarks/verify.py [--out FILE]

Appends to results/verify.jsonl and exits with 1 if a byte differs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton
import triton.language as tl

import hadaquant as hq
from hadaquant.bench.record import append

OUT = Path(__file__).parent / "results" / "verify.jsonl"
ROTATIONS = ("none", "sylvester:16", "sylvester:64", "sylvester:1024", "regular:64", "regular:256", "sylvester:4096")
#: fp32 -> E4M3 that an emulated cast loses: the carry into the exponent, double rounding, overflow, NaN.
CAST_INPUTS = (126.2386, 31.6051, 7.9839, 1.0625, 464.0, 1000.0, float("nan"), 400.199585, 272.156555, 136.002075)
CAST_RIGHT = (128.0, 32.0, 8.0, 1.0, 448.0, 448.0, float("nan"), 416.0, 288.0, 144.0)


@triton.jit
def cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.float8e4nv).to(tl.float32))


def triton_cast(values: tuple[float, ...]) -> list[float]:
    x = torch.zeros(16)
    x[: len(values)] = torch.tensor(values)
    x = x.cuda() if torch.cuda.is_available() else x
    y = torch.empty_like(x)
    cast_kernel[(1,)](x, y, N=16)
    return y[: len(values)].tolist()


def our_cast(values: tuple[float, ...]) -> list[float]:
    from hadaquant.formats.elements import decode_e4m3, encode_e4m3

    return decode_e4m3(encode_e4m3(torch.tensor(values))).tolist()


@functools.cache
def inputs() -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    gauss = torch.randn(1024, 12288, generator=gen)
    outliers = gauss[:, :4096].clone()
    outliers[:, ::97] *= 20
    wild = torch.randn(512, 4096, generator=gen) * (torch.randn(512, 4096, generator=gen) * 20).exp()
    bits = torch.randint(-(2**31), 2**31, (512, 4096), generator=gen, dtype=torch.int64).to(torch.int32)
    return {
        "gauss bf16": gauss.bfloat16(),
        "gauss fp16": gauss[:256].half(),
        "gauss fp32": gauss[:256],
        "outliers bf16": outliers.bfloat16(),
        "wild fp32": wild,
        "any bits fp32": bits.view(torch.float32),
        "every bf16": torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(16, 4096),
    }


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return int((a.view(torch.uint8) != b.view(torch.uint8)).sum())


def compare(case: tuple[str, str, str]) -> dict[str, object]:
    """How many bytes of one input differ, in one format and rotation."""
    name, format, rotation = case
    torch.set_num_threads(1)  # many cases at once instead
    x = inputs()[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = hq.quantize(x.to(device), format, rotation=rotation, backend="triton")
    oracle = hq.quantize(x, format, rotation=rotation, backend="reference")
    bad = differing(ours.codes, oracle.codes) + differing(ours.scales, oracle.scales)
    if ours.global_scale is not None and oracle.global_scale is not None:
        bad += differing(ours.global_scale.view(1), oracle.global_scale.view(1))
    row = {"what": "bytes", "input": name, "format": format, "rotation": rotation}
    return {**row, "elements": x.numel(), "differing_bytes": bad}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    cases = list(itertools.product(inputs(), hq.FORMATS, ROTATIONS))
    # processes, for each compiles kernels and computes on the CPU; spawned, for a GPU does not survive a fork
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(compare, cases))
    bytes_rows = list(rows)
    rows.append(
        {
            "what": "triton cast to float8e4nv",
            "input": [str(v) for v in CAST_INPUTS],
            "right": [str(v) for v in CAST_RIGHT],
            "cast": [str(v) for v in triton_cast(CAST_INPUTS)],
            "ours": [str(v) for v in our_cast(CAST_INPUTS)],
        }
    )
    append(out, rows)
    wrong = [r for r in bytes_rows if r["differing_bytes"]]
    print(f"{len(bytes_rows)} comparisons, {len(wrong)} with differing bytes; cast {rows[-1]['cast']}; {out}")
    for row in wrong[:20]:
        print(row)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
