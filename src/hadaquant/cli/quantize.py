"""hadaquant quantize: rotate and quantize the linears of a checkpoint."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from hadaquant.calibrate import METHODS
from hadaquant.checkpoint import CheckpointReport, quantize_checkpoint
from hadaquant.checkpoint.contents import number_free
from hadaquant.checkpoint.model_plan import ModelPlan
from hadaquant.cli.calibration import Calibration
from hadaquant.cli.output import check_output, console, log_progress, number, print_table, rotation_spec, size
from hadaquant.errors import UnknownChoice
from hadaquant.nn import LayerReport
from hadaquant.nn.select import DEFAULT_SKIP
from hadaquant.study.report import counted


def quantize(
    source: str = typer.Argument(help="A model folder in the style of Hugging Face, or a .safetensors file."),
    out: str = typer.Argument(help="What to write; it must not exist. One file if it ends in .safetensors."),
    format: str | None = typer.Option(None, help="int8, nvfp4, mxfp4, mxfp4-ceil or mxfp4-even."),
    rotation: str | None = typer.Option(None, help="none, sylvester:G or regular:G, for example regular:256."),
    plan: Path | None = typer.Option(
        None, metavar="FILE", help="plan.json of a study of this model, in place of --format, --rotation and --skip."
    ),
    skip: list[str] = typer.Option(
        list(DEFAULT_SKIP),
        metavar="PATTERN",
        help="Layers to keep: whole dotted parts of a name such as layers.0 or mlp.*, or re:REGEX, which must match "
        "the whole name: re:.*down_proj. May be repeated; replaces the default.",
    ),
    weights: str = typer.Option(
        "rtn", help=f"How weights get their codes: {', '.join(METHODS)}. All but rtn, the nearest, need --calibration."
    ),
    calibration: Path | None = typer.Option(
        None, metavar="TEXT", help="UTF-8 text that the model is run on. Never one that it is evaluated on."
    ),
    windows: int = typer.Option(64, min=1, help="Windows of 512 tokens of the calibration text."),
    gains: int = typer.Option(
        0, min=0, metavar="STEPS", help="Fit the norms' gains to the full model on the calibration text; 48 is enough."
    ),
    activations: str = typer.Option(
        "coded", help="coded, in the weights' format too; or full: 16 bits, weights alone are quantized."
    ),
    layout: str = typer.Option("native", help="native, or comfy for ComfyUI (int8 with none or regular:G)."),
    device: str = typer.Option("cpu", help="Where the arithmetic runs: cpu or cuda. The bytes are the same."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="List every layer, not every kind of layers."),
    json_file: Path | None = typer.Option(None, "--json", metavar="FILE", help="Write the report there as JSON too."),
) -> None:
    """Rotate and quantize the linears of a checkpoint, tensor by tensor.

    Everything else is copied bit for bit. The model is never in memory whole, unless it is calibrated, and OUT appears
    only when it is complete.

    Example: hadaquant quantize SmolLM2-135M SmolLM2-135M-int8 --format int8 --rotation regular:256, or --plan plan.json
    """
    errors = console(stderr=True)
    missing = [name for name, value in (("--format", format), ("--rotation", rotation)) if value is None]
    if plan is None and missing:
        raise typer.BadParameter(f"{' and '.join(missing)} not given; give --format and --rotation, or --plan")
    if plan is not None and rotation is not None:
        raise typer.BadParameter("--plan says the rotations; leave --rotation out")
    if weights not in METHODS:
        raise UnknownChoice(what="method of --weights", value=weights, choices=", ".join(METHODS))
    rotation = None if rotation is None else rotation_spec(rotation)
    if (weights == "rtn" and not gains) != (calibration is None):
        raise typer.BadParameter("--weights other than rtn, or --gains, and --calibration TEXT go together")
    check_output(json_file)
    with (
        _ending_politely(),
        Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=errors,
            transient=True,
            disable=not errors.is_terminal,
        ) as bar,
    ):
        task, log = bar.add_task("reading"), log_progress(errors)

        def progress(name: str, done: int, total: int) -> None:
            bar.update(task, description=number_free(name), completed=done, total=total)
            log(name, done, total)

        def calibrated(name: str, done: int, total: int) -> None:
            bar.update(task, description=f"calibrating {number_free(name)}, {done} of {total}", total=None)
            log(f"calibrating {name}", done, total)

        better = None
        if calibration is not None:
            better = Calibration(source, calibration, weights, windows, device, activations, gains, calibrated)
        report = quantize_checkpoint(
            source,
            out,
            format,
            rotation or "none",
            plan=None if plan is None else ModelPlan.read(plan),
            activations=activations,
            skip=skip,
            layout=layout,
            device=device,
            codes=better,
            calibration=None if better is None else better.record(),
            progress=progress,
        )
    show(report, console(), verbose)
    if better is not None:
        console().print(better.summary())
        for warning in better.warnings():
            errors.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for layer in report.quantized:
        if layer.error is None or layer.error != layer.error:
            errors.print(f"warning: {layer.name} holds NaN or Inf; so will its outputs", style="yellow", soft_wrap=True)


@contextmanager
def _ending_politely() -> Iterator[None]:
    """Let a SIGTERM end the block as an interrupt does, so that nothing half-written stays."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show(report: CheckpointReport, out: Console, verbose: bool = False) -> None:
    """Print a report: quantized layers with their errors, kept ones with the reasons, sizes.

    Layers that differ in the numbers of their names alone share a line, unless ``verbose``.
    """
    columns = "layer", Column("shape", no_wrap=True), "format", "rotation", number("size"), number("error ‖W−Ŵ‖/‖W‖")
    table = Table(columns[0], number("count"), *columns[1:], title="Quantized", title_justify="left")
    kinds: dict[tuple, list[LayerReport]] = {}
    for layer in report.quantized:
        name = layer.name if verbose else number_free(layer.name)
        kinds.setdefault((name, layer.shape, layer.format, layer.rotation, layer.reason), []).append(layer)
    for (name, shape, format, rotation, reason), layers in kinds.items():
        before, after = (sum(getattr(layer, f"bytes_{when}") for layer in layers) for when in ("before", "after"))
        errors = sorted(f"{layer.error:.4f}" for layer in layers)
        table.add_row(
            name if len(layers) > 1 else layers[0].name,
            "" if verbose else str(len(layers)),
            " × ".join(map(str, shape)),
            format,
            f"{rotation} {reason}".strip(),
            f"{size(before)} → {size(after)}",
            " … ".join(dict.fromkeys((errors[0], errors[-1]))),
        )
    print_table(table, markup=False)
    kept = Table("layer", number("count"), number("size"), "reason", title="Kept", title_justify="left")
    groups: dict[tuple[str, str], list[int]] = {}
    for layer in report.kept:
        groups.setdefault((number_free(layer.name), layer.reason), []).append(layer.bytes_after)
    for (name, reason), sizes in groups.items():
        kept.add_row(name, str(len(sizes)), size(sum(sizes)), reason)
    if report.kept:
        print_table(kept, markup=False)
    largest = max(layer.error for layer in report.quantized if layer.error is not None)
    before, after = report.file_bytes_before, report.file_bytes_after
    out.print(f"Linears were recognized by {report.linears}.")
    if report.left_out:
        out.print(f"Weights in other files were left out: {', '.join(report.left_out)}", style="yellow")
    out.print(
        f"{counted(len(report.quantized), 'layer')} quantized, {len(report.kept)} kept; largest error {largest:.4f}; "
        f"{size(before)} → {size(after)} ({after / before:.0%})",
        style="bold",
    )
