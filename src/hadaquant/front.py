"""Front ends: the op that makes a linear's input, done inside the kernel that rotates and quantizes it.

A linear nearly always reads what a norm, a gate or an activation has just written. Given as a front end,
that op runs on the rows as they are loaded, and its result never goes to memory. x is [..., K]:

* ``rms_norm``: x · inv · weight, weight [K] or none.
* ``ada_norm``: LayerNorm without affine, then · (1 + scale) + shift, each [K], or [B, K] for x [B, ..., K].
* ``silu_mul``: silu(x) · up, up of x's shape.
* ``gelu_tanh``: GELU in its tanh form.

The contract, version 1. RN is the rounding of one float32 operation; no two of them are fused.

1.  x and the tensors are widened to float32. Nothing is rounded to 16 bits before the codes: the float32
    result is what is rotated.
2.  A sum over K is a tree. K is padded with zeros to a multiple of 256. Within each run of 256 channels the
    bits of the channel's index are halved in the order 0, 1, 2, 6, 7, 3, 4, 5: each step adds the two numbers
    that differ in that bit. The sums of the runs are padded with zeros to a power of two, and the bits of the
    run's index are halved in ascending order.
3.  inv(v) = RN(1 / RN(sqrt(RN(RN(v / K) + eps)))), v a sum of squares.
4.  ``rms_norm``: y = RN(RN(x · inv) · weight), inv of the sum of RN(x²); without a weight RN(x · inv).
5.  ``ada_norm``: mean = RN(sum of x / K), d = RN(x - mean), inv of the sum of RN(d²), in which padding
    counts 0; y = RN(RN(RN(d · inv) · RN(1 + scale)) + shift).
6.  ``silu_mul``: y = RN(RN(x / RN(1 + exp(-x))) · up).
7.  ``gelu_tanh``: x · sigmoid(2u), u = sqrt(2/pi) · (x + 0.044715 x³), as
    z = RN(x · RN(RN(RN(x · x) · 0x3D922279) + 0x3FCC422A)), y = RN(x / RN(1 + exp(-z))).

4 and 5 give the same bytes everywhere. exp is a library's, and a kernel may use the hardware's exp2 and
reciprocal: behind 6 and 7 a code or scale differs only where the number before rounding lies near a
boundary, no farther than two computed y can lie apart: 2**-20 · (1 + |z|) · |y| + 2**-126 · |x · up|, where z
is x for ``silu_mul`` and up is 1 for ``gelu_tanh``.

Others round in between: transformers' norms return 16 bits before they multiply by the weight, and so
their result differs from ours by up to that rounding.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hadaquant.errors import FrontEndError, UnknownChoice

Kind = Literal["none", "rms_norm", "ada_norm", "silu_mul", "gelu_tanh"]
KINDS: tuple[str, ...] = get_args(Kind)
#: Kinds that sum over a row before they can give its first element, and have an eps.
NORMS = ("rms_norm", "ada_norm")
#: What a kind calls its factor. Only ``rms_norm`` can go without.
FACTORS = {"rms_norm": "weight", "ada_norm": "scale", "silu_mul": "up"}

#: Channels of a run, and the bits of a channel's index in the order in which a sum halves them. A GPU
#: thread that holds bits 0, 1, 2, 6 and 7 of a rotation's first pass begins with what it has.
SUM_RUN = 256
SUM_BITS = (0, 1, 2, 6, 7, 3, 4, 5)

#: GELU's 2 · sqrt(2/pi) and 0.044715 times that, as float32.
GELU_LINEAR = torch.tensor(2.0 * math.sqrt(2.0 / math.pi), dtype=torch.float32, device="cpu").item()
GELU_CUBIC = torch.tensor(0.044715 * 2.0 * math.sqrt(2.0 / math.pi), dtype=torch.float32, device="cpu").item()

#: Relative difference of two computed activations over 1 + |z|, in units of u = 2**-24 at most 15 + 12 |z|: from exp
#: 2u and from exp2 4u, of its argument 2 |z| u, of GELU's z 10 |z| u, from sums, products and quotients the rest.
EXP_ERROR = 2.0**-20


@functools.cache
def halvings() -> tuple[int, ...]:
    """How many elements lie below each halved bit in a run, once the bits before it are gone.

    >>> halvings()
    (1, 1, 1, 8, 8, 1, 1, 1)
    """
    left = sorted(SUM_BITS)
    below = []
    for bit in SUM_BITS:
        below.append(2 ** left.index(bit))
        left.remove(bit)
    return tuple(below)


@dataclass(frozen=True, eq=False)
class FrontEnd:
    """One front end. Made by :func:`rms_norm`, :func:`ada_norm`, :func:`silu_mul`, :func:`gelu_tanh`.

    Args:
        kind: one of ``KINDS``.
        eps: of the norms.
        factor: what is multiplied by: the weight, the scale of ``ada_norm``, or up.
        shift: what ``ada_norm`` adds.

    Raises:
        UnknownChoice: an unknown kind.
        FrontEndError: an eps or a tensor that the kind does not take, or lacks.
    """

    kind: Kind
    eps: float | None = None
    factor: Tensor | None = None
    shift: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownChoice(what="front end", value=self.kind, choices=", ".join(KINDS))
        if self.kind in NORMS:
            self._check_eps()
        elif self.eps is not None:
            raise self._refuse("only the norms have an eps", "leave eps out")
        self._check_tensor(FACTORS.get(self.kind, "factor"), self.factor, self.kind in FACTORS)
        self._check_tensor("shift", self.shift, self.kind == "ada_norm")

    def _check_tensor(self, name: str, tensor: Tensor | None, taken: bool) -> None:
        if tensor is None and taken and self.kind != "rms_norm":
            raise self._refuse(f"it needs its {name}", f"make it by hadaquant.front.{self.kind}(...)")
        if tensor is not None and not taken:
            raise self._refuse(f"it takes no {name}", f"leave {name} out")
        if tensor is not None and not isinstance(tensor, Tensor):
            raise self._refuse(f"its {name} is of type {type(tensor).__name__}", "give a tensor")

    def _check_eps(self) -> None:
        tiny = torch.finfo(torch.float32).smallest_normal
        if not isinstance(self.eps, float) or not tiny <= self.eps < float("inf"):
            raise self._refuse(f"eps is {self.eps}, not a positive number of normal float32 size", "for example 1e-6")

    def _refuse(self, rule: str, fix: str) -> FrontEndError:
        return FrontEndError(value=repr(self.kind), rule=rule, fix=fix)

    @property
    def spec(self) -> str:
        """``kind`` or ``kind:eps`` without the tensors, which travel beside it."""
        return self.kind if self.eps is None else f"{self.kind}:{self.eps!r}"

    def __str__(self) -> str:
        return self.spec

    @property
    def named_tensors(self) -> tuple[tuple[str, Tensor | None], ...]:
        """Factor and shift, each with the name its kind gives it."""
        return (FACTORS.get(self.kind, "factor"), self.factor), ("shift", self.shift)

    @property
    def sums(self) -> bool:
        """Whether it sums over a row before it can give the row's first element."""
        return self.kind in NORMS

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """Factor and shift."""
        return self.factor, self.shift

    @property
    def has_gradient(self) -> bool:
        """Whether one of its tensors asks for a gradient."""
        return any(t is not None and t.requires_grad for t in self.tensors)


