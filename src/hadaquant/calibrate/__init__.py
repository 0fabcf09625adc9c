"""Better codes than round-to-nearest: what the linears read, scale search, GPTQ."""

from hadaquant.calibrate.capture import capture, token_batches
from hadaquant.calibrate.inputs import InputStatistics

__all__ = ["InputStatistics", "capture", "token_batches"]
