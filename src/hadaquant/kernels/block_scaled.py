"""FP4 product on the block-scaled matrix units of Blackwell, by torch.nn.functional.scaled_mm.

Codes go in as they are, two a byte, as float4_e2m1fn_x2; scales in the 128x4 tiled order. NVFP4 (cuBLASLt): E4M3
scales of 16, and the product of the two global scales as a factor of the float32 sums, then the bias, then one
rounding. MXFP4 (CUTLASS, in builds of torch that have it): E8M0 scales of 32, a bfloat16 result, and a bias that is
added to that, so rounded once more.

This has never run on such hardware: what torch is given is tested against a stand-in.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from hadaquant import layout
from hadaquant.errors import DtypeError
from hadaquant.formats import Format

#: Tiled copies of weights' scales, each with what tells that the scales have changed since.
_tiled: WeakIdKeyDictionary = WeakIdKeyDictionary()


def scaled_mm(
    x: Tensor,
    sx: Tensor,
    gx: Tensor | None,
    w: Tensor,
    sw: Tensor,
    gw: Tensor | None,
    format: Format,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    x_layout: str,
    w_layout: str,
) -> Tensor:
    """[M, N] of packed x [M, K/2] and w [N, K/2], N % 16 == 0, K % 32 == 0.

    Linear scales are tiled here: x's in each call, w's once.

    Raises:
        DtypeError: NVFP4 with a bias of another dtype than the output.
    """
    a = x.contiguous().view(torch.float4_e2m1fn_x2)
    b = w.contiguous().view(torch.float4_e2m1fn_x2).T  # column-major [K/2, N]
    sx = sx if x_layout == "tiled" else layout.tile_scales(sx)
    sw = sw if w_layout == "tiled" else tiled_once(sw)
    tiles = functional.SwizzleType.SWIZZLE_32_4_4
    if gx is None or gw is None:
        ex, ew = (s.contiguous().view(torch.float8_e8m0fnu) for s in (sx, sw))
        recipe = functional.ScalingType.BlockWise1x32
        y = functional.scaled_mm(a, b, ex, recipe, ew, recipe, tiles, tiles, output_dtype=out_dtype)
        return y if bias is None else y.add_(bias)
    if bias is not None and bias.dtype != out_dtype:
        fix = f"cast the bias to {out_dtype}, or choose another backend"
        raise DtypeError(
            what="bias with backend='cublas'", found=bias.dtype, expected=f"{out_dtype}, the output's", fix=fix
        )
    ex, ew = (s.contiguous().view(torch.float8_e4m3fn) for s in (sx, sw))
    recipes = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
    order = [tiles, functional.SwizzleType.NO_SWIZZLE]
    return functional.scaled_mm(
        a, b, [ex, gx], recipes, [ew, gw], recipes, order, order, bias=bias, output_dtype=out_dtype
    )


def tiled_once(scales: Tensor) -> Tensor:
    """``layout.tile_scales`` of a weight's scales, kept until they change or die.

    A change in place is seen by the tensor's version, so one through ``.data`` is not; a tensor of inference mode has
    no version, and its tiled scales are not kept.
    """
    if scales.is_inference():
        return layout.tile_scales(scales)
    state = (scales._version, scales.data_ptr())
    found = _tiled.get(scales)
    if found is not None and found[0] == state:
        return found[1]
    tiled = layout.tile_scales(scales)
    if scales.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return tiled  # memory of the graph, which holds nothing before a replay
        torch.cuda.current_stream(scales.device).synchronize()  # once a weight: it may be read on another stream
    _tiled[scales] = (state, tiled)
    return tiled