NONE = FrontEnd("none")


def given(front_end: FrontEnd | None) -> FrontEnd:
    """A caller's front end, or the one that does nothing.

    Raises:
        FrontEndError: it is something else.
    """
    if front_end is None:
        return NONE
    if isinstance(front_end, FrontEnd):
        return NONE if front_end.kind == "none" else front_end
    raise FrontEndError(
        value=repr(front_end) if isinstance(front_end, str) else f"of type {type(front_end).__name__}",
        rule="it is made by a function of hadaquant.front",
        fix="for example hadaquant.front.rms_norm(weight, eps)",
    )


def rms_norm(weight: Tensor | None = None, eps: float = 1e-6) -> FrontEnd:
    """x / sqrt(mean(x²) + eps) · weight, weight [K] of any float dtype, or none.

    For norms that multiply by 1 + weight, give 1 + weight in float32.

    Raises:
        FrontEndError: eps is not a positive number.
    """
    return FrontEnd("rms_norm", float(eps), weight)


def ada_norm(scale: Tensor, shift: Tensor, eps: float = 1e-6) -> FrontEnd:
    """(x - mean) / sqrt(var + eps) · (1 + scale) + shift: the modulated LayerNorm of diffusion transformers.

    scale and shift are [K], or [B, K] for x [B, ..., K], of any float dtype.

    Raises:
        FrontEndError: eps is not a positive number.
    """
    return FrontEnd("ada_norm", float(eps), scale, shift)


def silu_mul(up: Tensor) -> FrontEnd:
    """silu(x) · up, x being the gate; up has x's shape and dtype. Both may be halves of one [..., 2K] tensor."""
    return FrontEnd("silu_mul", None, up)


def gelu_tanh() -> FrontEnd:
    """GELU of x in its tanh form."""
    return FrontEnd("gelu_tanh")


def trusted(spec: str, factor: Tensor | None, shift: Tensor | None) -> FrontEnd:
    """The front end of a spec and its tensors, as ops carry it."""
    if spec == "none" and factor is None and shift is None:
        return NONE
    kind, _, eps = spec.partition(":")
    return FrontEnd(kind, float(eps) if eps else None, factor, shift)  # type: ignore[arg-type]
