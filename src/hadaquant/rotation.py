"""Rotations of the input dimension: what R is, how it is written, and in which order it is computed.

R is block-diagonal with one orthonormal ``group`` x ``group`` block repeated along K:

* ``none``: the identity.
* ``sylvester:g``: the Hadamard matrix of Sylvester (1867) over sqrt(g), g a power of two, 2 to 4096.
* ``regular:g``: the Kronecker power of [[1,1,1,-1],[1,1,-1,1],[1,-1,1,1],[-1,1,1,1]] over sqrt(g),
  g a power of four, 4 to 4096. Its rows sum to one, so that a constant input stays constant.
* ``matrix:g``: any orthonormal g x g matrix, given as a tensor.

A Hadamard kind can carry random signs: R = diag(signs) H.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hadaquant.errors import GroupError, RotationError, ShapeError, UnknownChoice

Kind = Literal["none", "sylvester", "regular", "matrix"]
KINDS: tuple[str, ...] = ("none", "sylvester", "regular", "matrix")
MAX_GROUP = 4096

#: Sides of a matrix that a kernel multiplies its own tile by; others are rotated by a kernel of their own.
FUSED_MATRIX_GROUPS = (16, 32, 64, 128, 256)

#: Largest entry of |R Rᵀ - I| that still counts as orthonormal: far above the rounding of a float32
#: matrix, far below any error that quantization would hide.
ORTHONORMAL_TOLERANCE = 1e-5

#: Strides of the butterfly stages in the order they are computed. 64 before 4 and 16 lets a GPU thread own a
#: first pass with coalesced loads, and every group up to 1024 needs but one exchange between threads.
_STRIDES = (1, 64, 4, 16, 256, 1024)


def stages(group: int) -> tuple[tuple[int, int], ...]:
    """(radix, stride) of each butterfly stage, in order. Part of the numerics contract.

    Radix 4, and radix 2 for the highest bit of an odd power of two.

    >>> stages(256)
    ((4, 1), (4, 64), (4, 4), (4, 16))
    >>> stages(128)
    ((4, 1), (2, 64), (4, 4), (4, 16))
    """
    return tuple((4 if 4 * stride <= group else 2, stride) for stride in _STRIDES if stride < group)


def norm(group: int) -> float:
    """RN(1/sqrt(group)) in float32, the one multiply that ends a butterfly."""
    return torch.tensor(1.0 / math.sqrt(group), dtype=torch.float32, device="cpu").item()


@dataclass(frozen=True, eq=False)
class Rotation:
    """One rotation. ``hq.Rotation("regular", 256, signs=...)``, or :func:`parse` of a string.

    Args:
        kind: ``none``, ``sylvester``, ``regular`` or ``matrix``.
        group: side of the repeated block.
        signs: [group] tensor of +1 and -1, for R = diag(signs) H.
        matrix: [group, group] orthonormal tensor, for kind ``matrix``; y = x @ matrix.

    Raises:
        RotationError: a group, signs or matrix that breaks the kind's rule.
        UnknownChoice: an unknown kind.
    """

    kind: Kind
    group: int = 1
    signs: Tensor | None = None
    matrix: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownChoice(what="rotation kind", value=self.kind, choices=", ".join(KINDS))
        if self.kind == "matrix" and self.matrix is not None and self.group == 1 and self.matrix.dim():
            object.__setattr__(self, "group", self.matrix.shape[-1])
        self._check_group()
        if self.signs is not None:
            object.__setattr__(self, "signs", self._checked_signs(self.signs))
        if self.matrix is not None or self.kind == "matrix":
            object.__setattr__(self, "matrix", self._checked_matrix(self.matrix))

    def _refuse(self, rule: str, fix: str) -> RotationError:
        return RotationError(value=f"'{self.kind}:{self.group}'", rule=rule, fix=fix)

    def _check_group(self) -> None:
        g = self.group
        power_of_two = g > 0 and g & (g - 1) == 0
        if self.kind == "none" and g != 1:
            raise self._refuse("'none' has no group", "write 'none'")
        if self.kind == "sylvester" and not (power_of_two and 2 <= g <= MAX_GROUP):
            raise self._refuse(f"the group must be a power of two from 2 to {MAX_GROUP}", "for example 'sylvester:64'")
        if self.kind == "regular" and not (power_of_two and g.bit_length() % 2 and 4 <= g <= MAX_GROUP):
            raise self._refuse(f"the group must be a power of four from 4 to {MAX_GROUP}", "for example 'regular:256'")

    def _checked_signs(self, signs: Tensor) -> Tensor:
        if self.kind not in ("sylvester", "regular"):
            raise self._refuse("only 'sylvester' and 'regular' take signs", "leave signs out")
        if tuple(signs.shape) != (self.group,):
            raise ShapeError(what="signs", found=tuple(signs.shape), expected=(self.group,), fix="one sign a channel")
        signs = signs.detach().to(torch.float32)
        if signs.device.type != "meta" and not torch.equal(signs.abs(), torch.ones_like(signs)):
            raise self._refuse("each sign must be +1 or -1", "for example torch.randint(0, 2, (group,)) * 2 - 1")
        return signs

    def _checked_matrix(self, matrix: Tensor | None) -> Tensor:
        if self.kind != "matrix":
            raise self._refuse("only kind 'matrix' takes a matrix", "leave matrix out")
        if matrix is None:
            raise self._refuse("kind 'matrix' needs its tensor", "hq.Rotation('matrix', matrix=tensor)")
        if matrix.dim() != 2 or tuple(matrix.shape) != (self.group, self.group):
            raise ShapeError(
                what="matrix", found=tuple(matrix.shape), expected=(self.group, self.group), fix="give a square block"
            )
        matrix = matrix.detach()
        if matrix.device.type != "meta":
            m = matrix.to(torch.float64)
            error = (m @ m.T - torch.eye(self.group, dtype=m.dtype, device=m.device)).abs().max().item()
            if not error <= ORTHONORMAL_TOLERANCE:
                raise self._refuse(
                    f"not orthonormal: the largest entry of |R·Rᵀ − I| is {error:.3g}, above {ORTHONORMAL_TOLERANCE:g}",
                    "give Q of torch.linalg.qr, or divide a ±1 Hadamard matrix by sqrt(group)",
                )
        return matrix.to(torch.float32).contiguous()

    def __str__(self) -> str:
        if self.kind == "none":
            return "none"
        return f"{self.kind}:{self.group}" + ("+signs" if self.signs is not None else "")

    @property
    def spec(self) -> str:
        """``kind:group`` without the tensors, which travel beside it."""
        return "none" if self.kind == "none" else f"{self.kind}:{self.group}"

    def _key(self) -> tuple[str, bool, bool]:
        return self.spec, self.signs is None, self.matrix is None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rotation):
            return NotImplemented
        if self._key() != other._key():
            return False
        return _same(self.signs, other.signs) and _same(self.matrix, other.matrix)

    def __hash__(self) -> int:
        return hash(self._key())

    def to(self, device: torch.device | str) -> Rotation:
        """The same rotation with its tensors on a device; itself, if they are there."""
        signs, matrix = (None if t is None else t.to(device) for t in (self.signs, self.matrix))
        if signs is self.signs and matrix is self.matrix:
            return self
        return trusted(self.spec, signs, matrix)  # no second look at the values, which would wait for the device

    def check_k(self, k: int) -> None:
        """Refuse a K that the group does not divide.

        Raises:
            GroupError: K is not a multiple of the group.
        """
        if k % self.group:
            fitted = self.fit(k)
            suggestion = f" (the largest is '{fitted}')" if fitted is not None else ""
            raise GroupError(k=k, group=self.group, rotation=str(self), suggestion=suggestion)

    def fit(self, k: int, multiple: int = 1) -> Rotation | None:
        """This rotation with its largest legal group that divides K; None if there is none.

        A rotation with tensors has one size and is not shrunk. ``multiple`` is the format's block:
        if it does not divide K, nothing fits.

        >>> str(parse("regular:256").fit(96))
        'regular:16'
        """
        if k == 0 or k % multiple:
            return None
        if k % self.group == 0:
            return self
        if self.signs is not None or self.kind == "matrix":
            return None
        step = 4 if self.kind == "regular" else 2
        group = self.group
        while group >= step:
            if k % group == 0:
                return Rotation(self.kind, group)
            group //= step
        return None

    def dense_like(self, x: Tensor) -> Tensor:
        """The [group, group] block as a tensor of x's dtype and device."""
        block = self.matrix if self.matrix is not None else self.dense()
        return block.to(x.device, x.dtype)

    def dense(self) -> Tensor:
        """The [group, group] float64 matrix of one block, on the CPU."""
        if self.kind == "matrix" and self.matrix is not None:
            return self.matrix.to("cpu", torch.float64)
        h = torch.ones(1, 1, dtype=torch.float64)
        base = [[1, 1], [1, -1]]
        if self.kind == "regular":
            base = [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]
        while h.shape[0] < self.group:
            h = torch.kron(torch.tensor(base, dtype=torch.float64), h)
        h = h / math.sqrt(self.group)
        return h if self.signs is None else self.signs.to("cpu", torch.float64)[:, None] * h


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.device == b.device and torch.equal(a, b))


