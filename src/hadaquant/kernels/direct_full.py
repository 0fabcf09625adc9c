"""The two kernels of a linear whose activations stay full behind one Python call; sister of ``direct``.

x is rotated and rounded to bfloat16, in the order in which the product reads it. The kernel that does so waits for all
before it, then lets the product start, and writes no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.kernels import rotate, weight_only, weight_only_small
from hadaquant.kernels.direct_fp4 import hopper_product
from hadaquant.kernels.runtime import Launch, launches_overlap, on, overlapping
from hadaquant.rotation import Rotation

#: Addresses of rotated x, w's codes, scales and global scale or None, the bias or None, and y.
Product = Callable[[int, int, int, "int | None", "int | None", int], None]


class DirectFullLinear:
    """x [M, K] · wᵀ + bias, w quantized: the bits of ``rotate_round`` and ``weight_mm`` one after the other."""

    def __init__(
        self,
        format: Format,
        rotation: Rotation,
        shape: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
        device: torch.device,
        kernel: str,
        tile: tuple[int, int] | None,
    ) -> None:
        """Prepare for one shape.

        Args:
            rotation: with any signs, if it has them; no matrix.
            shape: M, N, K; K % 128 == 0 for ``weight_mm_hopper``.
            dtypes: of x, of y, and of the bias if there is one.
            kernel, tile: the product's plan.
        """
        m, _, k = shape
        self._device, self._dtype, self._elements = device, dtypes[1], m * k
        config = rotate.rotate_config(rotation, False, kernel == "weight_mm_hopper", launches_overlap(device))
        self._units = m * k // config["UNIT"]
        self._grid = (triton.cdiv(self._units, config["ROWS"]), 1, 1)
        types = dtypes[0], torch.bfloat16, torch.float32, torch.float32, self._units
        self._rotate = Launch(rotate.rotate_kernel, types, config, device)
        self._product = _MAKERS[kernel](format, shape, dtypes[1], dtypes[2], device, tile)

    def __call__(self, x: Tensor, tensors: tuple[Any, ...], shape: tuple[int, ...]) -> Tensor:
        """y of a shape that holds M rows. All tensors contiguous, on 16-byte boundaries, on the device.

        Args:
            tensors: w, its scales, its global scale, None, the bias and signs, or None for any of the last four.
        """
        w, sw, gw, _, bias, signs = tensors
        rotated = torch.empty(self._elements, dtype=torch.bfloat16, device=self._device)
        y = torch.empty(shape, dtype=self._dtype, device=self._device)
        source, held = x.data_ptr(), rotated.data_ptr()
        sign = source if signs is None else signs.data_ptr()
        with on(self._device):
            self._rotate(self._grid, source, held, sign, source, self._units)
            self._product(held, w.data_ptr(), sw.data_ptr(), _address(gw), _address(bias), y.data_ptr())
        return y


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _tiles(
    kernel: Any,
    config: dict[str, Any],
    grid: tuple[int, int, int],
    format: Format,
    sizes: tuple[int, int, int],
    types: tuple[torch.dtype, torch.dtype | None],
    device: torch.device,
) -> Product:
    out, bias = types
    scales = torch.uint8 if format.block else torch.float32
    pointers = torch.bfloat16, format.element.codes_dtype, scales, torch.float32, bias or out, out
    launch = Launch(kernel, (*pointers, *sizes), config, device)

    def product(x: int, w: int, sw: int, gw: int | None, b: int | None, y: int) -> None:
        launch(grid, x, w, sw, sw if gw is None else gw, y if b is None else b, y, *sizes)

    return product


def _few_rows(
    format: Format,
    shape: tuple[int, int, int],
    out: torch.dtype,
    bias: torch.dtype | None,
    device: torch.device,
    tile: tuple[int, int] | None,
) -> Product:
    (m, n, k), rows = shape, tile or (16, 16)
    config = weight_only_small.config(rows, format, bias is not None, launches_overlap(device))
    config |= overlapping(config)
    grid = triton.cdiv(n, rows[1]), triton.cdiv(m, rows[0]), 1
    sizes = m, n, k // 32
    return _tiles(weight_only_small.weight_few_rows_kernel, config, grid, format, sizes, (out, bias), device)


def _mm(
    format: Format,
    shape: tuple[int, int, int],
    out: torch.dtype,
    bias: torch.dtype | None,
    device: torch.device,
    _: tuple[int, int] | None,
) -> Product:
    m, n, _ = shape
    config = weight_only.config(m, format, bias is not None) | {"DOT": triton.language.bfloat16}
    grid = triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"]), 1, 1
    return _tiles(weight_only.weight_mm_kernel, config, grid, format, shape, (out, bias), device)


def _hopper(
    format: Format,
    shape: tuple[int, int, int],
    out: torch.dtype,
    bias: torch.dtype | None,
    device: torch.device,
    tile: tuple[int, int] | None,
) -> Product:
    multiply = hopper_product(format, shape, out, bias, device, tile)
    ones: list[Tensor] = []

    def one() -> Tensor:
        """In place of x's global scale. One made in a graph has its value only when that graph has run."""
        if ones:
            return ones[0]
        made = torch.ones((), dtype=torch.float32, device=device)
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(device).synchronize()  # other streams will read it
            ones.append(made)
        return made

    def product(x: int, w: int, sw: int, gw: int | None, b: int | None, y: int) -> None:
        if gw is None:  # neither is read
            multiply(x, x, sw, w, sw, sw, b, y)
        else:
            g = one()
            multiply(x, x, g.data_ptr(), w, sw, gw, b, y)

    return product


_MAKERS: dict[str, Callable[..., Product]] = {
    "weight_few_rows": _few_rows,
    "weight_mm": _mm,
    "weight_mm_hopper": _hopper,
}
