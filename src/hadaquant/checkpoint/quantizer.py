"""Quantizes a checkpoint tensor by tensor: neither a file nor a large tensor is ever in memory whole."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hadaquant._version import __version__
from hadaquant.checkpoint.atomic import check_new, new_output
from hadaquant.checkpoint.files import SafetensorsFile, SafetensorsWriter, StoredTensor, TensorSpec
from hadaquant.checkpoint.layouts import Layout, get_layout
from hadaquant.checkpoint.linears import find_linears
from hadaquant.checkpoint.model_plan import Choice, ModelPlan, fingerprint
from hadaquant.checkpoint.record import METADATA_KEY, CalibrationRecord, Record
from hadaquant.checkpoint.source import INDEX_SUFFIX, STEM, SUFFIX, Checkpoint, write_json
from hadaquant.checkpoint.stream import WeightJob
from hadaquant.checkpoint.unquantized import check_unquantized
from hadaquant.contract import check_activations
from hadaquant.errors import CheckpointError, MismatchError, PlanError, UnknownChoice
from hadaquant.formats import Format, get_format
from hadaquant.nn.convert import fit
from hadaquant.nn.report import LayerReport, Report
from hadaquant.nn.select import DEFAULT_SKIP, check_patterns, skipped_by
from hadaquant.rotation import Rotation, parse
from hadaquant.tensor import QuantizedTensor

#: ``progress(name, done, total)``: bytes of the source that are done.
Progress = Callable[[str, int, int], None]

#: ``codes(choices)``: for what each layer is to get, by its name, the quantized weights of some of them; and, by
#: their names, other tensors of the checkpoint that are to be written in place of the source's.
Codes = Callable[[Mapping[str, Choice]], Mapping[str, QuantizedTensor | Tensor]]


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
    format: str | Format | None = None,
    rotation: str | Rotation = "none",
    *,
    plan: ModelPlan | None = None,
    activations: str = "coded",
    skip: Sequence[str] = DEFAULT_SKIP,
    layout: str = "native",
    device: torch.device | str = "cpu",
    codes: Codes | None = None,
    calibration: CalibrationRecord | None = None,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Write a checkpoint again with its linears rotated and quantized.

    Args:
        source: a .safetensors file, or a folder with one or with shards and an index.
        out: what to write, which must not exist: one .safetensors file if named so, else a folder with
            as many weight files as the source, its config and its other small files.
        format, rotation: as in :func:`hadaquant.quantize`. A layer whose K the group does not divide
            gets the largest legal group that does, or stays as it is.
        plan: what each layer gets, in place of ``format``, ``rotation`` and ``skip``.
        activations: ``coded``, or ``full`` where weights alone are to be quantized: the same codes, another contract.
        skip: patterns of layers to keep, as in :func:`hadaquant.quantize_`.
        layout: ``native`` or ``comfy``.
        device: where the arithmetic runs; the bytes are the same.
        codes: makes better codes than the nearest, such as those of a calibration; a layer it leaves out is
            rounded to nearest. It may change tensors that are not quantized, too.
        calibration: how ``codes`` makes them, for the record.
        progress: called as work goes on.

    Raises:
        CheckpointError: a source that cannot be read, an output that cannot be written.
        AlreadyQuantized: the source is quantized.
        PatternError: a skip pattern matches no linear.
        PlanError: the plan is for another model or, as all are, for coded activations; or a format is given beside it,
            or neither is.
        UnknownChoice, RotationError: no such format, layout, rotation or device.
        MismatchError: ``codes`` gave a weight of another format, rotation, shape or scale layout, or a tensor that is
            not in the checkpoint.
    """
    given, lay, where = _given(format, rotation, plan), get_layout(layout), _device(device)
    check_activations(activations)
    for choice in set(given.layers.values()) if isinstance(given, ModelPlan) else (given,):
        lay.check(*choice, activations)
    checkpoint, out = Checkpoint.open(source), Path(out)
    check_new(out)
    check_unquantized(checkpoint)
    report = CheckpointReport(file_bytes_before=checkpoint.nbytes)
    if isinstance(given, ModelPlan):
        given.check_activations(activations)
        given.check_model(checkpoint)
    jobs, report.linears = _choose(checkpoint, given, skip, report)
    jobs = {name: replace(job, activations=activations) for name, job in jobs.items()}
    if not jobs:
        reasons = "; ".join(f"{layer.name}: {layer.reason}" for layer in report.kept[:8])
        raise CheckpointError(path=source, rule=f"holds no linear to quantize ({reasons})", fix="see the reasons")
    jobs, changed = (jobs, {}) if codes is None else _with_codes(checkpoint, jobs, codes)
    record = Record(
        tool=__version__,
        layout=lay.name,
        layers={job.layer: job.contract for job in jobs.values()},
        kept={layer.name: layer.reason for layer in report.kept},
        source=str(_absolute(Path(source))),
        # a plan that has been checked holds it already
        source_fingerprint=given.fingerprint if isinstance(given, ModelPlan) else fingerprint(checkpoint),
        calibration=calibration,
        **({} if isinstance(given, ModelPlan) else _asked(given, skip)),
    )
    report.record = record.to_dict()
    with new_output(out) as temporary:
        parts = _parts(checkpoint, temporary, single=out.suffix == SUFFIX)
        total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        run = _Run(jobs, changed, record, lay, where, report, total, progress)
        for path, tensors, metadata in parts:
            run.write(path, tensors, metadata)
        report.file_bytes_after = sum(path.stat().st_size for path, _, _ in parts)
        if out.suffix != SUFFIX:
            copied, left_out = checkpoint.other_files()
            checkpoint.copy_others(copied, temporary)
            report.left_out = [str(path) for path in left_out]
            _write_index_and_config(checkpoint, temporary, [path for path, _, _ in parts], record)
    return report


