"""What Triton's interpreter lacks to run the FP4 kernels: a fused multiply-add, and their inline PTX."""

from types import SimpleNamespace

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """RN(a · b + c): the product of two float32 is exact in a long double, and the sum is rounded to odd."""
    product = a.astype(np.longdouble) * b.astype(np.longdouble)
    c = c.astype(np.longdouble)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    toward = np.where(error > 0, np.inf, -np.inf).astype(np.longdouble)
    # of two neighbours, the one that is no tie of float32: where anything was lost, no tie is meant
    inexact = np.isfinite(total) & (error != 0)
    total = np.where(inexact & (total.astype(np.float64) == total), np.nextafter(total, toward), total)
    return total.astype(np.float32)


def _fma(self, x, y, z):
    if x.data.dtype == np.float32:
        return TensorHandle(_fused(x.data, y.data, z.data), z.dtype.scalar)
    return TensorHandle(x.data * y.data + z.data, z.dtype.scalar)


def _prmt(a: np.ndarray, b: np.ndarray, selectors: int) -> np.ndarray:
    both = b.view(np.uint32).astype(np.uint64) << np.uint64(32) | a.view(np.uint32).astype(np.uint64)
    out = np.zeros_like(a.view(np.uint32))
    for i in range(4):
        byte = both >> np.uint64(8 * (selectors >> (4 * i) & 7)) & np.uint64(0xFF)
        out |= byte.astype(np.uint32) << np.uint32(8 * i)
    return out.view(np.int32)


def _asm(self, text, constraints, values, types, is_pure, pack):
    data = [np.ascontiguousarray(v.data) for v in values]
    op, _, rest = text.partition(" ")
    if op == "rcp.approx.ftz.f32":
        out = (np.float32(1) / data[0]).astype(np.float32)
    elif op == "ex2.approx.ftz.f32":
        out = np.exp2(data[0])
    elif op == "lop3.b32":
        and_mask, or_mask, table = (int(n, 0) for n in rest.rstrip(";").split(", ")[2:])
        if table != 0xEA:
            raise NotImplementedError(text)
        out = ((data[0].view(np.uint32) & np.uint32(and_mask)) | np.uint32(or_mask)).view(np.int32)
    elif op == "prmt.b32":
        out = _prmt(*data, int(rest.rstrip(";").split(", ")[3], 0))
    else:
        raise NotImplementedError(text)
    dtype = types[0].scalar
    return SimpleNamespace(get_result=lambda _: TensorHandle(out, dtype))


def emulate(monkeypatch) -> None:
    """Give the interpreter both."""
    monkeypatch.setattr(InterpreterBuilder, "create_fma", _fma)
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", _asm)
