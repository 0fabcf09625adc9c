"""Rotations as a study names them: those of the library, and random ones drawn from a fixed seed.

``random:64`` is a Sylvester matrix with random signs, ``matrix:64`` a random orthogonal matrix.
"""

from __future__ import annotations

import torch

from hadaquant.errors import RotationError
from hadaquant.formats import Format
from hadaquant.nn.convert import fit
from hadaquant.rotation import Rotation, parse


def random_orthogonal(group: int, seed: int = 0) -> Rotation:
    """A random orthogonal matrix: Q of ``torch.linalg.qr`` of a gaussian float64 matrix of a seed."""
    gaussian = torch.randn(group, group, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Rotation("matrix", matrix=torch.linalg.qr(gaussian).Q)


def random_signs(group: int, seed: int = 0) -> Rotation:
    """diag(s)·H with H of ``sylvester:group`` and signs s drawn from a seed.

    Raises:
        RotationError: no Sylvester matrix has that side.
    """
    signs = torch.randint(2, (group,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return Rotation("sylvester", group, signs=signs)


def as_rotation(spec: str) -> Rotation:
    """The rotation of a spec.

    Raises:
        RotationError: the string is no rotation.
    """
    kind, _, group = spec.partition(":")
    if group.isdecimal() and kind == "matrix":
        return random_orthogonal(int(group))
    if group.isdecimal() and kind == "random":
        return random_signs(int(group))
    if spec != "none" and not (kind in ("sylvester", "regular") and group.isdecimal()):
        rule = "a rotation is written 'none', 'sylvester:G', 'regular:G', 'random:G' or 'matrix:G'"
        raise RotationError(value=repr(spec), rule=rule, fix="for example 'sylvester:16' or 'regular:256'")
    return parse(spec)


def fitted(spec: str, format: Format, k: int) -> tuple[Rotation | None, str]:
    """The rotation that a linear with K in_features gets and a note if its group is smaller, or None and why not."""
    if spec.startswith("random:"):
        plain, note = fit(format, parse(spec.replace("random", "sylvester")), k)
        return (None if plain is None else random_signs(plain.group)), note
    return fit(format, as_rotation(spec), k)


def of_name(name: str) -> Rotation:
    """The rotation that :func:`fitted` gave, of its name: ``sylvester:64+signs`` has the signs of ``random:64``."""
    if name.endswith("+signs"):
        return random_signs(int(name.removesuffix("+signs").partition(":")[2]))
    return as_rotation(name)
