"""hadaquant explain: which kernels a linear would run, without running it."""

from __future__ import annotations

import typer

import hadaquant as hq
from hadaquant.cli.output import rotation_spec


def explain(
    format: str = typer.Argument(help="int8, nvfp4, mxfp4, mxfp4-ceil or mxfp4-even."),
    m: int = typer.Argument(help="M, the rows of the input: tokens in a batch."),
    n: int = typer.Argument(help="N, the linear's out_features."),
    k: int = typer.Argument(help="K, the linear's in_features."),
    target: str = typer.Option("sm_90", help="Hardware: cpu, sm_80 … sm_120, gfx942, gfx950. It need not be here."),
    rotation: str = typer.Option("none", help="none, sylvester:G or regular:G."),
    activations: str = typer.Option("coded", help="coded, or full where weights alone are quantized."),
    backend: str = typer.Option("auto", help="auto, reference, triton, cublas, bf16 or sgl."),
) -> None:
    """Say which kernels a linear would run on a target, and why not the others.

    Example: hadaquant explain int8 4096 3072 3072 --target sm_90 --rotation regular:256
    """
    typer.echo(
        hq.explain(format, m, n, k, target, rotation=rotation_spec(rotation), activations=activations, backend=backend)
    )
