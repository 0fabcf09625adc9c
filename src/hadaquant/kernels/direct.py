"""Both kernels of an INT8 linear behind one Python call, prepared for one number of rows.

Between two kernels of a few microseconds each, the host is what one waits for. All that depends on shapes
and dtypes is done once, here; a call makes two allocations and two launches on bare addresses.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from hadaquant.formats import Format
from hadaquant.front import NONE, FrontEnd
from hadaquant.kernels import front, products_int8, quantize_front_gluon, quantize_rows_gluon
from hadaquant.kernels.runtime import on

#: The scales of x follow its codes in one allocation, at a multiple of this many bytes.
_BOUNDARY = 256


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
        front_end: FrontEnd = NONE,
    ) -> None:
        """Prepare for one shape.

        Args:
            rotation: kind, group, whether it has signs.
            shape: M, N, K.
            dtypes: of x, of y, and of the bias if there is one.
            kernel, tile: the product's plan.
            front_end: one of the kind that calls will have, with tensors of the same dtypes.
        """
        m, _, k = shape
        self._m, self._device, self._dtype = m, device, dtypes[1]
        self._scales_at = triton.cdiv(m * k, _BOUNDARY) * _BOUNDARY
        self._front = None
        if front_end is NONE:
            self._quantize = quantize_rows_gluon.launch_of(format, *rotation, k, dtypes[0], device)
            self._grid = quantize_rows_gluon.grid_of(self._quantize, m, k)
        else:
            of_tensors = (dtypes[0] if t is None else t.dtype for t in front_end.tensors)
            described = format, rotation, front.constants(front_end), m, k, (dtypes[0], *of_tensors), device
            self._front = quantize_front_gluon.prepared(*described)
        # x is quantized by a kernel that lets the product start when all before is done
        self._product = products_int8.prepared(kernel, shape, dtypes[1], dtypes[2], device, tile, at_rest=True)

    def __call__(
        self, x: Tensor, tensors: tuple[Any, ...], shape: tuple[int, ...], front_end: FrontEnd = NONE
    ) -> Tensor:
        """y of a shape that holds M rows. All tensors on the device, a linear's contiguous, on 16-byte boundaries.

        Args:
            x: [..., K]; without a front end contiguous, on a 16-byte boundary.
            tensors: w, its scales, twice None for the global scales other formats have, the bias and signs or None.
        """
        w, sw, _, _, bias, signs = tensors
        held = torch.empty(self._scales_at + 4 * self._m, dtype=torch.uint8, device=self._device)
        y = torch.empty(shape, dtype=self._dtype, device=self._device)
        codes = held.data_ptr()
        scales = codes + self._scales_at
        sign = None if signs is None else signs.data_ptr()
        with on(self._device):
            if self._front is None:
                source = x.data_ptr()
                self._quantize(self._grid, source, codes, scales, source if sign is None else sign, self._m)
            else:
                self._front(front.as_rows(x), codes, scales, sign, front_end)
            self._product(
                codes, scales, w.data_ptr(), sw.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
            )
        return y
