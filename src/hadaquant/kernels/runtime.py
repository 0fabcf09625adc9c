"""What every launcher needs: the compile options of the numerics contract, and the right device."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

#: A fused multiply-add rounds once where the contract rounds twice.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}

#: Of a Hopper multiprocessor: registers, shared memory, warps, blocks.
_REGISTERS, _SHARED, _WARPS, _BLOCKS = 65536, 228 * 1024, 64, 32
#: Triton's, where a kernel's options say nothing.
_DEFAULT_WARPS = 4


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on a device that need not be the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def given(tensor: Tensor | None, x: Tensor) -> Tensor:
    """The tensor, or x in place of one that the kernel was compiled not to read: a pointer must be one."""
    return x if tensor is None else tensor


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that does not begin at a multiple of 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


@functools.cache
def launches_overlap(device: torch.device) -> bool:
    """Whether a kernel can start before the one ahead of it ends: programmatic dependent launch, from sm_90."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping(config: dict[str, Any]) -> dict[str, Any]:
    """The launch option of a kernel that waits for its input by itself.

    Before it has waited it must read nothing that a kernel may have written, however long ago: the kernel ahead
    can have let it start while its own predecessors were still at work.
    """
    return {"launch_pdl": True} if config["OVERLAP"] else {}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a GPU has; 1 on the CPU, in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a block may use; 0 on the CPU, in the interpreter."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def by_address(device: torch.device) -> bool:
    """Whether :class:`Launch` takes addresses there. AMD's GPUs, and the CPU in the interpreter, are given tensors."""
    return device.type == "cuda" and not torch.version.hip


def _even(blocks: int, warps: int) -> int:
    """Blocks of so many warps on a multiprocessor, rounded down so that its four schedulers get equal numbers."""
    while blocks * warps > 4 and blocks * warps % 4:
        blocks -= 1
    return max(blocks, 1)


class Launch:
    """A kernel compiled once for one set of constants, launched without looking at its arguments again.

    ``arguments``: tensors, dtypes of tensors, numbers or descriptors, as the kernel will get them: later ones must
    have the same dtypes, the same alignment to 16 bytes, and numbers of the same divisibility. Later pointers are
    addresses, or tensors where the device has none (:func:`by_address`), and the kernel is launched as Triton does.
    """

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], config: dict[str, Any], device: torch.device) -> None:
        import triton

        self._kernel, self._config = kernel, config
        self._compiled, self._warps, self.device = None, config.get("num_warps", _DEFAULT_WARPS), device
        if not by_address(device):
            return
        names = kernel.arg_names
        self._constants = tuple(config[name] for name in names[len(arguments) :])
        with on(device):
            self._compiled = kernel.warmup(*arguments, **config, grid=(1,))
            self._run = self._compiled.run  # loads it
        self._knobs, self._driver = triton.knobs.runtime, triton.runtime.driver
        self.occupancy = self._occupancy(self._warps)

    def _occupancy(self, warps: int) -> int:
        """Blocks a multiprocessor holds."""
        per_warp = -(-self._compiled.n_regs // 8) * 8 * 32
        blocks = min(_REGISTERS // (per_warp * warps), _WARPS // warps, _BLOCKS)
        if self._compiled.metadata.shared:
            blocks = min(blocks, _SHARED // (self._compiled.metadata.shared + 1024))
        return _even(blocks, warps)

    def grid_of(self, rows: int, most: int = _BLOCKS) -> tuple[int, int, int]:
        """Of persistent programs that share rows: as many as the device holds at once, or one a row.

        ``most``: on a multiprocessor.
        """
        blocks = _even(min(self.occupancy, most), self._warps)
        return min(rows, multiprocessors(self.device) * blocks), 1, 1

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch on the current stream of the device, which must be the current one."""
        kernel = self._compiled
        if kernel is None:
            self._kernel[grid](*arguments, **self._config)
            return
        knobs = self._knobs
        enter, leave = _used(knobs.launch_enter_hook), _used(knobs.launch_exit_hook)
        stream = self._driver.active.get_current_stream(self.device.index)
        metadata = kernel.launch_metadata(grid, stream, *arguments, *self._constants) if enter or leave else None
        self._run(
            *grid, stream, kernel.function, kernel.packed_metadata, metadata, enter, leave,
            *arguments, *self._constants,
        )  # fmt: skip


def _used(hook: Any) -> Any:
    """Triton's hook, or None in place of a chain that nothing was added to, which would cost a microsecond."""
    return hook if getattr(hook, "calls", hook) else None


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], config: dict[str, Any]) -> None:
    """Launch on the current stream of the arguments' device: tensors, integers or descriptors, then constants.

    Compiled once for all arguments of a kind. Triton's own launcher looks at every constant in every call, which takes
    the host longer than most of these kernels take the device.
    """
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    with on(device):
        if not by_address(device):
            kernel[grid](*arguments, **config)
            return
        key = (id(kernel), device.index, *map(_kind, arguments), *config.items())
        prepared = _launches.get(key)
        if prepared is None:
            prepared = _launches[key] = Launch(kernel, arguments, config, device)
        prepared((*grid, 1, 1)[:3], *addresses(arguments))


def addresses(arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments with addresses for tensors, which a launch need not look up."""
    return [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]


def _kind(a: Any) -> tuple[object, ...]:
    """What of an argument Triton compiles for."""
    if isinstance(a, Tensor):
        return a.dtype, a.data_ptr() % 16 == 0
    if isinstance(a, int):
        return a == 1, a % 16 == 0, a.bit_length() > 31
    return (None,) if a is None else (a.base.dtype, *a.block_shape)


_launches: dict[tuple[object, ...], Launch] = {}


class Address:
    """Where a tensor descriptor's data lies, in place of a tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.value = dtype, 0

    def data_ptr(self) -> int:
        """The address in bytes."""
        return self.value
