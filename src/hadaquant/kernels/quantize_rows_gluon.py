"""INT8 rotate -> scale -> encode for 16-bit rows at memory speed, in Gluon; twin of ``quantize_rows_kernel``.

One CTA keeps a whole row in registers: T tiles of W warps, a warp holding four groups of 256
channels. CTAs are persistent and fetch the next row while they work on this one. 3 bytes an element
move, device memory is the roof; what has to be small is the number of instructions and of passes
through shared memory, so the layouts decide everything:

* pass 1 holds channel bits 0, 1, 2, 6, 7 in registers; eight lanes load 128 contiguous bytes;
* one exchange through shared memory;
* pass 2 holds bits 0, 1, 3, 4, 5. The digit of bits 2 and 3 is done half in each pass.

Digits then run in the order 0, 3, 1, 2, which is why a group of 256 has this order in the contract.
Groups of 16 and 64 (0, 1 and 0, 1, 2) leave digits out, Sylvester 32 ends with the single bit 4.

regular H4 over bits (2, 3) comes as two radix-2 stages, the second operand of the first signed by
bit 3; its outputs lie with bits 2 and 3 swapped and the last one negated, which the output layout
and the sign of the divisor undo.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hadaquant.formats import Format
from hadaquant.kernels.numerics import choose, encode, multiplier
from hadaquant.kernels.runtime import OPTIONS, Launch, given, multiprocessors, on
from hadaquant.rotation import Rotation, norm

#: Divisors for which y · (1/d), 1/d in two float32 terms, rounds to the code of the true quotient.
SMALLEST_DIVISOR = gl.constexpr(2.0**-126)
LARGEST_DIVISOR = gl.constexpr(2.0**96)
#: Adding it rounds |q| < 2**22 to an integer, ties to even, in the low bits.
ROUND = gl.constexpr(1.5 * 2.0**23)

Linear = gl.DistributedLinearLayout


@gluon.constexpr_function
def _groups(warps):
    return [[4 << i, 0] for i in range(warps.bit_length() - 1)]


@gluon.constexpr_function
def words_layout(warps):
    """32-bit words [groups, 128] as loaded: 16 bytes a lane, 128 contiguous bytes for eight lanes."""
    registers, lanes = [[0, 1], [0, 2], [0, 32], [0, 64]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    return Linear(registers, lanes, _groups(warps), [], [4 * warps, 128])


@gluon.constexpr_function
def first_layout(warps):
    """Channels [groups, 256] in pass 1: registers hold bits 0, 1, 2, 6, 7."""
    registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 64], [0, 128]], [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
    return Linear(registers, lanes, _groups(warps), [], [4 * warps, 256])


@gluon.constexpr_function
def second_layout(warps):
    """Channels in pass 2: registers hold bits 0, 1, 3, 4, 5."""
    registers, lanes = [[0, 1], [0, 2], [0, 8], [0, 16], [0, 32]], [[0, 4], [0, 64], [0, 128], [1, 0], [2, 0]]
    return Linear(registers, lanes, _groups(warps), [], [4 * warps, 256])


@gluon.constexpr_function
def swapped_layout(warps):
    """Pass 2 once bits 2 and 3 have changed places."""
    registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 16], [0, 32]], [[0, 8], [0, 64], [0, 128], [1, 0], [2, 0]]
    return Linear(registers, lanes, _groups(warps), [], [4 * warps, 256])


@gluon.constexpr_function
def stored_layout(warps):
    """Codes [groups, 256] as stored: 16 contiguous bytes a lane."""
    registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 8], [2, 0]], [[0, 16], [0, 32], [0, 64], [0, 128], [1, 0]]
    return Linear(registers, lanes, _groups(warps), [], [4 * warps, 256])


@gluon.jit
def _digit(v, S: gl.constexpr):
    """Split [rows, 256] by the digit of strides S and 2S: x0, x1, x2, x3."""
    y = gl.permute(gl.reshape(v, (v.shape[0], 256 // (4 * S), 2, 2, S)), (0, 1, 4, 2, 3))  # [.., hi, lo]
    even, odd = gl.split(y)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return x0, x1, x2, x3


@gluon.jit
def _undigit(y0, y1, y2, y3, rows: gl.constexpr):
    y = gl.join(gl.join(y0, y2), gl.join(y1, y3))  # [.., S, hi, lo]
    return gl.reshape(gl.permute(y, (0, 1, 3, 4, 2)), (rows, 256))


@gluon.jit
def _radix4(v, KIND: gl.constexpr, S: gl.constexpr):
    x0, x1, x2, x3 = _digit(v, S)
    a = x0 + x1
    b = x2 + x3
    c = x0 - x1
    d = x2 - x3
    if KIND == "regular":
        return _undigit(a + d, a - d, b + c, b - c, v.shape[0])
    else:
        return _undigit(a + b, c + d, a - b, c - d, v.shape[0])


@gluon.jit
def _bit(v, S: gl.constexpr):
    y = gl.permute(gl.reshape(v, (v.shape[0], 256 // (2 * S), 2, S)), (0, 1, 3, 2))
    return gl.split(y)


@gluon.jit
def _unbit(a, b, rows: gl.constexpr):
    return gl.reshape(gl.permute(gl.join(a, b), (0, 1, 3, 2)), (rows, 256))


@gluon.jit
def _magnitude(x):
    # an integer view: NaN and Inf stay on top, and sm_90 has a three-way integer maximum
    return x.to(gl.int32, bitcast=True)


@gluon.jit
def _fold(a, b, largest, FIRST: gl.constexpr):
    # max(|a + b|, |a - b|) is RN(|a| + |b|) exactly, rounding being monotone and symmetric
    m = _magnitude(gl.abs(a) + gl.abs(b))
    if FIRST:
        return m
    else:
        return gl.maximum(largest, m)


@gluon.jit
def _last_digit(v, largest, KIND: gl.constexpr, S: gl.constexpr, FIRST: gl.constexpr):
    """The last radix-4 stage, and the running largest magnitude of its outputs."""
    x0, x1, x2, x3 = _digit(v, S)
    a = x0 + x1
    b = x2 + x3
    c = x0 - x1
    d = x2 - x3
    if KIND == "regular":
        largest = _fold(b, c, _fold(a, d, largest, FIRST), False)
        return _undigit(a + d, a - d, b + c, b - c, v.shape[0]), largest
    else:
        largest = _fold(c, d, _fold(a, b, largest, FIRST), False)
        return _undigit(a + b, c + d, a - b, c - d, v.shape[0]), largest


@gluon.jit
def _last_bit(v, largest, S: gl.constexpr, FIRST: gl.constexpr):
    a, b = _bit(v, S)
    largest = _fold(a, b, largest, FIRST)
    return _unbit(a + b, a - b, v.shape[0]), largest


@gluon.jit
def _widen(words, DTYPE: gl.constexpr):
    """Two 16-bit floats a word -> float32 [groups, 256], exact."""
    if gl.bfloat16 == DTYPE:
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    else:
        low = words.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return gl.reshape(gl.join(low, high), (words.shape[0], 256))


@gluon.jit
def _inside(K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    group = t * (4 * W) + gl.arange(0, 4 * W, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    return (group * 256 < K)[:, None] & (column < WIDTH)[None, :]


@gluon.jit
def _words(x_ptr, row, K: gl.constexpr, t: gl.constexpr, W: gl.constexpr):
    layout: gl.constexpr = words_layout(W)
    group = t * (4 * W) + gl.arange(0, 4 * W, layout=gl.SliceLayout(1, layout))
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    return (x_ptr + row.to(gl.int64) * (K // 2)) + (group * 128)[:, None] + word[None, :]


@gluon.jit
def _load(x_ptr, row, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr):
    tiles = ()
    for t in gl.static_range(T):
        if (t + 1) * W * 1024 > K:
            mask = _inside(K, t, W, 128, words_layout(W))
            tiles = tiles + (gl.load(_words(x_ptr, row, K, t, W), mask=mask, other=0),)
        else:
            tiles = tiles + (gl.load(_words(x_ptr, row, K, t, W)),)
    return tiles


@gluon.jit
def _fetch(x_ptr, row, M, ring, slot, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr):
    """Start copying a row into a slot of the ring; nothing if there is no such row."""
    for t in gl.static_range(T):
        mask = _inside(K, t, W, 128, words_layout(W)) & (row < M)
        async_copy.async_copy_global_to_shared(ring.index(slot * T + t), _words(x_ptr, row, K, t, W), mask=mask)
    async_copy.commit_group()


@gluon.jit
def _rotated(words, signs_ptr, bit3, largest, FIRST: gl.constexpr, DTYPE: gl.constexpr, KIND: gl.constexpr,
             GROUP: gl.constexpr, SIGNED: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """One tile: float32 [groups, 256] without the final norm, and the running largest magnitude."""
    rows: gl.constexpr = 4 * W
    first: gl.constexpr = first_layout(W)
    v = gl.convert_layout(_widen(words, DTYPE), first, assert_trivial=True)
    if SIGNED:
        channel = gl.arange(0, 256, layout=gl.SliceLayout(0, first))
        v = v * gl.load(signs_ptr + channel % GROUP)[None, :]
    v = _radix4(v, KIND, 1)
    if GROUP == 256:
        v = _radix4(v, KIND, 64)
    a, b = _bit(v, 4)
    if KIND == "regular":
        v = _unbit(gl.fma(b, bit3, a), gl.fma(b, -bit3, a), rows)
    else:
        v = _unbit(a + b, a - b, rows)
    v = gl.convert_layout(gl.convert_layout(v, first, assert_trivial=True), second_layout(W))
    if GROUP == 16:
        v, largest = _last_bit(v, largest, 8, FIRST)
    else:
        a, b = _bit(v, 8)
        v = _unbit(a + b, a - b, rows)
        if GROUP == 32:
            v, largest = _last_bit(v, largest, 16, FIRST)
        else:
            v, largest = _last_digit(v, largest, KIND, 16, FIRST)
    if KIND == "regular":
        v = gl.reshape(gl.permute(gl.reshape(v, (rows, 16, 2, 2, 4)), (0, 1, 3, 2, 4)), (rows, 256))
        v = gl.convert_layout(v, swapped_layout(W), assert_trivial=True)
    else:
        v = gl.convert_layout(v, second_layout(W), assert_trivial=True)
    return v, largest


@gluon.jit
def _store(codes, q_ptr, row, K: gl.constexpr, t: gl.constexpr, W: gl.constexpr):
    layout: gl.constexpr = stored_layout(W)
    codes = gl.convert_layout(codes, layout)
    group = t * (4 * W) + gl.arange(0, 4 * W, layout=gl.SliceLayout(1, layout))
    channel = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
    where = (q_ptr + row.to(gl.int64) * K) + (group * 256)[:, None] + channel[None, :]
    if (t + 1) * W * 1024 > K:
        gl.store(where, codes, mask=_inside(K, t, W, 256, layout))
    else:
        gl.store(where, codes)


@gluon.jit
def _row(tiles, row, q_ptr, s_ptr, signs_ptr, bit3, DTYPE: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
         NORM: gl.constexpr, SIGNED: gl.constexpr, RULE: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
         T: gl.constexpr):  # fmt: skip
    rotated = ()
    largest = None
    for t in gl.static_range(T):
        v, largest = _rotated(tiles[t], signs_ptr, bit3, largest, t == 0, DTYPE, KIND, GROUP, SIGNED, W)
        rotated = rotated + (v,)
    amax = gl.max(gl.max(gl.reshape(largest, (4 * W, largest.numel // (4 * W))), axis=1), axis=0)
    # the norm is monotone, so it commutes with the maximum
    amax = (amax.to(gl.float32, bitcast=True) * NORM).to(gl.int32, bitcast=True)
    stored = choose(amax, 1.0, RULE)
    gl.store(s_ptr + row, stored)
    d = multiplier(stored, 1.0, RULE)

    layout: gl.constexpr = rotated[0].type.layout
    channel = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
    sign = 1.0 - 2.0 * ((channel >> 2) & (channel >> 3) & 1).to(gl.float32)
    if (d >= SMALLEST_DIVISOR) & (d < LARGEST_DIVISOR):
        # 1/d = hi + lo to 48 bits; a power-of-two norm divides d, exactly, instead of multiplying each y
        POWER: gl.constexpr = GROUP == 16 or GROUP == 64 or GROUP == 256
        if POWER:
            e = d * (1.0 / NORM)
        else:
            e = d
        approximate = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [e], dtype=gl.float32, is_pure=True, pack=1
        )
        hi = gl.fma(gl.fma(-e, approximate, 1.0), approximate, approximate)
        rest = gl.fma(-e, hi, 1.0)
        lo = rest * hi
        lo = gl.fma(lo, rest, lo)
        if KIND == "regular":
            hi = hi * sign[None, :]
            lo = lo * sign[None, :]
        for t in gl.static_range(T):
            y = rotated[t]
            if not POWER:
                y = y * NORM
            q = gl.fma(y, hi + gl.zeros_like(y), y * lo) + ROUND
            _store(q.to(gl.int32, bitcast=True).to(gl.int8), q_ptr, row, K, t, W)
    else:
        for t in gl.static_range(T):
            y = rotated[t] * NORM
            if KIND == "regular":
                y = y * sign[None, :]
            _store(encode(y, d, "int8").to(gl.int8), q_ptr, row, K, t, W)


@gluon.jit(do_not_specialize=["M"])
def quantize_rows_gluon(
    x_ptr, q_ptr, s_ptr, signs_ptr, M, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr, RING: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, NORM: gl.constexpr, SIGNED: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    words_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    channel = gl.arange(0, 256, layout=gl.SliceLayout(0, first_layout(W)))
    bit3 = gl.full((4 * W, 256), 1.0, gl.float32, layout=first_layout(W))
    bit3 = bit3 - 2.0 * ((channel >> 3) & 1).to(gl.float32)[None, :]
    bit3, _ = _bit(bit3, 4)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    if RING == 0:
        tiles = _load(words_ptr, first, K, W, T)
        for row in range(first, M, step):
            following = _load(words_ptr, gl.minimum(row + step, M - 1), K, W, T)
            _row(tiles, row, q_ptr, s_ptr, signs_ptr, bit3, DTYPE, KIND, GROUP, NORM, SIGNED, RULE, K, W, T)
            tiles = following
    else:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        ring = gl.allocate_shared_memory(gl.int32, [RING * T, 4 * W, 128], plain)
        for i in gl.static_range(RING - 1):
            _fetch(words_ptr, first + i * step, M, ring, i, K, W, T)
        here = 0
        there = RING - 1
        for row in range(first, M, step):
            _fetch(words_ptr, row + (RING - 1) * step, M, ring, there, K, W, T)
            async_copy.wait_group(RING - 1)
            tiles = ()
            for t in gl.static_range(T):
                tiles = tiles + (ring.index(here * T + t).load(words_layout(W)),)
            _row(tiles, row, q_ptr, s_ptr, signs_ptr, bit3, DTYPE, KIND, GROUP, NORM, SIGNED, RULE, K, W, T)
            here = gl.where(here == RING - 1, 0, here + 1)
            there = gl.where(there == RING - 1, 0, there + 1)


def row_shape(k: int) -> tuple[int, int]:
    """Warps a row and tiles of 1024 channels a warp: as few warps as hold it in three tiles.

    Two tiles left twelve warps on a multiprocessor of an H200 and three left eight, both enough; with
    four, one memory latency shows.
    """
    for warps in (1, 2, 4):
        tiles = -(-k // (1024 * warps))
        if tiles <= 3:
            return warps, tiles
    return 8, -(-k // 8192)


def config(format: Format, rotation: Rotation, k: int) -> dict[str, Any]:
    """Compile-time arguments and launch options."""
    warps, tiles = row_shape(k)
    return {
        "K": k,
        "W": warps,
        "T": tiles,
        # the next row waits in registers, or in shared memory where this one leaves too few of them
        "RING": 2 if tiles == 3 and warps > 1 and k <= 12288 else 0,
        "KIND": rotation.kind,
        "GROUP": rotation.group,
        "NORM": norm(rotation.group),
        "SIGNED": rotation.signs is not None,
        "RULE": format.scale.name,
        "num_warps": warps,
        **OPTIONS,
    }


def quantize_rows(x: Tensor, codes: Tensor, scales: Tensor, format: Format, rotation: Rotation) -> None:
    """Fill codes and scales of contiguous x [M, K]."""
    k = x.shape[-1]
    m = x.numel() // k
    signs = given(rotation.signs, x)
    key = (x.device.index, x.dtype, k, rotation.spec, rotation.signs is None)
    launch = _launches.get(key)
    if launch is None:
        launch = Launch(quantize_rows_gluon, (x, codes, scales, signs, m), config(format, rotation, k))
        _launches[key] = launch
    programs = min(m, multiprocessors(x.device) * launch.occupancy)
    with on(x.device):
        launch((programs, 1, 1), x, codes, scales, signs, m)


_launches: dict[tuple[object, ...], Launch] = {}