def _absolute(source: Path) -> Path:
    """Where a source is, from any working directory. A file's own link stays: its target may have another suffix."""
    return source.resolve() if source.is_dir() else source.parent.resolve() / source.name


def _device(device: torch.device | str) -> torch.device:
    """The device, if this machine has it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        choices = "cpu, cuda" if torch.cuda.is_available() else "cpu (torch finds no GPU here)"
        raise UnknownChoice(what="device", value=str(device), choices=choices) from error


def _given(format: str | Format | None, rotation: str | Rotation, plan: ModelPlan | None) -> Choice | ModelPlan:
    """One choice for all layers, or the plan."""
    if format is not None and plan is None:
        return Choice(get_format(format), parse(rotation))
    if format is None and plan is not None:
        return plan
    rule = "a format is given beside it" if plan else "neither a format nor a plan is given"
    raise PlanError(plan=f"the plan for {plan.model}" if plan else "no plan", rule=rule, fix="give one of the two")


def _asked(choice: Choice, skip: Sequence[str]) -> dict[str, Any]:
    return {"format": choice.format.name, "rotation": str(choice.rotation), "skip": tuple(skip)}


def _choose(
    checkpoint: Checkpoint, given: Choice | ModelPlan, skip: Sequence[str], report: Report
) -> tuple[dict[str, WeightJob], str]:
    """A job for each weight to quantize, by its tensor's name; the others go into the report."""
    why_not, how = find_linears(checkpoint)
    if isinstance(given, Choice):
        check_patterns(skip, [name.removesuffix(".weight") for name, reason in why_not.items() if reason is None])
    jobs: dict[str, WeightJob] = {}
    for name, weight in checkpoint.tensors.items():
        layer, reason = name.removesuffix(".weight"), why_not[name]
        if reason is None:
            choice, note = _choice_for(layer, weight, given, skip)
            if choice is not None:
                jobs[name] = WeightJob(layer=layer, weight=weight, **choice._asdict(), note=note)
                continue
            reason = note
        elif isinstance(given, ModelPlan) and layer in given.layers:
            raise PlanError(
                plan=f"the plan for {given.model}", rule=f"{layer!r}: {reason}", fix="study the model again"
            )
        if name != layer or len(weight.shape) > 1:  # other vectors are parts of a layer, not layers
            size = weight.nbytes
            kept = LayerReport(name=layer, shape=weight.shape, reason=reason, bytes_before=size, bytes_after=size)
            report.layers.append(kept)
    return jobs, how


