"""Nibbles and tiled scales against plain loops, and their inverses."""

import pytest
import torch

from hadaquant.errors import ShapeError
from hadaquant.layout import pack_nibbles, tile_scales, unpack_nibbles, untile_scales


def test_c7_first_element_in_the_low_nibble():
    assert pack_nibbles(torch.tensor([1, 2, 15, 6], dtype=torch.uint8)).tolist() == [0x21, 0x6F]
    assert unpack_nibbles(torch.tensor([0x21, 0x6F], dtype=torch.uint8)).tolist() == [1, 2, 15, 6]


@pytest.mark.parametrize("shape", [(2,), (3, 32), (2, 3, 8), (0, 4)])
def test_nibbles_round_trip(shape):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 2) and packed.dtype == torch.uint8
    assert torch.equal(unpack_nibbles(packed), codes)
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(every)), every)


def test_s7_odd_columns():
    with pytest.raises(ShapeError, match="an even number of columns"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))


def slowly_tiled(scales: torch.Tensor) -> list[int]:
    """The published offset of each scale, one at a time, in a buffer of zeros."""
    rows, cols = scales.shape
    tiles = (cols + 3) // 4
    flat = [0] * ((rows + 127) // 128 * 128 * tiles * 4)
    for r in range(rows):
        for c in range(cols):
            offset = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            flat[offset] = int(scales[r, c])
    return flat


SIZES = [(1, 1), (3, 5), (32, 4), (33, 4), (127, 3), (128, 4), (129, 9), (200, 1), (256, 8), (300, 13)]


@pytest.mark.parametrize(("m", "c"), SIZES)
def test_tiles_lie_where_the_formula_says(m, c):
    scales = torch.randint(1, 256, (m, c), dtype=torch.uint8)
    tiled = tile_scales(scales)
    assert tiled.shape == ((m + 127) // 128 * 128, (c + 3) // 4 * 4) and tiled.is_contiguous()
    assert tiled.flatten().tolist() == slowly_tiled(scales)


@pytest.mark.parametrize(("m", "c"), [*SIZES, (0, 4)])
def test_tiles_round_trip(m, c):
    scales = torch.randint(0, 256, (m, c), dtype=torch.uint8)
    tiled = tile_scales(scales)
    assert torch.equal(untile_scales(tiled, m, c), scales)
    assert torch.equal(untile_scales(tiled.flatten(), m, c), scales)
    assert torch.equal(tile_scales(scales.t().contiguous().t()), tiled)


def test_tiles_of_another_size():
    with pytest.raises(ShapeError, match=r"tiled scales has shape \(128, 4\), but \(256, 4\)"):
        untile_scales(torch.zeros(128, 4, dtype=torch.uint8), 129, 4)
