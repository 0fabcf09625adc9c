"""Where kernel tests run: on the GPU if there is one, else in Triton's interpreter if it is on.

``TRITON_INTERPRET=1 pytest tests/kernels`` interprets the kernels; ``pytest tests/kernels`` compiles
them ahead of time and, on a GPU, runs them.
"""

import numpy as np
import pytest
import torch

from hadaquant.ops.plan import interpreting


@pytest.fixture
def device() -> str:
    if interpreting():
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("needs a GPU or TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """torch.empty gives NaN, or the largest integer: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with np.errstate(all="ignore"):  # the interpreter is numpy, which warns of signalling NaNs and overflow
        yield
    torch.use_deterministic_algorithms(False)
