"""Hardware facts that plans are made of. A target can be built without owning the hardware."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from hadaquant.errors import UnknownChoice


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of hardware.

    Attributes:
        name: ``cpu``, ``interpreter``, ``sm_90``, ``gfx942``, ...
        vendor: ``cpu``, ``nvidia`` or ``amd``.
        arch: compute capability times ten, or the gfx number; 0 for a CPU.
        warp: threads of a warp.
        multiprocessors: of the largest card of its kind.
        shared_bytes: shared memory a block may use.
        int8_units: whether matrix units multiply int8 at more than the bf16 rate.
        fp4_units: whether matrix units multiply block-scaled E2M1.
    """

    name: str
    vendor: Literal["cpu", "nvidia", "amd"]
    arch: int
    warp: int = 32
    multiprocessors: int = 1
    shared_bytes: int = 0
    int8_units: bool = True
    fp4_units: bool = False

    def __str__(self) -> str:
        return self.name


def _nvidia(
    arch: int, multiprocessors: int, shared_kib: int, *, int8_units: bool = True, fp4_units: bool = False
) -> Target:
    return Target(
        name=f"sm_{arch}",
        vendor="nvidia",
        arch=arch,
        multiprocessors=multiprocessors,
        shared_bytes=shared_kib * 1024,
        int8_units=int8_units,
        fp4_units=fp4_units,
    )


def _amd(name: str, multiprocessors: int, shared_kib: int) -> Target:
    return Target(
        name=name,
        vendor="amd",
        arch=int(name[3:]),
        warp=64,
        multiprocessors=multiprocessors,
        shared_bytes=shared_kib * 1024,
    )


#: Shared memory a block can opt in to: CUDA C++ Programming Guide, compute capabilities; AMD's CDNA
#: ISA documents for the LDS. The INT8 units of 10.3 run at a small fraction of 10.0's.
TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target(name="cpu", vendor="cpu", arch=0),
        Target(name="interpreter", vendor="cpu", arch=0),
        _nvidia(80, 108, 163),
        _nvidia(86, 84, 99),
        _nvidia(89, 128, 99),
        _nvidia(90, 132, 227),
        _nvidia(100, 148, 227, fp4_units=True),
        _nvidia(103, 148, 227, int8_units=False, fp4_units=True),
        _nvidia(120, 170, 99, fp4_units=True),
        _amd("gfx942", 304, 64),
        _amd("gfx950", 256, 160),
    )
}


def get_target(target: str | Target) -> Target:
    """The target of a name.

    Raises:
        UnknownChoice: no such target.
    """
    if isinstance(target, Target):
        return target
    if target not in TARGETS:
        raise UnknownChoice(what="target", value=target, choices=", ".join(TARGETS))
    return TARGETS[target]


@functools.cache
def target_of(device: torch.device) -> Target:
    """The target that tensors on a device run on."""
    if device.type != "cuda":
        return TARGETS["cpu"]
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    if name in TARGETS:
        return TARGETS[name]
    arch = properties.major * 10 + properties.minor
    return Target(
        name=name,
        vendor="amd" if torch.version.hip else "nvidia",
        arch=arch,
        multiprocessors=properties.multi_processor_count,
        shared_bytes=99 * 1024,
        int8_units=arch != 103,
        fp4_units=False,
    )
