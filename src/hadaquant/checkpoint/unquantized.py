"""Refuses a source that is quantized already, by anyone."""

from __future__ import annotations

from hadaquant.checkpoint.layouts import layout_of
from hadaquant.checkpoint.source import Checkpoint
from hadaquant.errors import AlreadyQuantized

#: Last parts of names under which quantizers store what goes with their codes.
_TELLTALES = frozenset(
    (
        *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point"),
        *("weight_packed", "weight_blocks", "weight_s_rel", "weight_codebook", "_weight_qdata", "_weight_scale"),
        *("qweight", "dqweight", "qzeros", "wscale", "scale_weight", "comfy_quant", "scaled_fp8"),
        *("SCB", "absmax", "quant_map"),
    )
)
_LOW_BIT = ("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def check_unquantized(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that holds quantized weights.

    Plain fp8 weights without scales are values, not codes, and are fine.

    Raises:
        AlreadyQuantized: saying by what it was recognized.
    """
    said = (checkpoint.config or {}).get("quantization_config")
    if said is not None:
        method = said.get("quant_method") if isinstance(said, dict) else said
        raise AlreadyQuantized(name=checkpoint.folder, found=f"its config.json has quantization_config {method!r}")
    layout = layout_of(checkpoint)
    if layout is not None:
        raise AlreadyQuantized(name=checkpoint.path, found=f"layout {layout.name!r}")
    parts = [name.rpartition(".") for name in checkpoint.tensors]
    scaled = {module for module, _, last in parts if "scale" in last.lower()}
    for module, _, last in parts:
        if last in _TELLTALES:
            raise AlreadyQuantized(name=module or checkpoint.path, found=f"it has a {last!r}")
        if last == "weight" and module in scaled and checkpoint.tensors[f"{module}.weight"].dtype in _LOW_BIT:
            dtype = checkpoint.tensors[f"{module}.weight"].dtype
            raise AlreadyQuantized(name=module, found=f"a weight of dtype {dtype} beside scales")
