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

from hadaquant.kernels import rotate, weight_only, weight_only_small
from hadaquant.kernels.direct_fp4 import Case, hopper_product
from hadaquant.kernels.runtime import Launch, launches_overlap, on, overlapping

#: Addresses of rotated x, w's codes, scales and global scale or None, the bias or None, and y.
Product = Callable[[int, int, int, "int | None", "int | None", int], None]


class DirectFullLinear:
    """x [M, K] · wᵀ + bias, w quantized: the bits of ``rotate_round`` and ``weight_mm`` one after the other."""

    def __init__(self, case: Case) -> None:
        """Prepare for one shape; no matrix rotates, and K % 128 == 0 for ``weight_mm_hopper``."""
        self._device, self._dtype, self._elements = case.device, case.y_dtype, case.m * case.k
        by_nibble, overlap = case.kernel == "weight_mm_hopper", launches_overlap(case.device)
        config = rotate.rotate_config(case.rotation, False, by_nibble, overlap)
        self._units = self._elements // config["UNIT"]
        self._grid = (triton.cdiv(self._units, config["ROWS"]), 1, 1)
        types = case.x_dtype, torch.bfloat16, torch.float32, torch.float32, self._units
        self._rotate = Launch(rotate.rotate_kernel, types, config, case.device)
        self._product = _MAKERS[case.kernel](case)

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
    case: Case, kernel: Any, config: dict[str, Any], grid: tuple[int, int, int], sizes: tuple[int, int, int]
) -> Product:
    format, out = case.format, case.y_dtype
    scales = torch.uint8 if format.block else torch.float32
    pointers = torch.bfloat16, format.element.codes_dtype, scales, torch.float32, case.bias_dtype or out, out
    launch = Launch(kernel, (*pointers, *sizes), config, case.device)

    def product(x: int, w: int, sw: int, gw: int | None, b: int | None, y: int) -> None:
        launch(grid, x, w, sw, sw if gw is None else gw, y if b is None else b, y, *sizes)

    return product


def _few_rows(case: Case) -> Product:
    (m, n, k), rows = case.shape, case.tile or (16, 16)
    has_bias, overlap = case.bias_dtype is not None, launches_overlap(case.device)
    config = weight_only_small.config(rows, case.format, has_bias, overlap)
    grid = triton.cdiv(n, rows[1]), triton.cdiv(m, rows[0]), 1
    kernel = weight_only_small.weight_few_rows_kernel
    return _tiles(case, kernel, config | overlapping(config), grid, (m, n, k // 32))


def _mm(case: Case) -> Product:
    config = weight_only.config(case.m, case.format, case.bias_dtype is not None) | {"DOT": triton.language.bfloat16}
    grid = triton.cdiv(case.m, config["BM"]) * triton.cdiv(case.n, config["BN"]), 1, 1
    return _tiles(case, weight_only.weight_mm_kernel, config, grid, case.shape)


def _hopper(case: Case) -> Product:
    multiply, device = hopper_product(case), case.device
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


_MAKERS: dict[str, Callable[[Case], Product]] = {
    "weight_few_rows": _few_rows,
    "weight_mm": _mm,
    "weight_mm_hopper": _hopper,
}
