"""Quantize each input in each format, plain and under each rotation, and compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from hadaquant.formats import Format, get_format
from hadaquant.ops import quantize
from hadaquant.rotation import Rotation
from hadaquant.study.cases import Case
from hadaquant.study.metrics import Helps, helps, quiet_error, relative_l2, sqnr_db
from hadaquant.study.rotations import as_rotation
from hadaquant.tensor import QuantizedTensor

#: In the order of the table.
STUDY_FORMATS = ("nvfp4", "mxfp4", "mxfp4-ceil", "mxfp4-even", "int8")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: a case in a format, plain and under one rotation.

    Errors are relative L2 errors of the dequantized tensor; ``quiet`` ones are over the channels
    that are no outliers, None where a case has no outliers. Bytes are of the codes and the scales.
    """

    case: str
    format: str
    rotation: str
    plain_error: float
    rotated_error: float
    plain_quiet: float | None
    rotated_quiet: float | None
    code_bytes: int
    scale_bytes: int

    @property
    def plain_db(self) -> float:
        """SQNR in decibels without rotation."""
        return sqnr_db(self.plain_error)

    @property
    def rotated_db(self) -> float:
        """SQNR in decibels with it."""
        return sqnr_db(self.rotated_error)

    @property
    def helps(self) -> Helps:
        """Whether the rotation helps, by the error of the whole tensor."""
        return helps(self.plain_error, self.rotated_error)

    def to_dict(self) -> dict[str, object]:
        """Fields and derived values for JSON."""
        return {**asdict(self), "plain_db": self.plain_db, "rotated_db": self.rotated_db, "helps": self.helps}


def compare(case: Case, format: str | Format, rotations: Iterable[str | Rotation]) -> list[Row]:
    """One row for each rotation, against the same plain quantization.

    Raises:
        GroupError, BlockError: the rotation or the format does not divide K.
    """
    f = get_format(format)

    def measure(rotation: str | Rotation) -> tuple[QuantizedTensor, float, float | None]:
        q = quantize(case.x, f, rotation=rotation)
        restored = q.dequantize()
        quiet = quiet_error(case.x, restored, case.outliers) if case.outliers else None
        return q, relative_l2(case.x, restored), quiet

    _, plain_error, plain_quiet = measure("none")
    rows = []
    for given in rotations:
        rotation = as_rotation(given) if isinstance(given, str) else given
        q, error, quiet = measure(rotation)
        rows.append(
            Row(
                case=case.name,
                format=f.name,
                rotation=str(rotation),
                plain_error=plain_error,
                rotated_error=error,
                plain_quiet=plain_quiet,
                rotated_quiet=quiet,
                code_bytes=q.codes.nbytes,
                scale_bytes=q.scales.nbytes,
            )
        )
    return rows


def sweep(
    cases: Iterable[Case],
    formats: Sequence[str | Format] = STUDY_FORMATS,
    rotations: Sequence[str | Rotation] | None = None,
) -> list[Row]:
    """:func:`compare` of every case in every format, with the case's own rotations unless some are given.

    Raises:
        UnknownChoice, RotationError, GroupError, BlockError.
    """
    return [
        row
        for case in cases
        for format in formats
        for row in compare(case, format, case.rotations if rotations is None else rotations)
    ]
