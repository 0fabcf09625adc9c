"""Better codes than round-to-nearest: what the linears read, scale search, GPTQ."""

from hadaquant.calibrate.capture import capture, token_batches
from hadaquant.calibrate.gains import check_finite, fit_gains_, gains_of
from hadaquant.calibrate.gptq import Curvature, gptq, output_error
from hadaquant.calibrate.inputs import InputStatistics
from hadaquant.calibrate.model import METHODS, CalibratedLayer, Recipe, calibrate_
from hadaquant.calibrate.search import search_scales

__all__ = [
    "METHODS",
    "CalibratedLayer",
    "Curvature",
    "InputStatistics",
    "Recipe",
    "calibrate_",
    "capture",
    "check_finite",
    "fit_gains_",
    "gains_of",
    "gptq",
    "output_error",
    "search_scales",
    "token_batches",
]
