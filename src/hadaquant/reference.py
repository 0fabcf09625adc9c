"""The numerics contract executed in plain torch. It is the CPU backend and every kernel's oracle.

The steps have the names and the order of ``kernels/quantize.py``: front -> rotate -> scale -> encode -> pack.
Each is a correctly rounded float32 operation in a fixed order, on any device torch runs on. No
``alpha=``, ``addcmul`` or ``lerp``, which fuse; no division by a Python scalar, which CUDA replaces
by a reciprocal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from hadaquant import layout
from hadaquant.formats import Format
from hadaquant.formats.scales import block_amax_bits, finite_amax
from hadaquant.front import GELU_CUBIC, GELU_LINEAR, NONE, SUM_RUN, FrontEnd, halvings
from hadaquant.rotation import Rotation, norm, stages

#: Elements worked on at a time, so that the float32 intermediates stay in a cache.
CHUNK = 1 << 18


def front(x: Tensor, front_end: FrontEnd) -> Tensor:
    """The front end of x [..., K] of any float dtype -> float32 [..., K]."""
    rows = x.reshape(-1, x.shape[-1])
    parts = [_front_rows(rows, front_end, part) for part in _row_chunks(*rows.shape)]
    return torch.cat(parts).view(x.shape) if parts else x.to(torch.float32)


def _front_rows(x: Tensor, front_end: FrontEnd, part: slice) -> Tensor:
    """The front end of rows ``part`` of x [M, K]."""
    v = x[part]
    if front_end.kind == "none":
        return v
    v = v.to(torch.float32)
    factor, shift = (_operand(t, x.shape[0], part) for t in front_end.tensors)
    if front_end.kind == "ada_norm":
        v = v - _divide_by(row_sums(v), v.shape[1])[:, None]
    if front_end.sums:
        v = v * _inverse_root(_divide_by(row_sums(v * v), v.shape[1]), front_end.eps or 0.0)[:, None]
    if front_end.kind == "silu_mul":
        v = v / (1.0 + torch.exp(-v))
    if front_end.kind == "gelu_tanh":
        v = v / (1.0 + torch.exp(-(v * (v * v * v.new_full((), GELU_CUBIC) + v.new_full((), GELU_LINEAR)))))
    if factor is not None:
        v = v * (1.0 + factor if front_end.kind == "ada_norm" else factor)
    return v if shift is None else v + shift


def _operand(t: Tensor | None, rows: int, part: slice) -> Tensor | None:
    """The float32 factors or shifts of rows ``part`` of ``rows``, each row of t serving a run of them."""
    if t is None:
        return None
    t = t.reshape(-1, t.shape[-1])
    index = torch.arange(part.start, part.stop, device=t.device) // (rows // t.shape[0])
    return t[index].to(torch.float32)


def row_sums(v: Tensor) -> Tensor:
    """float32 [rows, K] -> [rows], added in the order of the front ends' contract."""
    rows, k = v.shape
    runs = -(-k // SUM_RUN)
    v = torch.nn.functional.pad(v, (0, runs * SUM_RUN - k)).view(rows * runs, SUM_RUN)
    for below in halvings():
        v = _halve(v, below)
    v = torch.nn.functional.pad(v.view(rows, runs), (0, (1 << (runs - 1).bit_length()) - runs))
    while v.shape[1] > 1:
        v = _halve(v, 1)
    return v[:, 0]


def _halve(v: Tensor, below: int) -> Tensor:
    """[rows, n] -> [rows, n/2]: the sums of the pairs that lie ``below`` elements apart."""
    pairs = v.view(v.shape[0], -1, 2, below)
    return (pairs[:, :, 0] + pairs[:, :, 1]).flatten(1)


def _divide_by(v: Tensor, k: int) -> Tensor:
    return v / v.new_full((), k)


def _inverse_root(v: Tensor, eps: float) -> Tensor:
    # torch's float32 root is MKL's on a CPU, one unit off at times; no root of a float32 lies nearer to a midpoint of
    # two than 2**-50, so the float64 root rounds to the right one
    root = (v + v.new_full((), eps)).double().sqrt().to(torch.float32)
    return torch.ones_like(root) / root


def rotate(x: Tensor, rotation: Rotation, inverse: bool = False) -> Tensor:
    """x · R along the last dimension, or x · Rᵀ: [..., K] of any float dtype -> float32 [..., K]."""
    if rotation.kind == "none" or x.numel() == 0:
        return x.to(torch.float32)
    if rotation.kind == "matrix":
        return _rotate_matrix(x.to(torch.float32), rotation, inverse)
    g = rotation.group
    rows = x.reshape(-1, g)
    out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    for part in _row_chunks(rows.shape[0], g):
        # a copy with one group a column: every stage then runs along whole contiguous rows
        v = torch.empty(g, part.stop - part.start, dtype=torch.float32, device=x.device).copy_(rows[part].T)
        if rotation.signs is not None and not inverse:
            v *= rotation.signs[:, None]
        for radix, stride in stages(g):
            _butterfly(v, rotation.kind, radix, stride)
        torch.mul(v.T, norm(g), out=out[part])
        if rotation.signs is not None and inverse:
            out[part] *= rotation.signs
    return out.view(x.shape)


def _butterfly(v: Tensor, kind: str, radix: int, stride: int) -> None:
    """One stage of [g, columns] in place, digits ``stride`` rows apart. Additions and subtractions only."""
    digits = v.view(v.shape[0] // (radix * stride), radix, stride, v.shape[1])
    if radix == 2:
        x0, x1 = digits.unbind(1)
        difference = x0 - x1
        x0 += x1
        x1.copy_(difference)
        return
    x0, x1, x2, x3 = digits.unbind(1)
    a, b, c, d = x0 + x1, x2 + x3, x0 - x1, x2 - x3
    if kind == "sylvester":
        pairs = ((a, b, x0, x2), (c, d, x1, x3))
    else:
        pairs = ((a, d, x0, x1), (b, c, x2, x3))
    for p, q, plus, minus in pairs:
        torch.add(p, q, out=plus)
        torch.sub(p, q, out=minus)


def _rotate_matrix(x: Tensor, rotation: Rotation, inverse: bool) -> Tensor:
    matrix = rotation.dense_like(x)
    m = matrix.T if inverse else matrix
    return (x.reshape(-1, rotation.group) @ m).view(x.shape)


def amax(x: Tensor, rotation: Rotation, front_end: FrontEnd = NONE) -> Tensor:
    """Largest finite magnitude of the rotated tensor: a float32 scalar, 0 if there is none."""
    found = torch.zeros((), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return found
    rows = x.reshape(-1, x.shape[-1])
    for part in _row_chunks(*rows.shape):
        found = torch.maximum(found, finite_amax(rotate(_front_rows(rows, front_end, part), rotation)))
    return found


def quantize(
    x: Tensor,
    format: Format,
    rotation: Rotation,
    global_scale: Tensor | None,
    scale_layout: str = "linear",
    front_end: FrontEnd = NONE,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [..., K] by the format's contract."""
    rows = x.reshape(-1, x.shape[-1])
    codes = torch.empty(format.codes_shape(tuple(rows.shape)), dtype=format.element.codes_dtype, device=x.device)
    scales = torch.empty(format.scales_shape(tuple(rows.shape)), dtype=format.scale.dtype, device=x.device)
    for part in _row_chunks(*rows.shape):
        v = _front_rows(rows, front_end, part)
        codes[part], scales[part] = _quantize_rows(v, format, rotation, global_scale)
    if scale_layout == "tiled":
        scales = layout.tile_scales(scales)
    else:
        scales = scales.view(format.scales_shape(tuple(x.shape)))
    return codes.view(format.codes_shape(tuple(x.shape))), scales


def _quantize_rows(x: Tensor, format: Format, rotation: Rotation, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    y = rotate(x, rotation)
    blocks = _blocks(y, format)
    scales = format.scale.choose(block_amax_bits(blocks), global_scale)
    codes = encode(blocks, divisor(scales, format, global_scale).unsqueeze(-1), format).view(y.shape)
    return (layout.pack_nibbles(codes) if format.element.packed else codes), scales


def divisor(scales: Tensor, format: Format, global_scale: Tensor | None) -> Tensor:
    """What a block's elements are divided by: its multiplier, or 1.0 where that is 0."""
    m = format.scale.multiplier(scales, global_scale)
    return torch.where(m == 0, torch.ones_like(m), m)


def encode(y: Tensor, divisor: Tensor, format: Format) -> Tensor:
    """Codes of y / divisor. A NaN divisor marks a block that holds NaN or Inf: its codes are 0."""
    return format.element.encode(y / divisor, y)


def _blocks(y: Tensor, format: Format) -> Tensor:
    return y.view(y.shape[0], -1, format.block) if format.block else y


def rotate_round(x: Tensor, rotation: Rotation, front_end: FrontEnd = NONE, by_nibble: bool = False) -> Tensor:
    """bfloat16 [..., K] of x · R after its front end: float32 throughout, rounded once, to nearest, ties to even.

    ``by_nibble``: in the order of ``layout.by_nibble``, in which a kernel may read it.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=torch.bfloat16, device=x.device)
    for part in _row_chunks(*rows.shape):
        out[part] = rotate(_front_rows(rows, front_end, part), rotation)
    return layout.by_nibble(out.view(x.shape)) if by_nibble else out.view(x.shape)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    format: Format,
    rotation: Rotation,
    scale_layout: str = "linear",
) -> Tensor:
    """float32 values [..., K] in the original basis."""
    y = decode(codes, scales, global_scale, format, scale_layout)
    return rotate(y, rotation, inverse=True)


def decode(
    codes: Tensor, scales: Tensor, global_scale: Tensor | None, format: Format, scale_layout: str = "linear"
) -> Tensor:
    """float32 values [..., K] in the rotated basis: RN(code · multiplier)."""
    unpacked = layout.unpack_nibbles(codes) if format.element.packed else codes
    k, rows = unpacked.shape[-1], unpacked[..., 0].numel()
    blocks = format.blocks(k)
    if scale_layout == "tiled":
        scales = layout.untile_scales(scales, rows, blocks)
    m = format.scale.multiplier(scales.reshape(rows, blocks), global_scale)
    values = format.element.decode(unpacked).view(rows, blocks, k // blocks)
    return (values * m.unsqueeze(-1)).view(unpacked.shape)


def _row_chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def scaled_mm(
    x_codes: Tensor,
    x_scales: Tensor,
    x_global: Tensor | None,
    w_codes: Tensor,
    w_scales: Tensor,
    w_global: Tensor | None,
    format: Format,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """x · Wᵀ + bias of two quantized matrices [M, K] and [N, K], scales linear: [M, N].

    INT8 is exact: RN_out(((float(acc) · sx) · sw) + bias). FP4 multiplies code · scale, exact in
    bfloat16, into float32, then the product of the two global scales, then the bias.
    """
    if format.block is None:
        acc = int8_matmul(x_codes, w_codes).to(torch.float32)
        y = acc.mul_(x_scales[:, None]).mul_(w_scales[None, :])
    else:
        x, w = (_scaled_codes(c, s, format) for c, s in ((x_codes, x_scales), (w_codes, w_scales)))
        y = x @ w.T
        if x_global is not None and w_global is not None:
            y *= x_global * w_global
    if bias is not None:
        y += bias.to(torch.float32)
    return y.to(out_dtype)


def weight_mm(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_global: Tensor | None,
    format: Format,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """x · Wᵀ + bias of bfloat16 x [M, K] that is not coded and a quantized matrix [N, K], scales linear: [M, N].

    What stands for a weight in the product, code · block scale, or the code where a row has one scale, is exact in
    bfloat16. Products are summed in float32 in any order; then one multiply by the global scale or by the row's
    scale, then the bias, each rounded to float32, then the rounding to ``out_dtype``.
    """
    if format.block is None:
        y = (x.to(torch.float32) @ w_codes.to(torch.float32).T).mul_(w_scales[None, :])
    else:
        y = x.to(torch.float32) @ _scaled_codes(w_codes, w_scales, format).T
        if w_global is not None:
            y *= w_global
    if bias is not None:
        y += bias.to(torch.float32)
    return y.to(out_dtype)


def _scaled_codes(codes: Tensor, scales: Tensor, format: Format) -> Tensor:
    """code · block scale in float32, without the global scale. At most six significant bits."""
    return decode(codes, scales, scales.new_ones((), dtype=torch.float32), format)


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Exact int32 product a · bᵀ of int8 matrices [M, K] and [N, K].

    torch._int_mm where it has proved itself on this machine, else float32 products over K-chunks
    that float32 holds exactly.
    """
    a, b = a.contiguous(), b.contiguous()
    m, k = a.shape
    if a.device.type == "cpu" and m and b.shape[0] and k >= 2 and int_mm_is_exact():
        return torch._int_mm(a, b.T)
    return _chunked_matmul(a, b)


#: 128 · 128 · 1024 = 2**24: below it every partial sum of int8 products is an exact float32.
EXACT_FP32_K = 1024


def _chunked_matmul(a: Tensor, b: Tensor) -> Tensor:
    acc = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    for k in range(0, a.shape[1], EXACT_FP32_K):
        part = slice(k, k + EXACT_FP32_K)
        # int8 is exact in TF32 and bfloat16 too, so no precision setting of torch can change this
        acc += (a[:, part].to(torch.float32) @ b[:, part].to(torch.float32).T).to(torch.int32)
    return acc


@functools.cache
def int_mm_is_exact() -> bool:
    """Whether torch._int_mm gives exact products here: without VNNI it saturates int16 pairs.

    Asked once a process: all ±127, and random codes, against the float32 chunks.
    """
    gen = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        for m, n, k in ((17, 33, 64), (32, 64, 2048), (1, 16, 15)):
            sign = torch.randint(0, 2, (m, k), generator=gen) * 2 - 1
            cases = (
                (torch.full((m, k), 127), torch.full((n, k), 127)),
                (torch.full((m, k), -127), torch.full((n, k), 127)),
                (sign * 127, torch.full((n, k), 127)),
                tuple(torch.randint(-128, 128, (rows, k), generator=gen) for rows in (m, n)),
            )
            if not all(_int_mm_agrees(a.to(torch.int8), b.to(torch.int8)) for a, b in cases):
                return False
    return True


def _int_mm_agrees(a: Tensor, b: Tensor) -> bool:
    try:
        return torch.equal(torch._int_mm(a, b.T), _chunked_matmul(a, b))
    except RuntimeError:  # not implemented here
        return False
