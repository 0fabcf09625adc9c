"""Contests of ``rotate_quantize`` and ``front_end``: what makes a linear's input, bound by memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hadaquant import front, reference
from hadaquant.bench import peers, unfused
from hadaquant.bench.cases import Case
from hadaquant.bench.contest import Contest, Variant, buffers, copies, differing, far, parts
from hadaquant.bench.timing import timings_of
from hadaquant.formats import Format, get_format
from hadaquant.ops import quantize
from hadaquant.rotation import Rotation, parse
from hadaquant.tensor import QuantizedTensor

#: Rows whose answer the CPU is asked for too.
CPU_ROWS = 8
#: Formats that the plain ways are written for.
PLAIN_FORMATS = ("int8", "nvfp4", "mxfp4")
#: An unfused way rounds the rotated numbers to 16 bits: how much larger than ours its error may be.
PLAIN_ERROR = 1.1


def rotate_quantize(case: Case, device: torch.device) -> Contest:
    """Rotate and quantize x [M, K], against a copy of as many bytes, and against ways without fusion."""
    m, k = case.shape
    f, r = get_format(case.format), parse(case.rotation)
    nbytes = m * k * 2 + f.nbytes((m, k))
    xs = [torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(buffers(device, nbytes))]
    g = quantize(xs[0], f, rotation=r).global_scale  # given, as a layer with a static scale has it

    def ours(**options: Any) -> Variant:
        options = {"rotation": r, "global_scale": g, **options}
        calls = [partial(quantize, x, f, **options) for x in xs]

        def check() -> str | None:
            oracle = parts(quantize(xs[0], f, **options, backend="reference"))
            wrong = differing(parts(calls[0]()), oracle)
            few = xs[0][:CPU_ROWS]
            on_cpu = parts(quantize(few.cpu(), f, **options, backend="reference"))
            return wrong or differing(parts(quantize(few, f, **options)), on_cpu)

        return Variant(calls, check)

    def plain(function: Callable[..., tuple[Tensor, Tensor]], *arguments: Any, mine: bool = True) -> Variant:
        calls = [partial(function, x, *arguments) for x in xs]

        def check() -> str | None:
            codes, scales = calls[0]()
            return as_good(codes, scales.view(torch.uint8) if f.block else scales, g, xs[0], f, r)

        return Variant(calls, check, mine)

    def matrix() -> Tensor | None:
        return None if r.kind == "none" else r.dense().to(device, torch.bfloat16)

    variants: dict[str, Callable[[], Variant]] = {"ours": ours, "copy": lambda: copies(device, nbytes)}
    if f.has_global_scale:
        variants["ours_dynamic"] = partial(ours, global_scale=None)
    if f.block:
        variants["ours_tiled"] = partial(ours, scale_layout="tiled")
    if f.name in PLAIN_FORMATS and device.type == "cuda":
        from hadaquant.bench.baselines import rows

        variants["torch_compile"] = lambda: plain(unfused.compiled(unfused.quantize), matrix(), f, g)
        variants["plain_triton"] = lambda: plain(rows.three_kernels, matrix(), f, g)
        if f.block and r.group in (1, f.block):
            variants["plain_triton_fused"] = lambda: plain(rows.fused, matrix(), f, g)
    if f.name == "int8" and r.spec == "regular:256" and device.type == "cuda":
        variants["comfy"] = lambda: plain(peers.comfy_rotate_quantize(), r.group, mine=False)
    return Contest(variants, timings_of(device), bytes=nbytes)


def as_good(
    codes: Tensor, scales: Tensor, g: Tensor | None, x: Tensor, f: Format, r: Rotation, rows: int = 256
) -> str | None:
    """Whether codes and scales of x, made some other way, come about as near to x as ours."""
    x, r = x[:rows], r.to(x.device)
    right = x.to(torch.float32)
    ours = quantize(x, f, rotation=r, global_scale=g, backend="reference").dequantize()
    error = (torch.linalg.vector_norm(ours - right) / torch.linalg.vector_norm(right)).item()
    scales = scales.view(f.scales_shape((codes.shape[0], f.k_of(codes.shape[1]))))
    found = QuantizedTensor(codes[:rows], scales[:rows], g, f, r).dequantize()
    return far(found, right, PLAIN_ERROR * error)


def front_end(case: Case, device: torch.device) -> Contest:
    """A front end, rotate and quantize in one kernel, against a copy of as many bytes and against two steps."""
    m, k = case.shape
    f, r, kind = get_format(case.format), parse(case.rotation), case.front_end or "rms_norm"
    reads = 2 if kind == "silu_mul" else 1
    nbytes = m * k * 2 * reads + f.nbytes((m, k))

    def tensors() -> tuple[Tensor, ...]:
        shape = {"rms_norm": [(k,)], "ada_norm": [(k,), (k,)], "silu_mul": [(m, k)], "gelu_tanh": []}[kind]
        return tuple(torch.randn(s, device=device, dtype=torch.bfloat16) for s in shape)

    inputs = [
        (torch.randn(m, k, device=device, dtype=torch.bfloat16), tensors()) for _ in range(buffers(device, nbytes))
    ]
    make = getattr(front, kind)
    g = quantize(inputs[0][0], f, rotation=r, front_end=make(*inputs[0][1])).global_scale

    def fused(x: Tensor, given: tuple[Tensor, ...], **options: Any) -> QuantizedTensor:
        return quantize(x, f, rotation=r, front_end=make(*given), global_scale=g, **options)

    def ours() -> Variant:
        def check() -> str | None:
            x, given = inputs[0]
            found = fused(x, given)
            if kind in front.NORMS:
                return differing(parts(found), parts(fused(x, given, backend="reference")))
            return _near(found, x, make(*given), r)

        return Variant([partial(fused, x, given) for x, given in inputs], check)

    def two_steps(step: Callable[..., Tensor]) -> Variant:
        def both(x: Tensor, given: tuple[Tensor, ...]) -> QuantizedTensor:
            return quantize(step(kind, x, given), f, rotation=r, global_scale=g)

        return Variant([partial(both, *i) for i in inputs])

    def compiled() -> Variant:
        matrix = None if r.kind == "none" else r.dense().to(device, torch.bfloat16)
        whole = unfused.compiled(lambda x, given: unfused.quantize(unfused.front_end(kind, x, given), matrix, f, g))
        return Variant([partial(whole, *i) for i in inputs])

    variants: dict[str, Callable[[], Variant]] = {"ours": ours, "copy": lambda: copies(device, nbytes)}
    if device.type == "cuda":
        variants["torch_then_ours"] = lambda: two_steps(unfused.front_end)
        variants["torch_compile"] = compiled
    return Contest(variants, timings_of(device), bytes=nbytes)


def _near(found: QuantizedTensor, x: Tensor, front_end: front.FrontEnd, r: Rotation) -> str | None:
    """None if every int8 code is explained: exp is a library's, so y is known up to an error, which the rotation
    spreads over a group; a code may be any that a number that far from y rounds to.
    """
    y, x = reference.front(x, front_end), x.float()
    z = x if front_end.kind == "silu_mul" else x * (x * x * front.GELU_CUBIC + front.GELU_LINEAR)
    most = x if front_end.factor is None else x * front_end.factor
    error = front.EXP_ERROR * (1 + z.abs()) * y.abs() + 2.0**-126 * most.abs()
    group = error.view(-1, r.group).sum(1, keepdim=True).expand(-1, r.group).reshape(x.shape) / r.group**0.5
    rotated = reference.rotate(y, r)
    group = group + 2.0**-20 * rotated.abs().amax(1, keepdim=True)  # of the butterflies' own float32 steps
    scale = rotated.abs().amax(1).clamp(min=1e-12) / 127
    slack = group.amax(1) / 127
    if bool(((found.scales - scale).abs() > slack + 2.0**-22 * scale).any()):
        return "a scale is further off than the error of exp explains"
    off = (found.codes.float() - rotated / scale[:, None]).abs()
    allowed = 0.5 + group / scale[:, None] + 127 * (slack / scale)[:, None] + 2.0**-16
    wrong = int((off > allowed).sum())
    return f"{wrong} of {off.numel()} codes are not explained by the error of exp" if wrong else None