def _choice_for(
    layer: str, weight: StoredTensor, given: Choice | ModelPlan, skip: Sequence[str]
) -> tuple[Choice | None, str]:
    """What a linear gets and a note about it, or None and why it is kept."""
    if isinstance(given, ModelPlan):
        return given.layers.get(layer), given.kept.get(layer, "" if layer in given.layers else "not in the plan")
    pattern = skipped_by(layer, skip)
    if pattern is not None:
        return None, f"matches skip pattern '{pattern}'"
    if 0 in weight.shape:
        return None, "it has no elements"
    fitted, note = fit(*given, weight.shape[1])
    return (None if fitted is None else Choice(given.format, fitted)), note


def _with_codes(
    checkpoint: Checkpoint, jobs: dict[str, WeightJob], codes: Codes
) -> tuple[dict[str, WeightJob], dict[str, Tensor]]:
    """Jobs with their codes, and the other tensors that have changed."""
    given_all = codes({job.layer: Choice(job.format, job.rotation) for job in jobs.values()})
    found = {name: q for name, q in given_all.items() if isinstance(q, QuantizedTensor)}
    changed: dict[str, Tensor] = {}
    for name, tensor in given_all.items():
        if isinstance(tensor, Tensor):
            stored = None if name in jobs else checkpoint.tensors.get(name)
            if stored is None or stored.shape != tuple(tensor.shape):
                shape = "none" if stored is None else stored.shape
                raise MismatchError(what=f"the shape of {name}", found=tuple(tensor.shape), expected=shape)
            changed[name] = tensor.to(stored.torch_dtype)
    for job in jobs.values():
        q = found.get(job.layer)
        given = None if q is None else (q.format, q.rotation.to("cpu"), tuple(q.shape), q.scale_layout)
        wanted = (job.format, job.rotation, job.weight.shape, "linear")
        if given is not None and given != wanted:
            raise MismatchError(what=f"the codes of {job.layer}", found=given, expected=wanted)
    return {name: replace(job, quantized=found.get(job.layer)) for name, job in jobs.items()}, changed


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


@dataclass
class _Run:
    """One run of the quantizer: what all its files share."""

    jobs: dict[str, WeightJob]
    changed: dict[str, Tensor]
    record: Record
    layout: Layout
    device: torch.device
    report: Report
    total: int
    progress: Progress | None
    done: int = 0

    def write(self, path: Path, tensors: dict[str, StoredTensor], metadata: dict[str, str]) -> None:
        """Write one file: some tensors as they are, the results of the others."""
        jobs = {name: self.jobs[name] for name in tensors if name in self.jobs}
        results = {name: job.specs(self.layout) for name, job in jobs.items()}
        copied = {name: stored for name, stored in tensors.items() if name not in jobs}
        specs: dict[str, TensorSpec] = dict(copied)
        for result in results.values():
            clash = sorted(specs.keys() & result.keys())
            if clash:
                raise CheckpointError(path=path, rule=f"both the source and the layout use {clash}", fix="rename them")
            specs |= result
        part = self.record.of_file({job.layer for job in jobs.values()}, set(copied))
        header = metadata | self.layout.metadata(part) | {METADATA_KEY: part.to_json()}
        with SafetensorsWriter(path, specs, header) as writer:
            for name, stored in copied.items():
                if name in self.changed:
                    writer.write(name, self.changed[name])
                else:
                    writer.copy(name, stored)
                self.advance(name, stored.nbytes)
            for name, job in jobs.items():
                error = job.write(writer, self.layout, self.device, functools.partial(self.advance, name))
                self.tell(job, error, sum(spec.nbytes for spec in results[name].values()))

    def advance(self, name: str, nbytes: int) -> None:
        """Tell the caller how far the run is."""
        self.done += nbytes
        if self.progress is not None:
            self.progress(name, self.done, self.total)

    def tell(self, job: WeightJob, error: float, nbytes: int) -> None:
        """Put a finished layer into the report."""
        layer = LayerReport(
            name=job.layer,
            shape=job.weight.shape,
            format=job.format.name,
            rotation=str(job.rotation),
            reason=job.note if math.isfinite(error) else f"{job.note} (it holds NaN or Inf)".strip(),
            bytes_before=job.weight.nbytes,
            bytes_after=nbytes,
            error=error,
        )
        self.report.layers.append(layer)


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
