"""hadaquant: rotated low-bit linears for PyTorch.

y = x · Wᵀ = (x·R)(W·R)ᵀ, R a block-diagonal Hadamard or any orthonormal rotation: weights are
rotated and quantized offline, activations in one kernel before a low-bit matrix product.
"""

from hadaquant import calibrate, front
from hadaquant._version import __version__
from hadaquant.checkpoint import CheckpointReport, load, quantize_checkpoint, save
from hadaquant.errors import HadaquantError
from hadaquant.formats import FORMATS, Format, get_format
from hadaquant.front import FrontEnd
from hadaquant.nn import InputGroup, Report, RotatedLinear, quantize_, share_input
from hadaquant.ops import explain, quantize, rotate, scaled_mm
from hadaquant.ops.options import set_backend
from hadaquant.rotation import Rotation
from hadaquant.tensor import QuantizedTensor

__all__ = [
    "FORMATS",
    "CheckpointReport",
    "Format",
    "FrontEnd",
    "HadaquantError",
    "InputGroup",
    "QuantizedTensor",
    "Report",
    "RotatedLinear",
    "Rotation",
    "__version__",
    "calibrate",
    "explain",
    "front",
    "get_format",
    "load",
    "quantize",
    "quantize_",
    "quantize_checkpoint",
    "rotate",
    "save",
    "scaled_mm",
    "set_backend",
    "share_input",
]
