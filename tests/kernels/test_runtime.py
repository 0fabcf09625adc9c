"""How many programs share rows, and which tiles are masked."""

import pytest
import torch

from hadaquant.kernels import quantize_rows_gluon
from hadaquant.kernels.gemm import int8_programs
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


@pytest.mark.parametrize(("m", "n", "ragged"), [(64, 128, False), (128, 64, False), (63, 128, True), (128, 96, True)])
def test_tiles_beyond_the_end_are_masked(m, n, ragged):
    # unmasked they would read beyond the tensors, whose answer is right all the same
    programs, config = int8_programs(m, n, (64, 64), torch.device("cpu"))
    assert programs == -(-m // 64) * -(-n // 64)
    assert config["RAGGED"] is ragged
