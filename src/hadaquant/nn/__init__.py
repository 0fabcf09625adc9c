"""Linears and whole-model conversion."""

from hadaquant.nn.convert import quantize_
from hadaquant.nn.linear import RotatedLinear
from hadaquant.nn.report import LayerReport, Report
from hadaquant.nn.sharing import InputGroup, share_input

__all__ = ["InputGroup", "LayerReport", "Report", "RotatedLinear", "quantize_", "share_input"]
