"""p2: a tensor far larger than what may be in memory, measured from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ckpt_support import same_bits

import hadaquant as hq
from hadaquant.checkpoint.source import Checkpoint

MIB = 1 << 20


def sparse_weight(path: Path, rows: int, k: int, filled: dict[int, torch.Tensor], layer: str = "proj") -> None:
    """A bf16 weight [rows, k] of zeros that takes no disk, but for some rows."""
    header = {f"{layer}.weight": {"dtype": "BF16", "shape": [rows, k], "data_offsets": [0, 2 * rows * k]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for row, values in filled.items():
            file.seek(8 + len(text) + 2 * row * k)
            file.write(values.view(torch.uint8).numpy().tobytes())
        file.truncate(8 + len(text) + 2 * rows * k)


#: Runs in a fresh process and prints by how many bytes the resident memory grew at its peak.
MEASURE = """
import resource, sys
import torch
import hadaquant as hq
hq.quantize(torch.ones(64, 8192), sys.argv[3], rotation=sys.argv[4]).dequantize()  # what any first use costs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
hq.quantize_checkpoint(*sys.argv[1:])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def growth(source: Path, out: Path, format: str, rotation: str) -> int:
    command = [sys.executable, "-c", MEASURE, os.fspath(source), os.fspath(out), format, rotation]
    # one thread: with more, torch's threads wait for each other whenever the machine is busy
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "rotation", "rows", "limit"),
    [("int8", "regular:256", 151936, 512 * MIB), ("nvfp4", "sylvester:16", 20000, 512 * MIB)],
)
def test_p2_peak_memory_is_that_of_a_chunk(tmp_path, format, rotation, rows, limit) -> None:
    k = 8192
    gen = torch.Generator().manual_seed(0)
    filled = {row: torch.randn(k, generator=gen).bfloat16() for row in (0, 2047, 2048, 2049, rows // 2, rows - 1)}
    filled[rows - 1] *= 8  # the largest value comes last
    source, out = tmp_path / "w.safetensors", tmp_path / "q.safetensors"
    sparse_weight(source, rows, k, filled)
    assert source.stat().st_size > 2 * rows * k  # above 2 GiB for the large one
    grown = growth(source, out, format, rotation)
    assert grown < limit < 4 * rows * k
    tensors = Checkpoint.open(out).tensors
    stacked = torch.stack(list(filled.values()))
    g = tensors["proj.global_scale"].read() if format == "nvfp4" else None
    q = hq.quantize(stacked, format, rotation=rotation)
    if q.global_scale is not None and g is not None:
        assert same_bits(g, q.global_scale)
    for i, row in enumerate(filled):
        assert same_bits(tensors["proj.codes"].read(row, row + 1), q.codes[i : i + 1])
        assert same_bits(tensors["proj.scales"].read(row, row + 1), q.scales[i : i + 1])
    assert not tensors["proj.codes"].read(1, 2047).any()


@pytest.mark.slow
def test_p2_four_shards_in_the_memory_of_less_than_two(tmp_path) -> None:
    source, rows, k = tmp_path / "model", 16384, 8192
    source.mkdir()
    weight_map = {}
    for i in range(4):
        name = f"model-{i + 1:05d}-of-00004.safetensors"
        sparse_weight(source / name, rows, k, {0: torch.full((k,), i + 1.0).bfloat16()}, f"proj{i}")
        weight_map[f"proj{i}.weight"] = name
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert growth(source, tmp_path / "out", "int8", "none") < 1.5 * 2 * rows * k
    tensors = Checkpoint.open(tmp_path / "out").tensors
    for i in range(4):
        scale = hq.quantize(torch.full((1, k), i + 1.0), "int8").scales
        assert same_bits(tensors[f"proj{i}.scales"].read(0, 1), scale)
