"""Where codes and scales lie in memory: nibble packing and scale tiling, each with its inverse."""

from __future__ import annotations

import torch
from torch import Tensor

from hadaquant.errors import ShapeError
from hadaquant.formats.spec import TILE_COLS, TILE_ROWS


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte, element 2i in the low nibble: uint8 [..., K] -> uint8 [..., K/2].

    >>> pack_nibbles(torch.tensor([1, 2, 15, 6], dtype=torch.uint8)).tolist()
    [33, 111]

    Raises:
        ShapeError: K is odd.
    """
    if codes.shape[-1] % 2:
        raise ShapeError(
            what="codes", found=tuple(codes.shape), expected="an even number of columns", fix="two codes share a byte"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_nibbles`: uint8 [..., K/2] -> uint8 [..., K].

    >>> unpack_nibbles(torch.tensor([33, 111], dtype=torch.uint8)).tolist()
    [1, 2, 15, 6]
    """
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


#: Elements between which :func:`by_nibble` changes their order: those of 16 words of eight codes.
NIBBLE_SPAN = 128


def by_nibble(x: Tensor) -> Tensor:
    """[..., K], K a multiple of 128, in the order in which words of eight codes yield them nibble by nibble.

    Element i of word c of a span of 128 comes to place 16 i + c.

    >>> by_nibble(torch.arange(128))[:18].tolist()
    [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 1, 9]
    """
    return x.reshape(*x.shape[:-1], -1, NIBBLE_SPAN // 8, 8).transpose(-1, -2).reshape(x.shape)


def from_nibbles(x: Tensor) -> Tensor:
    """Inverse of :func:`by_nibble`.

    >>> x = torch.arange(256)
    >>> torch.equal(from_nibbles(by_nibble(x)), x)
    True
    """
    return x.reshape(*x.shape[:-1], -1, 8, NIBBLE_SPAN // 8).transpose(-1, -2).reshape(x.shape)


def tile_scales(scales: Tensor) -> Tensor:
    """Row-major scales [M, C] -> the 128x4 tiled order that block-scaled matrix units read.

    Rows are padded to 128 and columns to 4 with zero bytes; the result has the padded shape and its
    flat order is the tiled one. Scale (r, c) goes to
    ((r // 128) * ceil(C / 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4,
    the layout of cuBLASLt's block scaling factors.

    >>> tile_scales(torch.arange(8, dtype=torch.uint8).view(2, 4)).flatten()[:20].tolist()
    [0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 5, 6, 7]
    """
    m, c = scales.shape
    rows, cols = -(-m // TILE_ROWS), -(-c // TILE_COLS)
    padded = scales.new_zeros(rows * TILE_ROWS, cols * TILE_COLS)
    padded[:m, :c] = scales
    tiles = padded.view(rows, 4, 32, cols, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows * TILE_ROWS, cols * TILE_COLS)


def untile_scales(tiled: Tensor, m: int, c: int) -> Tensor:
    """Inverse of :func:`tile_scales`: the row-major [M, C] scales, padding dropped.

    >>> s = torch.arange(12, dtype=torch.uint8).view(4, 3)
    >>> torch.equal(untile_scales(tile_scales(s), 4, 3), s)
    True

    Raises:
        ShapeError: ``tiled`` has not the padded size.
    """
    rows, cols = -(-m // TILE_ROWS), -(-c // TILE_COLS)
    if tiled.numel() != rows * TILE_ROWS * cols * TILE_COLS:
        raise ShapeError(
            what="tiled scales",
            found=tuple(tiled.shape),
            expected=(rows * TILE_ROWS, cols * TILE_COLS),
            fix=f"pad {m} rows to 128 and {c} columns to 4",
        )
    tiles = tiled.reshape(rows, cols, 32, 4, TILE_COLS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows * TILE_ROWS, cols * TILE_COLS)[:m, :c]
