"""Checkpoints: quantized from file to file, saved, loaded, and looked into."""

from hadaquant.checkpoint.loading import load
from hadaquant.checkpoint.quantizer import CheckpointReport, quantize_checkpoint
from hadaquant.checkpoint.saving import save

__all__ = ["CheckpointReport", "load", "quantize_checkpoint", "save"]
