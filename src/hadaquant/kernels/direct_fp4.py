"""The kernels of an FP4 linear behind one Python call, prepared for one number of rows; sister of ``direct``.

x is quantized to codes, or to bfloat16 values where the product wants those. The product may read its weights before
x is there: the kernel ahead of it lets it start only when all before is done, and writes no weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.kernels import (
    amax_fast,
    gemm_fp4_hopper,
    gemm_fp4_parts,
    gemm_fp4_small,
    gemm_fp4_values,
    quantize_blocks_fast,
    quantize_values,
)
from hadaquant.kernels.runtime import Address, Launch, launches_overlap, multiprocessors, on, overlapping
from hadaquant.rotation import Rotation

#: Parts of one allocation begin at multiples of this many bytes.
_BOUNDARY = 256


@dataclass(frozen=True)
class Case:
    """What a call is prepared for.

    ``rotation``: with any signs, if it has them. ``shape``: M, N, K. ``dtypes``: of x, of y, and of any bias.
    ``kernel``, ``tile``: the product's plan. ``dynamic``: the global scale of x is made of its largest magnitude.
    """

    format: Format
    rotation: Rotation
    shape: tuple[int, int, int]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
    device: torch.device
    kernel: str
    tile: tuple[int, int] | None
    dynamic: bool = False

    @property
    def m(self) -> int:
        """Rows of x."""
        return self.shape[0]

    @property
    def n(self) -> int:
        """Rows of the weight."""
        return self.shape[1]

    @property
    def k(self) -> int:
        """Channels."""
        return self.shape[2]

    @property
    def x_dtype(self) -> torch.dtype:
        """Of the input."""
        return self.dtypes[0]

    @property
    def y_dtype(self) -> torch.dtype:
        """Of the output."""
        return self.dtypes[1]

    @property
    def bias_dtype(self) -> torch.dtype | None:
        """Of the bias, if there is one."""
        return self.dtypes[2]


#: Addresses of x's codes or values, its scales and global scale, those of w, the bias or None, and y.
Product = Callable[[int, int, int, int, int, int, "int | None", int], None]


class DirectFp4Linear:
    """x [M, K] · wᵀ + bias, w packed [N, K/2]: the bits of ``quantize`` and ``scaled_mm`` one after the other."""

    def __init__(self, case: Case) -> None:
        """Prepare for one shape."""
        self._case, self._device = case, case.device
        values = case.kernel != "fp4_gemv"
        self._quantize = (_values if values else _codes)(case)
        self._product = _PRODUCTS[case.kernel](case)
        m, k = case.m, case.k
        self._scales_at = 0 if values else _rounded_up(m * k // 2)
        self._bytes = m * k * 2 if values else self._scales_at + m * k // (case.format.block or 1)
        self._amax = _amax(case) if case.dynamic else None

    def __call__(self, x: Tensor, tensors: tuple[Any, ...], shape: tuple[int, ...]) -> Tensor:
        """y of a shape that holds M rows. All tensors contiguous, on 16-byte boundaries, on the device.

        Args:
            tensors: w, its scales, its global scale, that of x, the bias and signs, or None for any of the last four.
        """
        w, sw, gw, gx, bias, signs = tensors
        held = torch.empty(self._bytes, dtype=torch.uint8, device=self._device)
        y = torch.empty(shape, dtype=self._case.y_dtype, device=self._device)
        source, codes = x.data_ptr(), held.data_ptr()
        scales, sign = codes + self._scales_at, source if signs is None else signs.data_ptr()
        given = made = scales if gx is None else gx.data_ptr()
        with on(self._device):
            if self._amax is not None:
                cell = torch.zeros(2 * quantize_blocks_fast.CELL.value, dtype=torch.float32, device=self._device)
                given = cell.data_ptr()
                made = given + 4 * quantize_blocks_fast.CELL.value
                self._amax(source, given, sign)
            self._quantize(source, codes, scales, given, sign)
            self._product(
                codes, scales, made, w.data_ptr(), sw.data_ptr(), scales if gw is None else gw.data_ptr(),
                None if bias is None else bias.data_ptr(), y.data_ptr(),
            )  # fmt: skip
        return y


def _rounded_up(n: int) -> int:
    return triton.cdiv(n, _BOUNDARY) * _BOUNDARY


def _amax(case: Case) -> Callable[[int, int, int], None]:
    config = amax_fast.config(case.rotation)
    units = case.m * case.k // config["UNIT"]
    steps = triton.cdiv(units, config["N"])
    types = case.x_dtype, torch.int32, torch.float32
    launch = Launch(amax_fast.amax_fast_kernel, (*types, steps, units), config, case.device)
    grid = (amax_fast.programs_of(launch, steps, config), 1, 1)

    def amax(x: int, cell: int, signs: int) -> None:
        launch(grid, x, cell, signs, steps, units)

    return amax


def _codes(case: Case) -> Callable[[int, int, int, int, int], None]:
    tiles = quantize_blocks_fast.tiling(case.format, case.rotation, case.m, case.k, False)
    config = quantize_blocks_fast.config(
        case.format, case.rotation, quantize_blocks_fast.converts_to_e4m3(case.device), tiles,
        launches_overlap(case.device), case.dynamic,
    )  # fmt: skip
    in_row = case.k // int(tiles["UNIT"])
    sizes = case.m * in_row, case.m, in_row
    types = case.x_dtype, torch.uint8, torch.uint8, torch.float32, torch.float32
    launch = Launch(quantize_blocks_fast.quantize_blocks_fast_kernel, (*types, *sizes), config, case.device)
    grid = quantize_blocks_fast.grid(tiles, case.m, case.k)

    def quantize(x: int, codes: int, scales: int, g: int, signs: int) -> None:
        launch(grid, x, codes, scales, g, signs, *sizes)

    return quantize


def _values(case: Case) -> Callable[[int, int, int, int, int], None]:
    native = quantize_blocks_fast.converts_to_e4m3(case.device)
    overlap = launches_overlap(case.device)
    config = quantize_values.config(
        case.format, case.rotation, case.m, case.k, native, case.dynamic, case.kernel == "fp4_mm_hopper", overlap
    )
    units = case.m * case.k // config["UNIT"]
    types = case.x_dtype, torch.bfloat16, torch.float32, torch.float32
    launch = Launch(quantize_values.quantize_values_kernel, (*types, units), config, case.device)
    grid = (quantize_values.programs_of(config, case.m, case.k), 1, 1)

    def quantize(x: int, y: int, _: int, g: int, signs: int) -> None:
        launch(grid, x, y, g, signs, units)

    return quantize


def _gemv(case: Case) -> Product:
    overlap, has_bias = launches_overlap(case.device), case.bias_dtype is not None
    operand = torch.uint8, torch.uint8, torch.float32
    types = (*operand, *operand, case.bias_dtype or case.y_dtype, case.y_dtype)
    config = gemm_fp4_small.gemv_config(case.m, case.format, has_bias, overlap, at_rest=True)
    sizes = case.n, case.k // 32
    grid = (triton.cdiv(case.n, config["BN"]), 1, 1)
    launch = Launch(gemm_fp4_small.gemv_kernel, (*types, *sizes), config | overlapping(config), case.device)

    def product(x: int, sx: int, gx: int, w: int, sw: int, gw: int, b: int | None, y: int) -> None:
        launch(grid, x, sx, gx, w, sw, gw, y if b is None else b, y, *sizes)

    return product


def _value_rows(case: Case) -> Product:
    overlap, has_bias = launches_overlap(case.device), case.bias_dtype is not None
    tile = case.tile or (16, 32)
    config = gemm_fp4_values.config(tile, case.format, has_bias, overlap, at_rest=True)
    pointers = torch.bfloat16, torch.float32, torch.uint8, torch.uint8, torch.float32
    types = (*pointers, case.bias_dtype or case.y_dtype, case.y_dtype)
    sizes = case.m, case.n, case.k // 32
    grid = (triton.cdiv(case.n, tile[1]), triton.cdiv(case.m, tile[0]), 1)
    launch = Launch(gemm_fp4_values.value_rows_kernel, (*types, *sizes), config | overlapping(config), case.device)

    def product(x: int, _: int, gx: int, w: int, sw: int, gw: int, b: int | None, y: int) -> None:
        launch(grid, x, gx, w, sw, gw, y if b is None else b, y, *sizes)

    return product


def hopper_product(case: Case) -> Product:
    """The product of bfloat16 values in the order of nibbles; of its operands x's scales are not read."""
    shape, out, device = case.shape, case.y_dtype, case.device
    overlap, has_bias = launches_overlap(device), case.bias_dtype is not None
    bias, (m, n, _), processors = case.bias_dtype or out, shape, multiprocessors(device)
    shares = gemm_fp4_hopper.shares_of(shape, (case.tile or (256, 128))[0], processors)
    rows, split, cut = shares
    grid = (gemm_fp4_hopper.programs_of(shape, shares, processors), 1, 1)
    config = gemm_fp4_hopper.config(case.format, has_bias, shares, overlap, at_rest=True)
    addresses = tuple(Address(t) for t in (torch.bfloat16, torch.int32, out))
    tiles = gemm_fp4_hopper.descriptors(*addresses, shape, rows, cut)
    pointers = torch.float32 if split > 1 else out, torch.uint8, torch.float32, torch.float32, bias
    launch = Launch(gemm_fp4_hopper.fp4_mm_hopper, (*tiles, *pointers, *shape), config | overlapping(config), device)
    sums = gemm_fp4_parts.config(case.format, has_bias, m, split, overlap)
    sums_grid, add = gemm_fp4_parts.grid(m, n, sums), None
    if split > 1:
        types = torch.float32, torch.float32, torch.float32, bias, out
        add = Launch(gemm_fp4_parts.add_parts_kernel, (*types, m, n), sums | overlapping(sums), device)
    turn = threading.Lock()

    def product(x: int, _: int, gx: int, w: int, sw: int, gw: int, b: int | None, y: int) -> None:
        parts = None if add is None else torch.empty(split * n * m, dtype=torch.float32, device=device)
        held = y if parts is None else parts.data_ptr()
        with turn:  # the descriptors are encoded while it is launched
            for address, value in zip(addresses, (x, w, y), strict=True):
                address.value = value
            launch(grid, *tiles, held, sw, gx, gw, y if b is None else b, *shape)
        if add is not None:
            add(sums_grid, held, gx, gw, y if b is None else b, y, m, n)

    return product


_PRODUCTS = {"fp4_gemv": _gemv, "fp4_value_rows": _value_rows, "fp4_mm_hopper": hopper_product}
