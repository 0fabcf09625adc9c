"""How the verbs run on a GPU. The only package that imports Triton; ops imports it when needed.

Each kernel takes its constants from formats/ and rotation.py and gives the reference's bytes.
"""

from hadaquant.kernels.gemm import scaled_mm
from hadaquant.kernels.quantize import quantize
from hadaquant.kernels.rotate import amax, rotate

__all__ = ["amax", "quantize", "rotate", "scaled_mm"]
