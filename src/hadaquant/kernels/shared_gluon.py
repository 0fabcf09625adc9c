"""What a program of the row kernels keeps in shared memory for all its rows.

Operands that many rows share lie there as they are multiplied or added, widened once. So does the next row of x
where registers are short, while this one is worked on. And a row's warps meet there, once a sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hadaquant.kernels.rows_gluon import (
    first_layout,
    load_tile,
    own_memory,
    own_shape,
    widen,
    words_layout,
)

#: How an operand is kept: not, in 32-bit words of two 16-bit elements, or in float32.
UNKEPT, PAIRS, WIDE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def _tile(PAIRED: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr):
    DTYPE: gl.constexpr = gl.int32 if PAIRED else gl.float32
    return gl.allocate_shared_memory(DTYPE, own_shape(W, HALF, PAIRED), own_memory(W, HALF, PAIRED))


@gluon.jit
def shared_row(PAIRED: gl.constexpr, W: gl.constexpr, T: gl.constexpr, H: gl.constexpr):
    """Memory for the tiles of a row, in 32-bit words of two elements or in float32."""
    tiles = ()
    for t in gl.static_range(T + H):
        tiles = tiles + (_tile(PAIRED, W, t == T),)
    return tiles


@gluon.jit
def send_row(memory, x_ptr, row, stride, W: gl.constexpr, T: gl.constexpr, H: gl.constexpr):
    """Begin to copy the words of a row, none of whose tiles is ragged."""
    row_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + row.to(gl.int64) * stride
    for t in gl.static_range(T + H):
        _send_tile(memory[t], row_ptr, t, W, t == T)
    async_copy.commit_group()


@gluon.jit
def _send_tile(memory, row_ptr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr):
    layout: gl.constexpr = words_layout(W, HALF)
    run = t * (4 * W) + gl.arange(0, memory.shape[0], layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(memory, row_ptr + (run * 128)[:, None] + column[None, :])


@gluon.jit
def received_row(memory, W: gl.constexpr, T: gl.constexpr, H: gl.constexpr):
    """The words of the row that was sent."""
    async_copy.wait_group(0)
    tiles = ()
    for t in gl.static_range(T + H):
        tiles = tiles + (memory[t].load(words_layout(W, t == T)),)
    return tiles


@gluon.jit
def _fetched(operand, row, K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr,
             PAIRED: gl.constexpr):  # fmt: skip
    """A tile of an operand from memory: float32, or the words of 16-bit elements."""
    ptr, stride, rows = operand
    start = (row // rows).to(gl.int64) * stride
    DTYPE: gl.constexpr = ptr.dtype.element_ty
    if gl.float32 == DTYPE:
        return load_tile(ptr + start, K, t, W, HALF, 256, first_layout(W, HALF))
    else:
        row_ptr = ptr.to(gl.pointer_type(gl.int32), bitcast=True) + start
        words = load_tile(row_ptr, K, t, W, HALF, 128, words_layout(W, HALF))
        if PAIRED:
            return words
        else:
            return widen(words, DTYPE, W, HALF)


@gluon.jit
def keep(memory, operand, row, AS: gl.constexpr, ONE: gl.constexpr, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr,
         H: gl.constexpr):  # fmt: skip
    """Store an operand of a row; ONE: plus one. Returns the first row that has another one."""
    for t in gl.static_range(T + H):
        v = _fetched(operand, row, K, t, W, t == T, AS == PAIRS)
        if ONE and AS == WIDE:
            v = 1.0 + v
        memory[t].store(v)
    return (row // operand[2] + 1) * operand[2]


@gluon.jit
def operand_tile(memory, operand, row, AS: gl.constexpr, ONE: gl.constexpr, K: gl.constexpr, t: gl.constexpr,
                 W: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """A tile of an operand in float32, kept or not; ONE: plus one."""
    if AS == WIDE:
        v = memory[t].load(first_layout(W, HALF))
    elif AS == PAIRS:
        v = widen(memory[t].load(words_layout(W, HALF)), operand[0].dtype.element_ty, W, HALF)
    else:
        v = _fetched(operand, row, K, t, W, HALF, False)
    if ONE and AS != WIDE:
        v = 1.0 + v
    return v


@gluon.constexpr_function
def everywhere(warps, pairs):
    """[warps, 2, ...] that every thread holds whole."""
    shape = [warps] + [2] * pairs
    sizes = [(dim, 1 << i) for dim in reversed(range(len(shape))) for i in range(shape[dim].bit_length() - 1)]
    registers = [[n if d == dim else 0 for d in range(len(shape))] for dim, n in sizes]
    none = [0] * len(shape)
    return gl.DistributedLinearLayout(registers, [none] * 5, [none] * (warps.bit_length() - 1), [], shape)


@gluon.constexpr_function
def _pairs(tiles):
    return (tiles - 1).bit_length()


@gluon.constexpr_function
def _meeting_shape(warps, tiles):
    return [warps] + [2] * (tiles - 1).bit_length()


@gluon.constexpr_function
def _row_major(rank):
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))))


@gluon.jit
def meeting_place(DTYPE: gl.constexpr, W: gl.constexpr, TILES: gl.constexpr):
    """Memory for a number of each warp and tile, the tiles filled up to a power of two."""
    return gl.allocate_shared_memory(DTYPE, _meeting_shape(W, TILES), _row_major(1 + _pairs(TILES)))


@gluon.jit
def met(place, v, W: gl.constexpr, TILES: gl.constexpr):
    """[W, 2, ...] of all warps, each thread holding it whole."""
    if W > 1:
        place.store(v)
        return place.load(everywhere(W, _pairs(TILES)))
    else:
        return v
