"""The kernels that can multiply two quantized matrices, and what speaks for and against each at a shape."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch

from hadaquant.formats import Format
from hadaquant.ops.options import PRODUCTS
from hadaquant.ops.target import Target

#: Kernels of kernels/vendor.py.
OTHERS_PRODUCTS: tuple[str, ...] = tuple(f"int8_{backend}" for backend in PRODUCTS)
#: The kernel of kernels/block_scaled.py.
BLOCK_SCALED = "fp4_block_scaled"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel, the backend it belongs to, why it would be chosen, and what speaks against it.

    ``refusal``: why it cannot run. ``unasked``: why ``auto`` prefers another. ``named_only``: ``auto``
    never takes it. ``tile``: rows and columns of the output a program makes, where the kernel leaves a choice.
    """

    kernel: str
    why: str
    backend: str = "triton"
    refusal: str | None = None
    unasked: str | None = None
    named_only: bool = False
    tile: tuple[int, int] | None = None


def product_candidates(
    format: Format, target: Target, m: int, n: int, k: int, out_dtype: torch.dtype
) -> list[Candidate]:
    """Candidates for [M, K] · [N, K]ᵀ, best first."""
    if format.block is None:
        return _int8_candidates(target, m, n, k, out_dtype)
    return _fp4_candidates(format, target, m, n, k, out_dtype)


#: Most rows for which the integer cores, and then slices of K over warps, beat tiles (measured on an H200).
GEMV_ROWS, FEW_ROWS = 2, 16
#: Of cuBLASLt's int8 product, and of CUTLASS's.
CUBLAS_MULTIPLE, SGL_MULTIPLE = 8, 16


