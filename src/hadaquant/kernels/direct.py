"""Both kernels of an INT8 linear behind one Python call, prepared for one number of rows.

Between two kernels of a few microseconds each, the host is what one waits for. All that depends on shapes
and dtypes is done once, here; a call makes two allocations and two launches on bare addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.kernels import gemm, gemm_int8_small, quantize_rows_gluon
from hadaquant.kernels.runtime import Address, Launch, launches_overlap, multiprocessors, on, overlapping

#: The scales of x follow its codes in one allocation, at a multiple of this many bytes.
_BOUNDARY = 256

#: Addresses of x's codes and scales, w's codes and scales, the bias or 0, and y.
Product = Callable[[int, int, int, int, int, int], None]


class DirectLinear:
    """x [M, K] · wᵀ + bias, w int8 [N, K]: the bits of ``quantize`` and ``scaled_mm`` one after the other."""

    def __init__(
        self,
        format: Format,
        rotation: tuple[str, int, bool],
        shape: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
        device: torch.device,
        kernel: str,
        tile: tuple[int, int] | None,
    ) -> None:
        """Prepare for one shape.

        Args:
            rotation: kind, group, whether it has signs.
            shape: M, N, K.
            dtypes: of x, of y, and of the bias if there is one.
            kernel, tile: the product's plan.
        """
        m, _, k = shape
        self._m, self._device, self._dtype = m, device, dtypes[1]
        self._scales_at = triton.cdiv(m * k, _BOUNDARY) * _BOUNDARY
        self._quantize = quantize_rows_gluon.launch_of(format, *rotation, k, dtypes[0], device)
        self._grid = quantize_rows_gluon.grid_of(self._quantize, m, k)
        self._product = _PRODUCTS[kernel](shape, dtypes[1], dtypes[2], device, tile)

    def __call__(self, x: Tensor, tensors: tuple[Any, ...], shape: tuple[int, ...]) -> Tensor:
        """y of a shape that holds M rows. All tensors contiguous, on 16-byte boundaries, on the device.

        Args:
            tensors: w, its scales, twice None for the global scales other formats have, the bias and signs or None.
        """
        w, sw, _, _, bias, signs = tensors
        held = torch.empty(self._scales_at + 4 * self._m, dtype=torch.uint8, device=self._device)
        y = torch.empty(shape, dtype=self._dtype, device=self._device)
        source, codes = x.data_ptr(), held.data_ptr()
        scales = codes + self._scales_at
        with on(self._device):
            self._quantize(self._grid, source, codes, scales, source if signs is None else signs.data_ptr(), self._m)
            self._product(
                codes, scales, w.data_ptr(), sw.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr()
            )
        return y


def _types(out: torch.dtype, bias: torch.dtype | None) -> tuple[torch.dtype, ...]:
    return torch.int8, torch.float32, torch.int8, torch.float32, bias or out, out


def _gemv(
    shape: tuple[int, int, int], out: torch.dtype, bias: torch.dtype | None, device: torch.device, _: object
) -> Product:
    m, n, k = shape
    # ahead of it x is quantized, by a kernel that lets it start when all before is done
    config = gemm_int8_small.gemv_config(m, k, launches_overlap(device), at_rest=True)
    config |= {"HAS_BIAS": bias is not None, **overlapping(config)}
    launch = Launch(gemm_int8_small.gemv_kernel, (*_types(out, bias), n, k), config, device)
    grid = (triton.cdiv(n, config["BN"]), 1, 1)

    def product(x: int, sx: int, w: int, sw: int, b: int, y: int) -> None:
        launch(grid, x, sx, w, sw, b or y, y, n, k)

    return product


def _few_rows(
    shape: tuple[int, int, int], out: torch.dtype, bias: torch.dtype | None, device: torch.device, _: object
) -> Product:
    config = gemm_int8_small.few_rows_config(launches_overlap(device))
    config |= overlapping(config)
    programs = triton.cdiv(shape[1], config["BN"])
    return _tiles(gemm_int8_small.few_rows_kernel, config, programs, shape, out, bias, device)


def _mm(
    shape: tuple[int, int, int],
    out: torch.dtype,
    bias: torch.dtype | None,
    device: torch.device,
    tile: tuple[int, int] | None,
) -> Product:
    programs, config = gemm.int8_programs(shape[0], shape[1], tile, device)
    return _tiles(gemm.int8_mm_kernel, config | overlapping(config), programs, shape, out, bias, device)


def _ahead(
    shape: tuple[int, int, int],
    out: torch.dtype,
    bias: torch.dtype | None,
    device: torch.device,
    tile: tuple[int, int],
) -> Product:
    from hadaquant.kernels.gemm_int8_ahead import config, descriptors, int8_mm_ahead, programs_of

    x_address, w_address = Address(torch.int8), Address(torch.int8)
    tiles = descriptors(x_address, w_address, shape, tile)
    arguments = (*tiles, torch.float32, torch.float32, bias or out, out, *shape)
    # ahead of it x is quantized, by a kernel that lets it start when all before is done
    launch = Launch(int8_mm_ahead, arguments, config(shape[0], tile, bias is not None, at_rest=True), device)
    grid, turn = (programs_of(*shape[:2], tile), 1, 1), threading.Lock()

    def product(x: int, sx: int, w: int, sw: int, b: int, y: int) -> None:
        with turn:  # the descriptors are encoded while it is launched
            x_address.value, w_address.value = x, w
            launch(grid, *tiles, sx, sw, b or y, y, *shape)

    return product


def _tiles(
    kernel: object,
    config: dict[str, object],
    programs: int,
    shape: tuple[int, int, int],
    out: torch.dtype,
    bias: torch.dtype | None,
    device: torch.device,
) -> Product:
    config |= {"HAS_BIAS": bias is not None}
    launch = Launch(kernel, (*_types(out, bias), *shape), config, device)

    def product(x: int, sx: int, w: int, sw: int, b: int, y: int) -> None:
        launch((programs, 1, 1), x, sx, w, sw, b or y, y, *shape)

    return product


def _hopper(
    shape: tuple[int, int, int], out: torch.dtype, bias: torch.dtype | None, device: torch.device, _: object
) -> Product:
    from hadaquant.kernels.gemm_int8_hopper import config, descriptors, int8_mm_hopper, programs_of

    programs, cut = programs_of(shape[0], shape[1], multiprocessors(device))
    addresses = tuple(Address(t) for t in (torch.int8, torch.int8, out))
    tiles = descriptors(*addresses, shape, cut)
    arguments = (*tiles, torch.float32, torch.float32, bias or out, *shape)
    launch = Launch(int8_mm_hopper, arguments, config(cut, bias is not None), device)
    turn = threading.Lock()

    def product(x: int, sx: int, w: int, sw: int, b: int, y: int) -> None:
        with turn:  # the descriptors are encoded while it is launched
            for address, value in zip(addresses, (x, w, y), strict=True):
                address.value = value
            launch((programs, 1, 1), *tiles, sx, sw, b or y, *shape)

    return product


_PRODUCTS: dict[str, Callable[..., Product]] = {
    "int8_gemv": _gemv,
    "int8_few_rows": _few_rows,
    "int8_mm": _mm,
    "int8_mm_ahead": _ahead,
    "int8_mm_hopper": _hopper,
}
