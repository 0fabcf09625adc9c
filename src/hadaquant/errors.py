"""Every failure hadaquant reports, one class each.

A message says what was asked, what was found and what to do. All classes derive from
:class:`HadaquantError`, which is a ``ValueError``.
"""

from __future__ import annotations


class HadaquantError(ValueError):
    """Base class. ``template`` is filled from the keyword arguments, kept in ``fields``."""

    template = "{message}"

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        super().__init__(self.template.format(**fields))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.fields)


def _rebuild(cls: type[HadaquantError], fields: dict[str, object]) -> HadaquantError:
    return cls(**fields)


class UnknownChoice(HadaquantError):
    """A name that is not one of the known ones."""

    template = "unknown {what} {value!r}: choose one of {choices}"


class RotationError(HadaquantError):
    """A rotation that cannot exist."""

    template = "rotation {value}: {rule}; {fix}"


class FrontEndError(HadaquantError):
    """A front end that cannot exist, or cannot be used where it was given."""

    template = "front end {value}: {rule}; {fix}"


class GroupError(HadaquantError):
    """The rotation's group does not divide K."""

    template = (
        "in_features K={k} is not a multiple of the group {group} of rotation {rotation!r}; "
        "use a group that divides K{suggestion}, or rotation='none'"
    )


class BlockError(HadaquantError):
    """The format's block does not divide K."""

    template = (
        "K={k} is not a positive multiple of {block}, which format {format!r} needs; "
        "pad K, choose format 'int8', or leave this layer in high precision"
    )


class ShapeError(HadaquantError):
    """A tensor of the wrong shape."""

    template = "{what} has shape {found}, but {expected} is needed; {fix}"


class DtypeError(HadaquantError):
    """A tensor of the wrong dtype."""

    template = "{what} has dtype {found}, but {expected} is needed; {fix}"


class MismatchError(HadaquantError):
    """Two operands that do not mean the same."""

    template = "{what} is {found}, but {expected} is needed; quantize x and w in the same way, with linear scales"


class GlobalScaleError(HadaquantError):
    """A global scale that is absent, superfluous or not a positive finite number."""

    template = "global_scale {value}: {rule}; {fix}"


class AccumulatorError(HadaquantError):
    """K so large that an int32 accumulator could overflow."""

    template = (
        "K={k} exceeds {limit}: the int32 accumulator of an int8 product could overflow "
        "(every term is at most {term}); split K"
    )


class BackendError(HadaquantError):
    """No kernel can run what was asked. Lists each candidate and its reason."""

    template = "no kernel runs {what}: {reasons}"


class AlreadyQuantized(HadaquantError):
    """Something quantized was given to be quantized again."""

    template = "{name} is already quantized ({found}); quantize the high-precision original instead"


class PatternError(HadaquantError):
    """A pattern that matches no layer."""

    template = (
        "pattern '{pattern}' matches no layer; the layers are {layers}; "
        "a pattern is whole dotted parts of a name, or re: and an expression for the whole name"
    )


class ExpressionError(HadaquantError):
    """A pattern whose regular expression is none."""

    template = "pattern '{pattern}': what follows re: is no regular expression ({why}); escape it, or leave re: out"


class LayerError(HadaquantError):
    """A layer that cannot be converted or restored."""

    template = "layer {layer!r}: {rule}; {fix}"


class PredictionError(HadaquantError):
    """A language model whose predictions are no numbers."""

    template = (
        "{model}: its losses are NaN or infinite, for {wrong} of the {predicted} tokens of window {window} ({why}); "
        "a model that gives no numbers cannot be measured"
    )


class CheckpointError(HadaquantError):
    """A file or folder that cannot be read or written as asked."""

    template = "{path}: {rule}; {fix}"


class PlanError(HadaquantError):
    """A plan that cannot be made, read or obeyed."""

    template = "{plan}: {rule}; {fix}"


class MissingExtra(HadaquantError, ImportError):
    """An optional dependency is not installed."""

    template = "{what} needs the package {package!r}, which is not installed; pip install 'hadaquant[{extra}]'"
