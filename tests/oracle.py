"""Every format by another road than the reference: numpy, float64 and ml_dtypes, block by block in words.

A quotient or product of two float32 numbers, computed in float64 and rounded once more to float32, is the
correctly rounded one: 53 bits are more than twice 24 and two (Figueroa, 1995), and quotients that end in a
float32 subnormal lie too far from a midpoint to be moved onto it. Elements and E4M3 scales are rounded by
ml_dtypes' casts, E8M0 exponents found by comparing powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

F32 = np.float32
E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass
class Quantized:
    """codes one a byte [M, K]; scales as stored; multiplier float32, one a block [M, blocks]."""

    codes: np.ndarray
    scales: np.ndarray
    multiplier: np.ndarray
    values: np.ndarray


def divide(a, b) -> np.ndarray:
    """RN32(a / b) of float32 arrays."""
    with np.errstate(all="ignore"):
        return (np.asarray(a, np.float64) / np.asarray(b, np.float64)).astype(F32)


def multiply(a, b) -> np.ndarray:
    """RN32(a · b) of float32 arrays; the product itself is exact in float64."""
    with np.errstate(all="ignore"):
        return (np.asarray(a, np.float64) * np.asarray(b, np.float64)).astype(F32)


def e2m1(q: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Codes of |q| by ml_dtypes, the sign bit from y."""
    return np.abs(q).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) | ((y < 0).astype(np.uint8) << 3)


def e4m3(s: np.ndarray) -> np.ndarray:
    """Bytes of s >= 0, saturating at 448."""
    return np.minimum(s, F32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def e8m0_exponent(amax: float, rule: str) -> int:
    """The exponent of a power-of-two scale, clamped to -127..127."""
    if amax == 0:
        return -127
    mantissa, exponent = np.frexp(np.float64(amax))  # amax = mantissa * 2**exponent, 0.5 <= mantissa < 1
    floor = int(exponent) - 1
    if rule == "floor":
        e = floor - 2
    elif rule == "even":
        e = floor - 2 + (mantissa * 2 >= 1.75)
    else:
        e = next(e for e in range(floor - 4, floor + 4) if amax <= np.ldexp(6.0, e))
    return max(-127, min(127, int(e)))


def global_scale(y: np.ndarray) -> np.float32:
    """g = (amax / 6) / 448 over the finite values, 1.0 where that is 0."""
    finite = np.abs(y[np.isfinite(y)])
    amax = finite.max() if finite.size else F32(0)
    g = divide(divide(amax, F32(6)), F32(448))
    return F32(1) if g == 0 else F32(g)


def quantize(y: np.ndarray, name: str, g: np.float32 | None = None) -> Quantized:
    """Quantize rotated float32 y [M, K] by the contract of a format."""
    m, k = y.shape
    block = {"nvfp4": 16, "int8": k}.get(name, 32)
    blocks = y.reshape(m, k // block, block)
    with np.errstate(all="ignore"):
        bad = np.logical_not(np.isfinite(blocks).all(axis=-1, keepdims=True))[..., 0]
        amax = np.where(bad, 0, np.abs(blocks).max(-1)).astype(F32)
    if name == "nvfp4":
        g = global_scale(y) if g is None else g
        scales = np.where(bad, np.uint8(0x7F), e4m3(divide(divide(amax, F32(6)), g)))
        multiplier = multiply(scales.view(ml_dtypes.float8_e4m3fn).astype(F32), g)
    elif name == "int8":
        scales = divide(np.maximum(amax, F32(1e-12)), F32(127))
        scales.view(np.uint32)[bad] = 0x7FC00000
        multiplier = scales
    else:
        rule = {"mxfp4": "floor", "mxfp4-ceil": "ceil", "mxfp4-even": "even"}[name]
        exponents = np.vectorize(lambda a: e8m0_exponent(a, rule), otypes=[int])(amax)
        scales = np.where(bad, 255, exponents + 127).astype(np.uint8)
        multiplier = np.where(bad, np.nan, np.ldexp(1.0, exponents)).astype(F32)
    with np.errstate(all="ignore"):
        divisor = np.where(bad, 1, np.where(multiplier == 0, 1, multiplier)).astype(F32)
        y0 = np.where(bad[..., None], 0, blocks).astype(F32)
        q = divide(y0, divisor[..., None])
        if name == "int8":
            codes = np.clip(np.rint(q), -127, 127).astype(np.int8)
            decoded = codes.astype(F32)
        else:
            codes = e2m1(q, y0)
            decoded = codes.view(ml_dtypes.float4_e2m1fn).astype(F32)
        values = multiply(decoded, multiplier[..., None])
    stored = scales[:, 0] if name == "int8" else scales
    return Quantized(codes.reshape(m, k), stored, multiplier, values.reshape(m, k))


def pack(codes: np.ndarray) -> np.ndarray:
    """Element 2i in the low nibble."""
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)
