"""Compile a kernel ahead of time for hardware that is not here, and read what it would use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

NVIDIA = (80, 86, 89, 90, 100, 103, 120)
AMD = ("gfx942", "gfx950")
TARGETS = tuple(f"sm_{arch}" for arch in NVIDIA) + AMD
#: What a block may use on consumer Ampere, Ada and Blackwell.
SHARED_LIMIT = 99 * 1024

_LAUNCH = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_pdl")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Usage:
    """What ptxas or the AMD backend reports of a compiled kernel."""

    shared: int
    registers: int
    spills: int
    text: str


def gpu_target(name: str) -> GPUTarget:
    """Triton's target of ``sm_90``, ``gfx942``, ..."""
    return GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)


def compile_for(kernel, pointers: dict[str, str], arguments: dict[str, object], target: str) -> Usage:
    """Compile with pointer types, and constants and launch options as a launcher passes them.

    Parameters that are neither are int32 sizes. Pointers, N, K and strides count as multiples of 16, as Triton
    finds them at run time for most models.
    """
    options = {k: v for k, v in arguments.items() if k in _LAUNCH}
    constants = {k: v for k, v in arguments.items() if k not in _LAUNCH}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointers.get(name, "i32")
        if signature[name].startswith("*") or name in ("K", "N") or name.endswith("stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    unknown = set(constants) - set(kernel.arg_names)
    if unknown:
        raise ValueError(f"{kernel} has no parameters {unknown}")
    source_of = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_of(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=gpu_target(target), options=options)
    return _nvidia(compiled) if target.startswith("sm_") else _amd(compiled)


def _nvidia(compiled) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        text = _run("cuobjdump", "-res-usage", f.name)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    ptx = compiled.asm["ptx"]
    # a stack frame need not hold spills, which only ptxas tells apart
    spills = _spills(ptx) if found["STACK"] + found["LOCAL"] else 0
    return Usage(compiled.metadata.shared, found["REG"], spills, ptx)


def _spills(ptx: str) -> int:
    arch = re.search(r"\.target (sm_\w+)", ptx).group(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        report = _run("ptxas", "-v", "--gpu-name", arch, f.name, "-o", "/dev/null")
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))


def _run(tool: str, *arguments: str) -> str:
    names = (f"{tool}-blackwell", tool) if tool == "ptxas" else (tool,)
    path = next(_TOOLS / name for name in names if (_TOOLS / name).exists())
    done = subprocess.run([path, *arguments], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def _amd(compiled) -> Usage:
    text = compiled.asm["amdgcn"]
    found = {
        key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", text)
    }
    return Usage(
        compiled.metadata.shared, found["vgpr_count"], found["vgpr_spill_count"] + found["sgpr_spill_count"], text
    )
