"""How many programs share rows."""

import pytest
import torch

from hadaquant.kernels import quantize_rows_gluon
from hadaquant.kernels.runtime import Launch


@pytest.mark.parametrize(("warps", "occupancy", "k", "programs"), [
    (2, 8, 3072, 8),
    (2, 8, 5120, 4),  # 56 KiB of rows are five, which four schedulers cannot share
    (1, 12, 3072, 8),
    (4, 2, 13824, 2),
    (8, 1, 65536, 1),
])  # fmt: skip
def test_rows_in_hand(warps, occupancy, k, programs):
    launch = object.__new__(Launch)
    launch.occupancy, launch._warps, launch.device = occupancy, warps, torch.device("cpu")  # one multiprocessor
    assert quantize_rows_gluon.grid_of(launch, 1000, k) == (programs, 1, 1)
    assert quantize_rows_gluon.grid_of(launch, 1, k) == (1, 1, 1)
