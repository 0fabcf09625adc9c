"""Contests of ``gemm``, a product of quantized matrices, and ``linear``, which quantizes its input first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from hadaquant import reference
from hadaquant.bench import peers, unfused
from hadaquant.bench.cases import Case
from hadaquant.bench.contest import Contest, Variant, buffers, differing, far
from hadaquant.bench.timing import timings_of
from hadaquant.formats import get_format
from hadaquant.layout import tile_scales
from hadaquant.nn import RotatedLinear
from hadaquant.ops import quantize, scaled_mm
from hadaquant.ops.target import target_of
from hadaquant.rotation import parse
from hadaquant.tensor import QuantizedTensor

DTYPE = torch.bfloat16
#: So many weights of a decoder's size are far more than a cache holds, also of FP4.
MOST_WEIGHTS = 24
#: Rows whose answer the CPU is asked for too.
CPU_ROWS = 8
#: Most rows of a product of FP4 that is computed again in float64.
WIDE_ROWS = 64


def gemm(case: Case, device: torch.device) -> Contest:
    """The product of x [M, K] and w [N, K], both quantized, scales in the epilogue, against torch's bfloat16."""
    m, n, k = case.shape
    f, r = get_format(case.format), parse(case.rotation)
    count = buffers(device, f.nbytes((m, k)) + f.nbytes((n, k)) + 2 * m * n, most=MOST_WEIGHTS)

    def dense(rows: int) -> Tensor:
        return torch.randn(rows, k, device=device, dtype=DTYPE)

    pairs = [(quantize(dense(m), f, rotation=r), quantize(dense(n), f, rotation=r)) for _ in range(count)]

    def ours() -> Variant:
        calls = [partial(scaled_mm, x, w, None, DTYPE) for x, w in pairs]
        return Variant(calls, lambda: _check_product(calls[0](), *pairs[0]))

    def int8(function: Callable[..., Tensor], *arguments: object, mine: bool = True) -> Variant:
        calls = [partial(function, x.codes, x.scales, w.codes, w.scales, DTYPE, *arguments) for x, w in pairs]
        right = partial(scaled_mm, *pairs[0], None, DTYPE, backend="reference")
        exact = lambda: differing([calls[0]()], [right()])  # noqa: E731
        return Variant(calls, exact if mine else lambda: far(calls[0](), right(), 2.0**-8), mine)

    def plain_triton(any_tile: bool) -> Variant:
        from hadaquant.bench.baselines import product

        x, w = pairs[0]
        tile = product.fastest_tile(x.codes, x.scales, w.codes, w.scales, DTYPE, any_tile)
        return int8(product.int8_mm, tile)

    def cublas() -> Variant:
        unfused.check_int_mm(m)
        return int8(unfused.scaled_int_mm)

    def torch_bf16() -> Variant:
        return Variant([partial(lambda x, w: x @ w.T, dense(m), dense(n)) for _ in range(count)])

    def fp4_units() -> Variant:
        tiled = [[replace(q, scales=tile_scales(q.scales), scale_layout="tiled") for q in pair] for pair in pairs]
        calls = [partial(scaled_mm, x, w, None, DTYPE, backend="cublas") for x, w in tiled]
        return Variant(calls, lambda: _check_product(calls[0](), *pairs[0]))

    variants: dict[str, Callable[[], Variant]] = {"ours": ours, "torch_bf16": torch_bf16}
    if f.block is not None and device.type == "cuda" and target_of(device).fp4_units:
        variants["cublas"] = fp4_units
    if f.block is None and device.type == "cuda":
        variants["plain_triton"] = partial(plain_triton, any_tile=False)
        variants["plain_triton_tuned"] = partial(plain_triton, any_tile=True)
        variants["cublas"] = cublas
        variants["sgl"] = lambda: int8(peers.sgl_int8_mm(), mine=False)
    nbytes = f.nbytes((m, k)) + f.nbytes((n, k)) + 2 * m * n
    return Contest(variants, timings_of(device), bytes=nbytes, flops=2 * m * n * k)


