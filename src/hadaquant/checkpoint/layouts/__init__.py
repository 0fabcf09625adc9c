"""How a quantized layer lies in files. Each file that defines ``LAYOUT`` adds a layout by itself.

A layout names keys and checks them; it neither quantizes nor opens files. Writing asks it for the
tensors of a layer, by key suffix; reading asks it which tensors make up each layer.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hadaquant.checkpoint.files import StoredTensor
from hadaquant.checkpoint.record import Record
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.contract import Contract
from hadaquant.errors import HadaquantError, LayerError, UnknownChoice
from hadaquant.formats import Format, get_format
from hadaquant.rotation import Rotation, parse
from hadaquant.tensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """One quantized layer in a checkpoint.

    ``parameters``: RotatedLinear's parameters by name, but for the bias, which is an ordinary tensor.
    ``keys``: every key that belongs to the layer's weight.
    """

    contract: Contract
    parameters: dict[str, StoredTensor]
    keys: frozenset[str]

    @property
    def format(self) -> Format:
        """The format of its codes."""
        return get_format(self.contract.format)

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters in the files."""
        return sum(stored.nbytes for stored in self.parameters.values())

    def read(self) -> dict[str, Tensor]:
        """RotatedLinear's parameters. A scale that holds for the whole weight becomes one a row."""
        tensors = {name: stored.read() for name, stored in self.parameters.items()}
        if self.format.block is None:
            tensors["scales"] = tensors["scales"].reshape(-1).expand(self.contract.shape[0]).contiguous()
        return tensors


#: Largest K of int8 codes made elsewhere, which may hold -128: 128 · 127 · K must stay in int32.
FOREIGN_INT8_MAX_K = (2**31 - 1) // (128 * 127)


def foreign_int8(
    layer: str, codes: StoredTensor | None, scales: StoredTensor | None, rotation: str, keys: frozenset[str]
) -> StoredLayer:
    """A layer of another program's int8 codes [N, K] and float32 scales, [N], [N, 1] or one for all.

    Raises:
        LayerError: missing, of another shape or dtype, or a rotation that cannot be.
    """

    def refuse(rule: str) -> LayerError:
        return LayerError(layer=layer, rule=rule, fix="the file is damaged, or of another layout")

    if codes is None or codes.dtype != "I8" or len(codes.shape) != 2:
        raise refuse(f"its codes are {codes and (codes.dtype, codes.shape)}, not an int8 matrix")
    n, k = codes.shape
    if scales is None or scales.dtype != "F32" or scales.shape not in ((), (1,), (1, 1), (n,), (n, 1)):
        raise refuse(f"its scales are {scales and (scales.dtype, scales.shape)}, not {n} of dtype F32")
    if k > FOREIGN_INT8_MAX_K:
        raise refuse(f"K={k} exceeds {FOREIGN_INT8_MAX_K}: its int32 accumulator could overflow")
    try:
        r = parse(rotation)
        r.check_k(k)
    except HadaquantError as error:
        raise refuse(str(error)) from error
    contract = Contract.of(get_format("int8"), r, (n, k))
    return StoredLayer(contract=contract, parameters={"codes": codes, "scales": scales}, keys=keys)


class Layout(Protocol):
    """What a layout's file provides. ``written``: whether it can be written, and not only read."""

    name: str
    written: bool

    def check(self, format: Format, rotation: Rotation, activations: str) -> None:
        """Refuse to write a format, rotation or kind of activations that the layout cannot hold.

        Raises:
            CheckpointError.
        """
        ...

    def rows(self, q: QuantizedTensor) -> dict[str, Tensor]:
        """Of a weight's rows [n, K]: tensors by key suffix, with one slice a row."""
        ...

    def once(self, q: QuantizedTensor, contract: Contract) -> dict[str, Tensor]:
        """Of a whole weight: the tensors by key suffix that are written once."""
        ...

    def metadata(self, record: Record) -> dict[str, str]:
        """What goes into a file's header beside the record."""
        ...

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is in this layout, be it damaged or not."""
        ...

    def layers(self, checkpoint: Checkpoint, rotation: str | None) -> dict[str, StoredLayer]:
        """The quantized layers of a checkpoint in this layout, checked as far as their headers go.

        ``rotation`` is what the caller says of a layout whose files do not say it.

        Raises:
            CheckpointError, LayerError: with the name of the file or layer.
        """
        ...


def _collect() -> dict[str, Layout]:
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {module.LAYOUT.name: module.LAYOUT for module in modules}


def get_layout(name: str) -> Layout:
    """The layout of a name.

    Raises:
        UnknownChoice: no layout has this name; the choices are those that can be written.
    """
    layouts = _collect()
    if name not in layouts:
        written = [layout.name for layout in layouts.values() if layout.written]
        raise UnknownChoice(what="layout", value=name, choices=", ".join(sorted(written)))
    return layouts[name]


def layout_of(checkpoint: Checkpoint) -> Layout | None:
    """The layout that a checkpoint is in; None if it holds nothing quantized that is known."""
    return next((layout for layout in _collect().values() if layout.recognizes(checkpoint)), None)
