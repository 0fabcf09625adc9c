"""Choices that hold for the whole process, or for one call or module that names its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hadaquant.errors import UnknownChoice
from hadaquant.formats import Format

#: Other libraries' products, of int8 unless said otherwise. Such a name selects the product alone: what is no
#: product, rotate and quantize, then runs as by ``auto``.
PRODUCTS: tuple[str, ...] = ("cublas", "bf16", "sgl")

#: What may run an op. ``auto`` lets the plan choose; ``reference`` is plain torch on the tensor's own
#: device; ``triton`` is the fused kernel; ``cublas`` multiplies int8 by torch._int_mm, and FP4 on Blackwell
#: by torch.nn.functional.scaled_mm; ``bf16`` on bfloat16 matrix units, exactly; ``sgl`` by CUTLASS through
#: sgl_kernel, within one ulp. All but ``sgl`` give int8 the same bits.
BACKENDS: tuple[str, ...] = ("auto", "reference", "triton", *PRODUCTS)

_process_backend = "auto"


def check_backend(backend: str) -> str:
    """The backend, if it is one.

    Raises:
        UnknownChoice: it is none of ``BACKENDS``.
    """
    if backend not in BACKENDS:
        raise UnknownChoice(what="backend", value=backend, choices=", ".join(BACKENDS))
    return backend


def set_backend(backend: str) -> None:
    """Set what ``auto`` means for the whole process.

    Raises:
        UnknownChoice: it is none of ``BACKENDS``.
    """
    global _process_backend
    _process_backend = check_backend(backend)


def resolve_backend(backend: str) -> str:
    """A call's own backend, or the process's where the call says ``auto``."""
    return _process_backend if check_backend(backend) == "auto" else backend


def without_products(backend: str) -> str:
    """The resolved backend of an op that is no product."""
    backend = resolve_backend(backend)
    return "auto" if backend in PRODUCTS else backend


def scale_layout_for(format: Format, backend: str) -> str:
    """The order of block scales that a product by this backend reads."""
    return "tiled" if format.block is not None and resolve_backend(backend) == "cublas" else "linear"


@contextmanager
def using_backend(backend: str) -> Iterator[None]:
    """Set the process's backend for a ``with`` block."""
    before = _process_backend
    set_backend(backend)
    try:
        yield
    finally:
        set_backend(before)