def small_tile(m: int, n: int, target: Target) -> tuple[int, int] | None:
    """Tile of a product of few rows: the largest whose count is within two for each multiprocessor.

    None where even the largest small tile comes in greater numbers. Measured on an H200.
    """
    if m <= FEW_ROWS:
        return 16, 32
    if m <= 64:
        return (64, 32) if -(-n // 32) <= target.multiprocessors else (64, 64)
    for rows, columns in ((64, 64), (64, 128)):
        if -(-m // rows) * -(-n // columns) <= 2 * target.multiprocessors:
            return rows, columns
    return None


_WARPGROUPS = "it is written for the warpgroup instructions of sm_90"
#: Tiles of the Hopper product of few rows, the best first where every program has a multiprocessor for itself.
AHEAD_TILES = ((64, 32), (64, 64), (64, 128), (128, 128))


def ahead_tile(m: int, n: int, target: Target) -> tuple[int, int] | None:
    """The first of :data:`AHEAD_TILES` of which each multiprocessor has one at most."""
    for rows, columns in AHEAD_TILES:
        if -(-m // rows) * -(-n // columns) <= target.multiprocessors:
            return rows, columns
    return None


def _int8_candidates(target: Target, m: int, n: int, k: int, out_dtype: torch.dtype) -> list[Candidate]:
    nvidia = None if target.vendor == "nvidia" else "it is written in NVIDIA's instructions"
    gemv = nvidia or (f"M={m} is above {GEMV_ROWS}" if m > GEMV_ROWS else None) or (f"K={k} % 4" if k % 4 else None)
    few = nvidia or (f"M={m} is above {FEW_ROWS}" if m > FEW_ROWS else None)
    if not few and -(-n // 16) > 2 * target.multiprocessors:
        few = f"N={n} fills the multiprocessors without slicing K"
    # of the kernels on int8 matrix units
    slow = None if target.int8_units else f"the int8 units of {target} are slower than its bfloat16 units"
    return [
        Candidate(kernel="int8_gemv", why="four products an instruction, each weight read once", refusal=gemv),
        Candidate(
            kernel="int8_mm_ahead",
            why="warpgroup matrix units fed by TMA, weights on their way before x is there",
            refusal=_ahead_refusal(target, m, n, k),
            tile=ahead_tile(m, n, target),
        ),
        Candidate(
            kernel="int8_few_rows", why="warps take slices of K, each weight read once", refusal=few, unasked=slow
        ),
        Candidate(
            kernel="int8_mm_hopper",
            why="warpgroup matrix units fed by TMA, exact int32 sums",
            refusal=_int8_hopper_refusal(target, m, n, k, out_dtype),
        ),
        _cublas(target, m, n, k, slow),
        _bf16(target, slow),
        Candidate(
            kernel="int8_mm",
            why="tiles on the int8 matrix units, exact int32 sums",
            tile=small_tile(m, n, target) or (128, 128),
            unasked=slow,
        ),
        _sgl(target, n, k, out_dtype),
    ]


def _ahead_refusal(target: Target, m: int, n: int, k: int) -> str | None:
    if target.name != "sm_90":
        return _WARPGROUPS
    if k % 16:
        return f"TMA needs K % 16 == 0, not K={k}"
    if ahead_tile(m, n, target) is None:
        return f"M={m}, N={n} are more 128x128 tiles than multiprocessors"
    return None


def _int8_hopper_refusal(target: Target, m: int, n: int, k: int, out_dtype: torch.dtype) -> str | None:
    if target.name != "sm_90":
        return _WARPGROUPS
    if small_tile(m, n, target) is not None:
        return f"M={m}, N={n} are too few 128x256 tiles to fill the multiprocessors"
    if k % 16 or n % 8:
        return f"TMA needs K % 16 == 0 and N % 8 == 0, not K={k}, N={n}"
    if out_dtype not in (torch.bfloat16, torch.float16):
        return f"its staging buffers hold 16-bit outputs, not {out_dtype}"
    return None


def _cublas(target: Target, m: int, n: int, k: int, slow: str | None) -> Candidate:
    padded = n % CUBLAS_MULTIPLE or k % CUBLAS_MULTIPLE
    unasked = slow
    if target.arch < 100:
        unasked = f"Triton's kernels are expected faster on {target}"
    elif m <= FEW_ROWS:
        unasked = f"it takes 17 rows at least, more than M={m}"
    elif padded:
        unasked = f"it needs multiples of {CUBLAS_MULTIPLE}: N={n}, K={k} would be padded by a copy in each call"
    return Candidate(
        kernel="int8_cublas",
        why="cuBLASLt's exact int32 sums, then one pass of scales and bias" + (", operands padded" if padded else ""),
        backend="cublas",
        refusal=None if target.vendor == "nvidia" else "it is NVIDIA's library",
        unasked=unasked,
    )


def _bf16(target: Target, slow: str | None) -> Candidate:
    supported = target.vendor == "nvidia" and target.arch >= 80
    return Candidate(
        kernel="int8_bf16",
        why="bfloat16 matrix units, exact over short slices of K" + (f", since {slow}" if slow else ""),
        backend="bf16",
        refusal=None if supported else "it needs the bfloat16 matrix units of an NVIDIA GPU from sm_80",
        unasked=None if slow else f"the int8 units of {target} are faster",
    )


@functools.cache
def has_sgl() -> bool:
    """Whether sgl_kernel is installed. Looked up once a process, and not imported."""
    return importlib.util.find_spec("sgl_kernel") is not None


def _sgl(target: Target, n: int, k: int, out_dtype: torch.dtype) -> Candidate:
    refusal = None
    if target.vendor != "nvidia":
        refusal = "it is written for NVIDIA's GPUs"
    elif not has_sgl():
        refusal = "the package sgl-kernel is not installed"
    elif n % SGL_MULTIPLE or k % SGL_MULTIPLE:
        refusal = f"it needs N and K to be multiples of {SGL_MULTIPLE}, not N={n}, K={k}"
    elif out_dtype not in (torch.bfloat16, torch.float16):
        refusal = f"it writes 16-bit outputs, not {out_dtype}"
    return Candidate(
        kernel="int8_sgl",
        why="CUTLASS's int8 product, within one ulp",
        backend="sgl",
        refusal=refusal,
        unasked="it multiplies the two scales first, which can differ by one ulp: only by name",
        named_only=True,
    )


#: Most rows for integer sums of codes, and for weights decoded in registers beside an x of bfloat16.
FP4_GEMV_ROWS, FP4_VALUE_ROWS = 4, 64


def packed_refusal(format: Format, target: Target, k: int) -> str | None:
    """What speaks against decoding packed weights in registers."""
    if target.vendor != "nvidia":
        return "it is written in NVIDIA's instructions"
    if format.block is None:
        return f"it decodes packed four-bit codes, not {format}"
    return f"it reads 32 codes at a time, K={k} is no multiple of them" if k % 32 else None


def hopper_refusal(packed: str | None, target: Target, n: int, out_dtype: torch.dtype) -> str | None:
    """What speaks against Hopper's product of packed weights. ``packed``: of :func:`packed_refusal`."""
    if target.name != "sm_90":
        return _WARPGROUPS
    if not packed and n % 8:
        return f"TMA needs N % 8 == 0, not N={n}"
    if not packed and out_dtype not in (torch.bfloat16, torch.float16):
        return f"its staging buffers hold 16-bit outputs, not {out_dtype}"
    return packed


def copied_refusal(target: Target) -> str | None:
    """What speaks against a product of bfloat16 copies by torch."""
    return None if target.vendor == "nvidia" else "torch's bfloat16 product into float32 is CUDA's"


def _fp4_candidates(format: Format, target: Target, m: int, n: int, k: int, out_dtype: torch.dtype) -> list[Candidate]:
    packed = packed_refusal(format, target, k)
    hopper = hopper_refusal(packed, target, n, out_dtype)
    return [
        Candidate(
            kernel="fp4_gemv",
            why="exact integer sums of 16 codes, each weight read once",
            refusal=packed or (f"M={m} is above {FP4_GEMV_ROWS}" if m > FP4_GEMV_ROWS else None),
        ),
        Candidate(
            kernel="fp4_value_rows",
            why="weights decoded in the registers of the bfloat16 matrix units, each once; x decoded before",
            refusal=packed or (f"M={m} is above {FP4_VALUE_ROWS}" if m > FP4_VALUE_ROWS else None),
            unasked=None if hopper else _rows_read_again(m),
            tile=_value_rows_tile(m, n, target),
        ),
        Candidate(
            kernel="fp4_mm_hopper",
            why="weights decoded in the registers of the warpgroup matrix units, fed by TMA",
            refusal=hopper,
            tile=hopper_tile(m, n, target),
        ),
        Candidate(
            kernel="fp4_unpacked",
            why="both operands copied to bfloat16 (exact), multiplied by torch into float32, then one pass of scales",
            refusal=copied_refusal(target),
        ),
        Candidate(kernel="fp4_mm", why="codes times block scales decoded to bfloat16 (exact), multiplied into float32"),
        _block_scaled(format, target, n, k, out_dtype),
    ]


def _block_scaled(format: Format, target: Target, n: int, k: int, out_dtype: torch.dtype) -> Candidate:
    outputs = (torch.bfloat16, torch.float16) if format.has_global_scale else (torch.bfloat16,)
    refusal = None
    if not target.fp4_units:
        refusal = f"{target} has no FP4 units that torch multiplies on"
    elif not format.has_global_scale and target.arch // 10 != 10:
        refusal = f"torch multiplies MXFP4 on sm_100 and sm_103 alone, not on {target}"
    elif n % 16 or k % 32:
        refusal = f"it needs N % 16 == 0 and K % 32 == 0, not N={n}, K={k}"
    elif out_dtype not in outputs:
        refusal = f"of {format} it writes {' or '.join(map(str, outputs))}, not {out_dtype}"
    return Candidate(
        kernel=BLOCK_SCALED,
        why="codes and tiled scales as they are, on the block-scaled FP4 units, by torch.nn.functional.scaled_mm",
        backend="cublas",
        refusal=refusal,
        unasked="it has never run on hardware: only by name, backend='cublas'",
        named_only=True,
    )


def _value_rows_tile(m: int, n: int, target: Target) -> tuple[int, int]:
    """Rows of x and of the weight in a tile: of few rows narrow ones, while they all run at once."""
    if m <= 16:
        return (8 if m <= 8 else 16), 16 if -(-n // 16) <= 2 * target.multiprocessors else 32
    return (32 if m <= 32 else 64), 32


def _rows_read_again(m: int) -> str | None:
    """Why ``auto`` prefers the Hopper product to one whose every program reads all of x (measured on an H200)."""
    return f"each of its programs reads all M={m} rows, which is slower from 17 on" if m > 16 else None


def hopper_tile(m: int, n: int, target: Target) -> tuple[int, int]:
    """Rows of x and of the weight in a tile of the Hopper product: what fills the multiprocessors best."""
    if m <= 128:
        return max(16, 1 << (m - 1).bit_length()), 128

    def waves(rows: int) -> int:
        return -(-(-(-m // rows) * -(-n // 128)) // target.multiprocessors)

    # half a tile takes seven tenths of a tile's time, measured on an H200
    return (128, 128) if waves(128) * 0.7 < waves(256) else (256, 128)
