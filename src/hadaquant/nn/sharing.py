"""Quantize once what several linears read: q, k and v, or gate and up.

A declared group reuses a quantized input only for the very same tensor objects, unmodified, in the
same thread, and keeps it no longer than its last member's turn or the tensors' life. The tensors are the
input and those of its front end.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from hadaquant.errors import LayerError
from hadaquant.front import FrontEnd

if TYPE_CHECKING:
    from hadaquant.nn.linear import RotatedLinear

#: Codes, scales and global scale of an input; or what it was rotated to, alone, where it stays full.
Quantized = tuple[Tensor, "Tensor | None", "Tensor | None"]


class _Slot:
    """One thread's last quantized input and which members have used it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self, _: object = None) -> None:
        """Forget it all; also called when one of the tensors dies, in whichever thread that happens."""
        self.front_end: str | None = None
        self.sources: tuple[weakref.ref[Tensor] | None, ...] = ()
        self.versions: tuple[int | None, ...] = ()
        self.quantized: Quantized | None = None
        self.served: frozenset[int] = frozenset()


class InputGroup:
    """Linears of one format, rotation and input width that read the same tensor. See :func:`share_input`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._threads = threading.local()

    def __repr__(self) -> str:
        return f"InputGroup(size={self.size})"

    def __getstate__(self) -> dict[str, int]:
        return {"size": self.size}  # what is in flight belongs to one thread of one process

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(state["size"])

    @property
    def _slot(self) -> _Slot:
        if not hasattr(self._threads, "slot"):
            self._threads.slot = _Slot()
        return self._threads.slot

    def quantize(
        self, member: int, x: Tensor, front_end: FrontEnd, compute: Callable[[Tensor, FrontEnd], Quantized]
    ) -> Quantized:
        """The group's quantized x: computed by the first member that asks, reused by the others."""
        slot = self._slot
        tensors = (x, front_end.factor, front_end.shift)
        versions = tuple(None if t is None or t.is_inference() else t._version for t in tensors)
        sources = tuple(None if source is None else source() for source in slot.sources)
        # once cleared, there are no sources, and no spec is the same
        same = slot.front_end == front_end.spec and all(map(operator.is_, sources, tensors))
        quantized = slot.quantized
        if not same or versions != slot.versions or quantized is None or member in slot.served:
            slot.clear()
            slot.quantized = quantized = compute(x, front_end)
            slot.front_end, slot.versions = front_end.spec, versions
            slot.sources = tuple(None if t is None else weakref.ref(t, slot.clear) for t in tensors)
        slot.served |= {member}
        if len(slot.served) == self.size:
            slot.clear()
        return quantized


def share_input(layers: Iterable[RotatedLinear]) -> InputGroup:
    """Declare that these layers read the same tensor, so that it is rotated and quantized once.

    Without a declaration nothing is shared. Under ``torch.inference_mode`` tensors carry no version,
    so an in-place change between two members cannot be seen there, and nowhere can one through ``x.data``, which
    leaves the version as it is: declare only layers that truly read one unchanged tensor.

    Raises:
        LayerError: fewer than two layers, or layers whose inputs would be quantized differently.
    """
    layers = list(layers)
    plain = [type(m).__name__ for m in layers if not hasattr(m, "input_group")]
    if plain:
        raise LayerError(
            layer=f"group of {len(layers)}",
            rule=f"it holds {', '.join(plain)}, which quantize no input",
            fix="share among RotatedLinear layers only",
        )
    keys = {(m.format.name, str(m.rotation), m.in_features, m.activations, m.backend) for m in layers}
    same = all(m.rotation == layers[0].rotation for m in layers)
    static = {None if m.input_global_scale is None else m.input_global_scale.item() for m in layers}
    if len(layers) < 2 or len(keys) != 1 or len(static) != 1 or not same:
        raise LayerError(
            layer=f"group of {len(layers)}",
            rule=f"members must be two or more with one format, rotation, width and static scale; found {sorted(keys)}",
            fix="share only layers that quantize their input in the same way",
        )
    group = InputGroup(len(layers))
    for index, layer in enumerate(layers):
        layer.input_group, layer.input_member = group, index
    return group
