"""INT8 products prepared for one shape: a kernel, its constants and its grid behind a call on pointers.

Where a kernel takes a few microseconds the host is what one waits for, so all that depends on shapes and dtypes
is done once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hadaquant.kernels import gemm, gemm_int8_small
from hadaquant.kernels.runtime import Address, Launch, launches_overlap, multiprocessors, overlapping

#: An address, or a tensor where kernels are not launched by addresses (``runtime.by_address``).
Pointer = int | Tensor
#: x's codes and scales, w's codes and scales, the bias if there is one, and y; all on 16-byte boundaries.
Product = Callable[[Pointer, Pointer, Pointer, Pointer, Pointer | None, Pointer], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a product is prepared for.

    ``shape``: M, N, K. ``tile``: the plan's. ``at_rest``: the kernel ahead does not write the weight, and all before
    that one are done.
    """

    shape: tuple[int, int, int]
    out: torch.dtype
    bias: torch.dtype | None
    device: torch.device
    tile: tuple[int, int] | None
    at_rest: bool

    @property
    def bias_or_out(self) -> torch.dtype:
        """What stands for the bias: y where there is none, since a pointer must be one."""
        return self.bias or self.out

    @property
    def types(self) -> tuple[torch.dtype, ...]:
        """Of the pointers."""
        return torch.int8, torch.float32, torch.int8, torch.float32, self.bias_or_out, self.out


def _gemv(case: Case) -> Product:
    m, n, k = case.shape
    config = gemm_int8_small.gemv_config(m, k, launches_overlap(case.device), case.at_rest)
    config |= {"HAS_BIAS": case.bias is not None, **overlapping(config)}
    launch = Launch(gemm_int8_small.gemv_kernel, (*case.types, n, k), config, case.device)
    grid = (triton.cdiv(n, config["BN"]), 1, 1)

    def product(x: Pointer, sx: Pointer, w: Pointer, sw: Pointer, b: Pointer | None, y: Pointer) -> None:
        launch(grid, x, sx, w, sw, y if b is None else b, y, n, k)

    return product


def _few_rows(case: Case) -> Product:
    config = gemm_int8_small.few_rows_config(launches_overlap(case.device))
    return _tiles(case, gemm_int8_small.few_rows_kernel, config, triton.cdiv(case.shape[1], config["BN"]))


def _mm(case: Case) -> Product:
    programs, config = gemm.int8_programs(*case.shape[:2], case.tile, case.device)
    return _tiles(case, gemm.int8_mm_kernel, config, programs)


def _tiles(case: Case, kernel: Any, config: dict[str, Any], programs: int) -> Product:
    config |= {"HAS_BIAS": case.bias is not None, **overlapping(config)}
    launch, shape = Launch(kernel, (*case.types, *case.shape), config, case.device), case.shape

    def product(x: Pointer, sx: Pointer, w: Pointer, sw: Pointer, b: Pointer | None, y: Pointer) -> None:
        launch((programs, 1, 1), x, sx, w, sw, y if b is None else b, y, *shape)

    return product


def _ahead(case: Case) -> Product:
    from hadaquant.kernels.gemm_int8_ahead import config, descriptors, int8_mm_ahead, programs_of

    shape, tile = case.shape, case.tile or (128, 128)
    x_address, w_address = Address(torch.int8), Address(torch.int8)
    tiles = descriptors(x_address, w_address, shape, tile)
    constants = config(shape[0], tile, case.bias is not None, case.at_rest)
    arguments = (*tiles, torch.float32, torch.float32, case.bias_or_out, case.out, *shape)
    launch = Launch(int8_mm_ahead, arguments, constants, case.device)
    grid, turn = (programs_of(*shape[:2], tile), 1, 1), threading.Lock()

    def product(x: Pointer, sx: Pointer, w: Pointer, sw: Pointer, b: Pointer | None, y: Pointer) -> None:
        with turn:  # the descriptors are encoded while it is launched
            x_address.value, w_address.value = x, w
            launch(grid, *tiles, sx, sw, y if b is None else b, y, *shape)

    return product


def _hopper(case: Case) -> Product:
    from hadaquant.kernels.gemm_int8_hopper import config, descriptors, int8_mm_hopper, programs_of

    shape = case.shape
    programs, cut = programs_of(*shape[:2], multiprocessors(case.device))
    addresses = x_address, w_address, y_address = Address(torch.int8), Address(torch.int8), Address(case.out)
    tiles = descriptors(*addresses, shape, cut)
    arguments = (*tiles, torch.float32, torch.float32, case.bias_or_out, *shape)
    launch = Launch(int8_mm_hopper, arguments, config(cut, case.bias is not None), case.device)
    turn = threading.Lock()

    def product(x: Pointer, sx: Pointer, w: Pointer, sw: Pointer, b: Pointer | None, y: Pointer) -> None:
        with turn:  # the descriptors are encoded while it is launched
            x_address.value, w_address.value, y_address.value = x, w, y
            launch((programs, 1, 1), *tiles, sx, sw, y if b is None else b, *shape)

    return product


_MAKERS: dict[str, Callable[[Case], Product]] = {
    "int8_gemv": _gemv,
    "int8_few_rows": _few_rows,
    "int8_mm": _mm,
    "int8_mm_ahead": _ahead,
    "int8_mm_hopper": _hopper,
}


@functools.lru_cache(maxsize=4096)
def prepared(
    kernel: str,
    shape: tuple[int, int, int],
    out: torch.dtype,
    bias: torch.dtype | None,
    device: torch.device,
    tile: tuple[int, int] | None,
    at_rest: bool = False,
) -> Product:
    """The product by a kernel of the plan; arguments as of :class:`Case`."""
    return _MAKERS[kernel](Case(shape=shape, out=out, bias=bias, device=device, tile=tile, at_rest=at_rest))
