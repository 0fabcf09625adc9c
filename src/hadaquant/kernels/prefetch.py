"""Weights on their way into the L2 cache while the kernel ahead is still at work."""

import triton
import triton.language as tl

#: Bytes of a cache line, and lines that one step asks for.
LINE = tl.constexpr(128)
LINES = tl.constexpr(32)


@triton.jit
def prefetch_rows(w_ptr, row, rows, K):
    """Ask for rows int64 [N] below ``rows`` of int8 [rows, K]. Waits for nothing; NVIDIA only."""
    byte = tl.arange(0, LINES) * LINE
    base = w_ptr + tl.minimum(row, rows - 1)[:, None] * K
    for start in range(0, K, LINE * LINES):
        where = base + tl.minimum(start + byte, K - 1)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [where.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
