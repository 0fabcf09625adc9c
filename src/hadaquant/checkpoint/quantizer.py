"""Quantizes a checkpoint tensor by tensor: neither a file nor a large tensor is ever in memory whole."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hadaquant._version import __version__
from hadaquant.checkpoint.atomic import check_new, new_output
from hadaquant.checkpoint.files import SafetensorsFile, SafetensorsWriter, StoredTensor
from hadaquant.checkpoint.layouts import Layout, get_layout
from hadaquant.checkpoint.linears import find_linears
from hadaquant.checkpoint.record import METADATA_KEY, Record
from hadaquant.checkpoint.source import INDEX_SUFFIX, STEM, SUFFIX, Checkpoint, write_json
from hadaquant.checkpoint.stream import WeightJob
from hadaquant.checkpoint.unquantized import check_unquantized
from hadaquant.errors import CheckpointError
from hadaquant.formats import Format, get_format
from hadaquant.nn.convert import unfit
from hadaquant.nn.report import LayerReport, Report
from hadaquant.nn.select import DEFAULT_SKIP, check_patterns, skipped_by
from hadaquant.ops.checks import INT8_MAX_K
from hadaquant.rotation import Rotation, parse

#: ``progress(name, done, total)``: bytes of the source that are done.
Progress = Callable[[str, int, int], None]


@dataclass
class CheckpointReport(Report):
    """The report of a quantized checkpoint.

    ``file_bytes_before`` and ``file_bytes_after`` are of the weight files. ``linears`` says how linears
    were told from other tensors; ``left_out`` names weight files of the source that were not copied.
    """

    file_bytes_before: int = 0
    file_bytes_after: int = 0
    linears: str = ""
    left_out: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON; an error that is no number becomes None."""
        layers = [vars(layer) | {"error": _number(layer.error)} for layer in self.layers]
        return vars(self) | {"layers": layers}