def linear(case: Case, device: torch.device) -> Contest:
    """A RotatedLinear of weight [N, K] on x [M, K], which it rotates and quantizes, against nn.Linear in bfloat16."""
    m, n, k = case.shape
    f, r = get_format(case.format), parse(case.rotation)
    nbytes = 2 * m * k + f.nbytes((n, k)) + 2 * m * n
    count = buffers(device, nbytes, most=MOST_WEIGHTS)
    xs = [torch.randn(m, k, device=device, dtype=DTYPE) for _ in range(count)]
    dense = [nn.Linear(k, n, bias=False, dtype=DTYPE, device=device) for _ in range(count)]
    static = quantize(xs[0], f, rotation=r).global_scale if f.has_global_scale else None
    given = None if static is None else static.item()

    def quantized(layer: nn.Linear, backend: str = "auto") -> RotatedLinear:
        return RotatedLinear.from_linear(layer, f, r, input_global_scale=given, backend=backend)

    layers = [quantized(layer) for layer in dense]

    def over(functions: list[Callable[[Tensor], Tensor]]) -> list[Callable[[], Tensor]]:
        return [partial(function, x) for function, x in zip(functions, xs, strict=True)]

    def ours() -> Variant:
        return Variant(over([*layers]), lambda: check_linear(layers[0], quantized(dense[0], "reference"), xs[0]))

    def full() -> Variant:
        layers = [RotatedLinear.from_linear(layer, f, r, activations="full") for layer in dense]
        return Variant(over([*layers]), lambda: _check_full(layers[0], xs[0]))

    def torch_compile() -> Variant:
        unfused.check_int_mm(m)
        matrix = None if r.kind == "none" else r.dense().to(device, DTYPE)
        function = unfused.compiled(unfused.linear_int8)
        calls = [partial(function, x, matrix, w.codes, w.scales) for x, w in zip(xs, layers, strict=True)]
        return Variant(calls, lambda: far(calls[0](), dense[0](xs[0]), 0.03))

    def comfy() -> Variant:
        calls = over([peers.comfy_linear(w.codes, w.scales, r.group) for w in layers])
        return Variant(calls, lambda: far(calls[0](), dense[0](xs[0]), 0.03), ours=False)

    variants: dict[str, Callable[[], Variant]] = {"ours": ours, "torch_bf16": lambda: Variant(over([*dense]))}
    if f.block is not None:
        variants["ours_full"] = full
    if f.block is None and device.type == "cuda":
        variants["torch_compile"] = torch_compile
        if r.kind == "regular" and r.group in (64, 256):
            variants["comfy"] = comfy
    return Contest(variants, timings_of(device), bytes=nbytes, flops=2 * m * n * k)


def check_linear(layer: RotatedLinear, oracle: RotatedLinear, x: Tensor) -> str | None:
    """INT8: the reference's bits on this device for all rows, and the CPU's for a few. FP4: as near as torch."""
    few = x[:CPU_ROWS]
    if layer.format.block is None:
        wrong = differing([layer(x)], [oracle(x)])
        return wrong or differing([layer(few)], [oracle.cpu()(few.cpu())])
    weight = layer.quantized_weight()
    wrong = differing([weight.codes, weight.scales], [oracle.codes, oracle.scales])
    x = x[:WIDE_ROWS]
    q = quantize(x, layer.format, rotation=layer.rotation, global_scale=layer.input_global_scale)
    return wrong or _check_product(layer(x), q, weight)


def _check_product(y: Tensor, x: QuantizedTensor, w: QuantizedTensor) -> str | None:
    """INT8: the reference's bits. FP4: against float64 at most twice the error of torch's own float32 product."""
    right = scaled_mm(x, w, None, y.dtype, backend="reference")
    if x.format.block is None:
        return differing([y], [right])
    a, b = (reference.decode(q.codes, q.scales, q.global_scale, q.format).double() for q in (x, w))
    return _against_torch(y[:WIDE_ROWS], right[:WIDE_ROWS], a[:WIDE_ROWS] @ b.T)


def _check_full(layer: RotatedLinear, x: Tensor) -> str | None:
    """Against float64 at most twice the error of torch's own float32 product, inputs rounded as the contract says."""
    h, w = reference.rotate_round(x[:WIDE_ROWS], layer.rotation), layer.quantized_weight()
    right = reference.weight_mm(h, w.codes, w.scales, w.global_scale, w.format, None, DTYPE)
    wide = h.double() @ reference.decode(w.codes, w.scales, w.global_scale, w.format).double().T
    return _against_torch(layer(x)[:WIDE_ROWS], right, wide)


def _against_torch(y: Tensor, right: Tensor, wide: Tensor) -> str | None:
    error, allowed = (torch.linalg.vector_norm(t.double() - wide).item() for t in (y, right))
    return None if error <= 2 * allowed else f"its error is {error / allowed:.2f} times that of torch's float32 product"
