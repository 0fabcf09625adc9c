"""Front ends to test with, and how near to a boundary a code must be that another exp may change."""

import math

import torch

import hadaquant as hq
from hadaquant import front, layout, reference
from hadaquant.rotation import Rotation

#: Unit roundoff of float32.
U = 2.0**-24


def norms(x: torch.Tensor, dtype: torch.dtype) -> dict[str, hq.FrontEnd]:
    """Norms of x [B, ..., K] with every way to give their tensors."""
    k, gen = x.shape[-1], torch.Generator().manual_seed(3)
    w = torch.randn(k, generator=gen).to(dtype)
    both = torch.randn(x.shape[0], 2 * k, generator=gen).to(dtype).chunk(2, -1)
    return {
        "rms_norm": front.rms_norm(None, 1e-5),
        "rms_norm with weight": front.rms_norm(w),
        "ada_norm": front.ada_norm(w, w.flip(0).float()),
        "ada_norm of batches": front.ada_norm(*both),  # type: ignore[misc]
    }


def on(front_end: hq.FrontEnd, device: str) -> hq.FrontEnd:
    """A front end with its tensors on a device, strides kept."""

    def moved(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None or t.device.type == device:
            return t
        whole = t if t._base is None else t._base
        return torch.as_strided(whole.to(device), t.shape, t.stride(), t.storage_offset())

    return hq.FrontEnd(front_end.kind, front_end.eps, *map(moved, front_end.tensors))


def error_bound(x: torch.Tensor, front_end: hq.FrontEnd, rotation: Rotation) -> torch.Tensor:
    """float64 [M, K]: how far two computations of the rotated front end of x [M, K] may lie apart."""
    wide, up = x.double(), torch.ones_like(x, dtype=torch.float64)
    z = wide
    if front_end.kind == "gelu_tanh":
        z = wide * (wide * wide * front.GELU_CUBIC + front.GELU_LINEAR)
    if front_end.factor is not None:
        up = front_end.factor.reshape(x.shape).double()
    y = wide * torch.sigmoid(z) * up
    error = front.EXP_ERROR * (1 + z.abs()) * y.abs() + 2.0**-126 * (wide * up).abs()
    g = rotation.group
    # a butterfly of g numbers adds log2(g) times and multiplies once, each time rounding what is no larger than the
    # sum of all magnitudes; both computations do so
    rounding = 2 * (math.log2(g) + 1) * U * y.abs() if g > 1 else torch.zeros_like(y)
    summed = (error + rounding).view(-1, g).sum(1) / math.sqrt(g)
    return summed.repeat_interleave(g).view(x.shape)


def check_explained(
    ours: hq.QuantizedTensor, oracle: hq.QuantizedTensor, x: torch.Tensor, front_end: hq.FrontEnd
) -> tuple[int, int]:
    """Refuse a scale or code that differs farther from a boundary than exp explains; how many of each differ."""
    f, rotation = oracle.format, oracle.rotation
    x = x.reshape(-1, x.shape[-1]).cpu()
    front_end = on(front_end, "cpu")
    if front_end.factor is not None:
        front_end = hq.FrontEnd(front_end.kind, None, front_end.factor.reshape(x.shape))
    y = reference.rotate(reference.front(x, front_end), rotation)
    blocks = (len(x), f.blocks(x.shape[1]), -1)
    distance = error_bound(x, front_end, rotation).view(blocks)
    y = y.view(blocks)
    unpack = layout.unpack_nibbles if f.element.packed else (lambda c: c)
    codes = [f.element.decode(unpack(q.codes.cpu())).view(blocks).double() for q in (ours, oracle)]
    scales = [q.scales.cpu().view(blocks[:2]) for q in (ours, oracle)]
    amax, farthest = y.abs().amax(-1), distance.amax(-1)
    low, high = ((amax + sign * farthest * 1.0001).float().clamp(min=0) for sign in (-1, 1))
    if f.block is None:
        m = scales[1].double()
        apart = farthest / 127 + 2 * U * m
        assert ((scales[0].double() - m).abs() <= apart).all()
        same = torch.ones_like(scales[0], dtype=torch.bool)
    else:
        g = oracle.global_scale
        edges = [f.scale.choose(a.view(torch.int32), g) for a in (low, high)]
        same = scales[0] == scales[1]
        assert (same | (edges[0] != edges[1])).all(), "a scale differs away from its boundaries"
        assert ((edges[0] <= scales[0]) & (scales[0] <= edges[1])).all()
        m, apart = reference.divisor(scales[1], f, g).double(), torch.zeros_like(farthest)
    quotient = y.double() / m.unsqueeze(-1)
    slack = (distance + quotient.abs() * apart.unsqueeze(-1)) / m.unsqueeze(-1) + 2 * U * quotient.abs()
    middle = (codes[0] + codes[1]) / 2
    fine = (codes[0] == codes[1]) | ((quotient - middle).abs() <= slack) | ~same.unsqueeze(-1)
    assert fine.all(), f"{(~fine).sum().item()} codes differ away from their boundaries"
    return int((scales[0] != scales[1]).sum()), int((codes[0] != codes[1]).sum())
