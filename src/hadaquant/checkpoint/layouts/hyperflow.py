"""HyperFlow's pairs ``<m>.qweight`` int8 [N, K] and ``<m>.wscale`` float32 [N]: read, not written.

The mathematics is that of format ``int8``. The files do not say how they are rotated, so the reader
must be told; HyperFlow's own rotation is ``regular:256``.
"""

from __future__ import annotations

from torch import Tensor

from hadaquant.checkpoint.layouts import StoredLayer, foreign_int8
from hadaquant.checkpoint.record import Record
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.contract import Contract
from hadaquant.errors import CheckpointError
from hadaquant.formats import Format
from hadaquant.rotation import Rotation
from hadaquant.tensor import QuantizedTensor


class _HyperFlow:
    name = "hyperflow"
    written = False

    def check(self, format: Format, rotation: Rotation, activations: str) -> None:
        raise CheckpointError(
            path=self.name, rule="this layout is read, not written", fix="write 'comfy': the mathematics is the same"
        )

    def rows(self, q: QuantizedTensor) -> dict[str, Tensor]:
        return {"qweight": q.codes, "wscale": q.scales}

    def once(self, q: QuantizedTensor, contract: Contract) -> dict[str, Tensor]:
        return {}

    def metadata(self, record: Record) -> dict[str, str]:
        return {}

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return any(name.endswith(".wscale") for name in checkpoint.tensors)

    def layers(self, checkpoint: Checkpoint, rotation: str | None) -> dict[str, StoredLayer]:
        if rotation is None:
            raise CheckpointError(
                path=checkpoint.path,
                rule="holds qweight and wscale pairs, and does not say how they are rotated",
                fix="say rotation='regular:256', HyperFlow's own, or what it was written with",
            )
        tensors = checkpoint.tensors
        names = [name.removesuffix(".wscale") for name in tensors if name.endswith(".wscale")]
        return {
            layer: foreign_int8(
                layer,
                tensors.get(f"{layer}.qweight"),
                tensors[f"{layer}.wscale"],
                rotation,
                frozenset((f"{layer}.qweight", f"{layer}.wscale")),
            )
            for layer in names
        }


LAYOUT = _HyperFlow()
