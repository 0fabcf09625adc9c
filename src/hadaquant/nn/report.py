"""What became of each layer, and why."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One layer: quantized (``format`` is set) or kept in high precision, with the reason.

    ``error`` is ‖W − Ŵ‖ / ‖W‖ of a quantized weight, None of a kept one or where there are no values
    (meta device). Bytes are of the weight.
    """

    name: str
    shape: tuple[int, ...]
    format: str | None = None
    rotation: str | None = None
    reason: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    error: float | None = None

    @property
    def quantized(self) -> bool:
        """Whether the layer was quantized."""
        return self.format is not None


@dataclass
class Report:
    """Every layer looked at, in order. ``print`` it for a summary."""

    layers: list[LayerReport] = field(default_factory=list)

    @property
    def quantized(self) -> list[LayerReport]:
        """Layers that were quantized."""
        return [layer for layer in self.layers if layer.quantized]

    @property
    def kept(self) -> list[LayerReport]:
        """Layers left in high precision, each with its reason."""
        return [layer for layer in self.layers if not layer.quantized]

    @property
    def bytes_before(self) -> int:
        """Weight bytes before."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Weight bytes after."""
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        lines = [
            f"{len(self.quantized)} layers quantized, {len(self.kept)} kept; "
            f"{self.bytes_before:,} -> {self.bytes_after:,} bytes of weights"
        ]
        for layer in self.quantized:
            error = "" if layer.error is None else f", error {layer.error:.4f}"
            lines.append(f"  {layer.name}: {layer.format}, {layer.rotation}{error} {layer.reason}".rstrip())
        lines += [f"  {layer.name}: kept, {layer.reason}" for layer in self.kept]
        return "\n".join(lines)
