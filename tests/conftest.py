"""Shared by all tests: the vectors, and a backend that no test leaves behind."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import load_file

from hadaquant.ops import options

DATA = Path(__file__).parent / "data"

# the machine may be busy: no deadline for one example, and the same examples on every run
settings.register_profile(
    "hadaquant",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("hadaquant")


@pytest.fixture(scope="session")
def vectors():
    """``vectors("nvfp4_seed_reference")``: the tensors of a file of tests/data."""
    return lambda name: load_file(DATA / f"{name}.safetensors")


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)
    yield
    options.set_backend("auto")