NONE = Rotation("none")


def parse(rotation: str | Rotation, signs: Tensor | None = None, matrix: Tensor | None = None) -> Rotation:
    """The rotation of a string: ``none``, ``sylvester:16``, ``regular:256``, ``matrix:64``.

    A ``Rotation`` is returned as it is. ``signs`` and ``matrix`` are the tensors that a string
    cannot hold.

    >>> parse("regular:256").group
    256

    Raises:
        RotationError: the string is none of these.
    """
    if isinstance(rotation, Rotation):
        return rotation
    kind, _, group = rotation.partition(":") if isinstance(rotation, str) else ("", "", "")
    plain = group == "" or (group.isascii() and group.isdecimal() and not group.startswith("0"))
    if kind not in KINDS or (kind == "none") != (group == "") or not plain:
        raise RotationError(
            value=repr(rotation) if isinstance(rotation, str) else f"of type {type(rotation).__name__}",
            rule="a rotation is written 'none', 'sylvester:G', 'regular:G' or 'matrix:G'",
            fix="for example 'sylvester:16' or 'regular:256'; a tensor goes into hq.Rotation('matrix', matrix=tensor)",
        )
    if rotation == "none" and signs is None and matrix is None:
        return NONE
    return Rotation(kind, int(group or 1), signs, matrix)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def _parsed(spec: str) -> tuple[str, int]:
    kind, _, group = spec.partition(":")
    if kind == "matrix":
        return kind, int(group)
    rotation = parse(spec)
    return rotation.kind, rotation.group


def trusted(spec: str, signs: Tensor | None, matrix: Tensor | None) -> Rotation:
    """The rotation of a spec and tensors that a :class:`Rotation` has checked before.

    Looks at no tensor's values, so that it never waits for a GPU.
    """
    kind, group = _parsed(spec)
    rotation = object.__new__(Rotation)
    for name, value in (("kind", kind), ("group", group), ("signs", signs), ("matrix", matrix)):
        object.__setattr__(rotation, name, value)
    return rotation