def _number(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None


def quantize_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str | Format,
    rotation: str | Rotation = "none",
    *,
    skip: Sequence[str] = DEFAULT_SKIP,
    layout: str = "native",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> CheckpointReport:
    """Write a checkpoint again with its linears rotated and quantized.

    Args:
        source: a .safetensors file, or a folder with one or with shards and an index.
        out: what to write, which must not exist: one .safetensors file if named so, else a folder with
            as many weight files as the source, its config and its other small files.
        format, rotation: as in :func:`hadaquant.quantize`. A layer whose K the group does not divide
            gets the largest legal group that does, or stays as it is.
        skip: patterns of layers to keep, as in :func:`hadaquant.quantize_`.
        layout: ``native`` or ``comfy``.
        device: where the arithmetic runs; the bytes are the same.
        progress: called as work goes on.

    Raises:
        CheckpointError: a source that cannot be read, an output that cannot be written.
        AlreadyQuantized: the source is quantized.
        PatternError: a skip pattern matches no linear.
        UnknownChoice, RotationError: no such format, layout or rotation.
    """
    f, r, lay = get_format(format), parse(rotation), get_layout(layout)
    lay.check(f, r)
    checkpoint, out = Checkpoint.open(source), Path(out)
    check_new(out)
    check_unquantized(checkpoint)
    report = CheckpointReport(file_bytes_before=checkpoint.nbytes)
    jobs, report.linears = _choose(checkpoint, f, r, skip, report)
    if not jobs:
        reasons = "; ".join(f"{layer.name}: {layer.reason}" for layer in report.kept[:8])
        raise CheckpointError(path=source, rule=f"holds no linear to quantize ({reasons})", fix="see the reasons")
    record = Record(
        tool=__version__,
        layout=lay.name,
        layers={job.layer: job.contract for job in jobs.values()},
        kept={layer.name: layer.reason for layer in report.kept},
        source=os.fspath(source),
        format=f.name,
        rotation=str(r),
        skip=tuple(skip),
    )
    report.record = record.to_dict()
    with new_output(out) as temporary:
        parts = _parts(checkpoint, temporary, single=out.suffix == SUFFIX)
        ticker = _Ticker(sum(t.nbytes for t in checkpoint.tensors.values()), progress)
        for path, tensors, metadata in parts:
            _write(path, tensors, metadata, jobs, record, lay, torch.device(device), ticker, report)
        report.file_bytes_after = sum(path.stat().st_size for path, _, _ in parts)
        if out.suffix != SUFFIX:
            copied, left_out = checkpoint.other_files()
            checkpoint.copy_others(copied, temporary)
            report.left_out = [str(path) for path in left_out]
            _write_index_and_config(checkpoint, temporary, [path for path, _, _ in parts], record)
    return report


def _choose(
    checkpoint: Checkpoint, f: Format, r: Rotation, skip: Sequence[str], report: Report
) -> tuple[dict[str, WeightJob], str]:
    """A job for each weight to quantize, by its tensor's name; the others go into the report."""
    why_not, how = find_linears(checkpoint)
    check_patterns(skip, [name.removesuffix(".weight") for name, reason in why_not.items() if reason is None])
    jobs: dict[str, WeightJob] = {}
    for name, weight in checkpoint.tensors.items():
        layer, reason = name.removesuffix(".weight"), why_not[name]
        if reason is None:
            k = weight.shape[1]
            pattern, fitted = skipped_by(layer, skip), r.fit(k, f.multiple)
            if pattern is not None:
                reason = f"matches skip pattern {pattern!r}"
            elif 0 in weight.shape:
                reason = "it has no elements"
            elif f.block is None and k > INT8_MAX_K:
                reason = f"in_features {k} exceeds {INT8_MAX_K}: an int32 accumulator could overflow"
            elif fitted is None:
                reason = unfit(f, r, k)
            else:
                note = "" if fitted is r else f"(group fitted: {r} does not divide K={k})"
                jobs[name] = WeightJob(layer=layer, weight=weight, format=f, rotation=fitted, note=note)
                continue
        if name != layer or len(weight.shape) > 1:  # other vectors are parts of a layer, not layers
            size = weight.nbytes
            kept = LayerReport(name=layer, shape=weight.shape, reason=reason, bytes_before=size, bytes_after=size)
            report.layers.append(kept)
    return jobs, how


_Part = tuple[Path, dict[str, StoredTensor], dict[str, str]]


def _parts(checkpoint: Checkpoint, out: Path, *, single: bool) -> list[_Part]:
    """Path, tensors and metadata of each weight file to write, from the source's files."""
    files = checkpoint.files
    if single:
        metadata = {key: value for file in files for key, value in file.metadata.items()}
        return [(out, checkpoint.tensors, metadata)]
    out.mkdir()
    count = len(files)
    names = [f"{STEM}-{i:05d}-of-{count:05d}{SUFFIX}" for i in range(1, count + 1)]
    if count == 1:
        names = [STEM + SUFFIX]
    return [(out / name, file.tensors, file.metadata) for name, file in zip(names, files, strict=True)]


class _Ticker:
    """Adds up the bytes that are done, for the caller's progress display."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def advance(self, name: str, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(name, self.done, self.total)


def _write(
    path: Path,
    tensors: dict[str, StoredTensor],
    metadata: dict[str, str],
    jobs: dict[str, WeightJob],
    record: Record,
    layout: Layout,
    device: torch.device,
    ticker: _Ticker,
    report: Report,
) -> None:
    mine = {name: jobs[name] for name in tensors if name in jobs}
    results = {name: job.specs(layout) for name, job in mine.items()}
    copied = {name: stored for name, stored in tensors.items() if name not in mine}
    specs = dict(copied)
    for result in results.values():
        clash = sorted(specs.keys() & result.keys())
        if clash:
            raise CheckpointError(path=path, rule=f"both the source and the layout use {clash}", fix="rename them")
        specs |= result
    part = record.of_file({job.layer for job in mine.values()}, set(copied))
    header = metadata | layout.metadata(part) | {METADATA_KEY: part.to_json()}
    with SafetensorsWriter(path, specs, header) as writer:
        for name, stored in copied.items():
            writer.copy(name, stored)
            ticker.advance(name, stored.nbytes)
        for name, job in mine.items():
            error = job.write(writer, layout, device, lambda nbytes, name=name: ticker.advance(name, nbytes))
            note = job.note if math.isfinite(error) else f"{job.note} it holds NaN or Inf".strip()
            report.layers.append(
                LayerReport(
                    name=job.layer,
                    shape=job.weight.shape,
                    format=job.format.name,
                    rotation=str(job.rotation),
                    reason=note,
                    bytes_before=job.weight.nbytes,
                    bytes_after=sum(spec.nbytes for spec in results[name].values()),
                    error=error,
                )
            )


def _write_index_and_config(checkpoint: Checkpoint, out: Path, files: list[Path], record: Record) -> None:
    if len(files) > 1:
        written = [SafetensorsFile.open(path) for path in files]
        size = sum(stored.nbytes for file in written for stored in file.tensors.values())
        metadata = (checkpoint.index or {}).get("metadata") or {}
        weight_map = {name: file.path.name for file in written for name in sorted(file.tensors)}
        write_json(
            out / (STEM + INDEX_SUFFIX), {"metadata": {**metadata, "total_size": size}, "weight_map": weight_map}
        )
    if checkpoint.config is not None:
        write_json(out / "config.json", {**checkpoint.config, "quantization_config": record.to_config()})
