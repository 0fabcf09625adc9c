"""A row of 16-bit floats in registers, rotated: layouts, loads and butterflies of ``quantize_rows_gluon``.

A row is a tuple of tiles. A whole tile gives each warp four runs of 256 channels, a half tile two:
rows that are no power of two then waste nothing. Bits of the channel's index, by where they lie:

| tile | pass | in registers | what is done |
|---|---|---|---|
| whole | 1 | 0, 1, 2, 6, 7 | digit 0, then what is at stride 64, then half of the digit at stride 4 |
| whole | 2 | 0, 1, 3, 4, 5 | its other half, the digit at stride 16 |
| whole, group 512 | 2 | 0, 3, 4, 5, 8 | and bit 8 |
| whole, group 1024 | 2 | 3, 4, 5, 8, 9 | and the digit at stride 256 |
| half | 1 | 0, 1, 6, 7 | digit 0, what is at stride 64 |
| half | 2 | 2, 3, 4, 5 | the digits at strides 4 and 16 |

Between the passes a warp exchanges its values through shared memory, once. That is why the stages of the
contract take stride 64 before 4 and 16. Channels next to each other stay in one thread where they can, for
then an exchange moves 16 bytes a lane.

A digit that is half in each pass comes as two radix-2 stages. For regular H4 the second operand of the
first is signed by the digit's high bit; the outputs lie with the digit's bits swapped and the last one
negated. The swap is undone by naming the layout anew, the sign, which commutes with every later stage,
by the caller's divisor: :func:`negated` says where.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

Linear = gl.DistributedLinearLayout


@gluon.constexpr_function
def _rows(rows, warps):
    return [[rows << i, 0] for i in range(warps.bit_length() - 1)]


@gluon.constexpr_function
def words_layout(warps, half=False):
    """32-bit words [runs, 128] as loaded: 128 contiguous bytes for eight lanes, or for sixteen of a half tile."""
    if half:
        registers, lanes = [[0, 1], [0, 32], [0, 64]], [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]]
        return Linear(registers, lanes, _rows(2, warps), [], [2 * warps, 128])
    registers, lanes = [[0, 1], [0, 2], [0, 32], [0, 64]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    return Linear(registers, lanes, _rows(4, warps), [], [4 * warps, 128])


@gluon.constexpr_function
def own_memory(warps, half, words):
    """Shared memory for a tile [runs, 256] or its words [runs, 128] as pass 1 holds them: lanes side by side."""
    rows = _rows(2 if half else 4, warps)
    if words:
        lanes = [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]] if half else [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
        held = [[0, 1]] if half else [[0, 1], [0, 2]]
        return gl.SharedLinearLayout([*held, *lanes, *rows, [0, 32], [0, 64]])
    lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [1, 0]] if half else [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
    left = [] if half else [[0, 4]]
    return gl.SharedLinearLayout([[0, 1], [0, 2], *lanes, *rows, *left, [0, 64], [0, 128]])


@gluon.constexpr_function
def own_shape(warps, half, words):
    """What :func:`own_memory` is memory for."""
    return [(2 if half else 4) * warps, 128 if words else 256]


@gluon.constexpr_function
def first_layout(warps, half=False):
    """Channels [runs, 256] in pass 1."""
    if half:
        registers, lanes = [[0, 1], [0, 2], [0, 64], [0, 128]], [[0, 4], [0, 8], [0, 16], [0, 32], [1, 0]]
        return Linear(registers, lanes, _rows(2, warps), [], [2 * warps, 256])
    registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 64], [0, 128]], [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
    return Linear(registers, lanes, _rows(4, warps), [], [4 * warps, 256])


@gluon.constexpr_function
def second_layout(warps, half=False, group=256, swapped=False):
    """Channels in pass 2. ``swapped``: of a whole tile once bits 2 and 3 have changed places."""
    if half:
        registers, lanes = [[0, 4], [0, 8], [0, 16], [0, 32]], [[0, 1], [0, 2], [0, 64], [0, 128], [1, 0]]
        return Linear(registers, lanes, _rows(2, warps), [], [2 * warps, 256])
    held, other = ([0, 4], [0, 8]) if swapped else ([0, 8], [0, 4])
    if group <= 256:
        registers, lanes = [[0, 1], [0, 2], held, [0, 16], [0, 32]], [other, [0, 64], [0, 128], [1, 0], [2, 0]]
    elif group == 512:
        registers, lanes = [[0, 1], held, [0, 16], [0, 32], [1, 0]], [[0, 2], other, [0, 64], [0, 128], [2, 0]]
    else:
        registers, lanes = [held, [0, 16], [0, 32], [1, 0], [2, 0]], [[0, 1], [0, 2], other, [0, 64], [0, 128]]
    return Linear(registers, lanes, _rows(4, warps), [], [4 * warps, 256])


@gluon.constexpr_function
def stored_layout(warps, half=False):
    """Codes [runs, 256] as stored: 16 contiguous bytes a lane."""
    lanes = [[0, 16], [0, 32], [0, 64], [0, 128], [1, 0]]
    if half:
        return Linear([[0, 1], [0, 2], [0, 4], [0, 8]], lanes, _rows(2, warps), [], [2 * warps, 256])
    return Linear([[0, 1], [0, 2], [0, 4], [0, 8], [2, 0]], lanes, _rows(4, warps), [], [4 * warps, 256])


@gluon.constexpr_function
def ragged(K, t, W, HALF):
    """Whether tile t reaches beyond the row."""
    return (t * 4 + (2 if HALF else 4)) * W * 256 > K


@gluon.jit
def inside(K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr, WIDTH: gl.constexpr,
           layout: gl.constexpr):  # fmt: skip
    """Where tile t, of WIDTH columns a run, does not."""
    rows: gl.constexpr = 2 * W if HALF else 4 * W
    run = t * (4 * W) + gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    return (run * 256 < K)[:, None] & (column < WIDTH)[None, :]


@gluon.jit
def load_tile(row_ptr, K: gl.constexpr, t: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr, WIDTH: gl.constexpr,
              layout: gl.constexpr):  # fmt: skip
    """Tile t of a row of WIDTH columns a run; 0 beyond the row."""
    rows: gl.constexpr = 2 * W if HALF else 4 * W
    run = t * (4 * W) + gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    where = row_ptr + (run * WIDTH)[:, None] + column[None, :]
    if ragged(K, t, W, HALF):
        return gl.load(where, mask=inside(K, t, W, HALF, WIDTH, layout), other=0)
    else:
        return gl.load(where)


@gluon.jit
def wait_and_let_start(step, M):
    """Wait for all that is ahead. Then the next kernel may start, if ``step`` programs take one of M rows each.

    Programs that take row after row let it start when they end: earlier its own would be placed unevenly, more of them
    where there happened to be room, and a fixed share of rows each makes the fullest multiprocessor the last.
    """
    gdc_wait()
    if step >= M:
        gdc_launch_dependents()


@gluon.jit
def load_row(x_ptr, row, stride, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr, H: gl.constexpr):
    """The tiles of a row in 32-bit words; ``stride`` from row to row is in words too."""
    row_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + row.to(gl.int64) * stride
    tiles = ()
    for t in gl.static_range(T + H):
        tiles = tiles + (load_tile(row_ptr, K, t, W, t == T, 128, words_layout(W, t == T)),)
    return tiles


@gluon.jit
def _digit(v, S: gl.constexpr):
    """Split a tile by the digit of strides S and 2S: x0, x1, x2, x3."""
    y = gl.permute(gl.reshape(v, (v.numel // (4 * S), 2, 2, S)), (0, 3, 1, 2))  # [.., hi, lo]
    even, odd = gl.split(y)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return x0, x1, x2, x3


@gluon.jit
def _undigit(y0, y1, y2, y3):
    y = gl.join(gl.join(y0, y2), gl.join(y1, y3))  # [.., S, hi, lo]
    return gl.reshape(gl.permute(y, (0, 2, 3, 1)), (y.numel // 256, 256))


@gluon.jit
def _radix4(v, KIND: gl.constexpr, S: gl.constexpr):
    x0, x1, x2, x3 = _digit(v, S)
    a = x0 + x1
    b = x2 + x3
    c = x0 - x1
    d = x2 - x3
    if KIND == "regular":
        return _undigit(a + d, a - d, b + c, b - c)
    else:
        return _undigit(a + b, c + d, a - b, c - d)


@gluon.jit
def bit(v, S: gl.constexpr):
    """Split a tile by the bit of stride S."""
    y = gl.permute(gl.reshape(v, (v.numel // (2 * S), 2, S)), (0, 2, 1))
    return gl.split(y)


@gluon.jit
def unbit(a, b):
    """Put together what :func:`bit` split."""
    y = gl.permute(gl.join(a, b), (0, 2, 1))
    return gl.reshape(y, (y.numel // 256, 256))


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
        return _undigit(a + d, a - d, b + c, b - c), largest
    else:
        largest = _fold(c, d, _fold(a, b, largest, FIRST), False)
        return _undigit(a + b, c + d, a - b, c - d), largest


@gluon.jit
def _last_bit(v, largest, S: gl.constexpr, FIRST: gl.constexpr):
    a, b = bit(v, S)
    largest = _fold(a, b, largest, FIRST)
    return unbit(a + b, a - b), largest


@gluon.jit
def widen(words, DTYPE: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr):
    """Two 16-bit floats a word -> float32 [runs, 256] in the layout of pass 1, exact."""
    if gl.bfloat16 == DTYPE:
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    else:
        low = words.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    v = gl.reshape(gl.join(low, high), (words.shape[0], 256))
    return gl.convert_layout(v, first_layout(W, HALF), assert_trivial=True)


@gluon.jit
def _stride_64(v, KIND: gl.constexpr, GROUP: gl.constexpr):
    if GROUP >= 256:
        return _radix4(v, KIND, 64)
    elif GROUP == 128:
        a, b = bit(v, 64)
        return unbit(a + b, a - b)
    else:
        return v


@gluon.jit
def rotate_whole(v, largest, FIRST: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, W: gl.constexpr):
    """A whole tile of pass 1, rotated but for the norm, and the running largest magnitude.

    FIRST: there is no largest magnitude yet.
    """
    first: gl.constexpr = first_layout(W)
    v = _stride_64(_radix4(v, KIND, 1), KIND, GROUP)
    a, b = bit(v, 4)
    if KIND == "regular":
        # layouts of halves say where bit 3 lies: it signs the second operand
        channel = gl.arange(0, 256, layout=gl.SliceLayout(0, first))
        b3 = gl.full((4 * W, 256), 1.0, gl.float32, layout=first)
        b3 = b3 - 2.0 * ((channel >> 3) & 1).to(gl.float32)[None, :]
        sign, _ = bit(b3, 4)
        v = unbit(gl.fma(b, sign, a), gl.fma(b, -sign, a))
    else:
        v = unbit(a + b, a - b)
    v = gl.convert_layout(gl.convert_layout(v, first, assert_trivial=True), second_layout(W, False, GROUP))
    if GROUP == 16:
        v, largest = _last_bit(v, largest, 8, FIRST)
    else:
        a, b = bit(v, 8)
        v = unbit(a + b, a - b)
        if GROUP == 32:
            v, largest = _last_bit(v, largest, 16, FIRST)
        elif GROUP <= 256:
            v, largest = _last_digit(v, largest, KIND, 16, FIRST)
        else:
            v = _radix4(v, KIND, 16)
            if GROUP == 512:
                v, largest = _last_bit(v, largest, 256, FIRST)
            else:
                v, largest = _last_digit(v, largest, KIND, 256, FIRST)
    if KIND == "regular":
        v = gl.reshape(gl.permute(gl.reshape(v, (4 * W, 16, 2, 2, 4)), (0, 1, 3, 2, 4)), (4 * W, 256))
        v = gl.convert_layout(v, second_layout(W, False, GROUP, True), assert_trivial=True)
    else:
        v = gl.convert_layout(v, second_layout(W, False, GROUP), assert_trivial=True)
    return v, largest


@gluon.jit
def rotate_half(v, KIND: gl.constexpr, GROUP: gl.constexpr, W: gl.constexpr):
    """A half tile of pass 1, rotated but for the norm, and its largest magnitude. Groups up to 256."""
    v = _stride_64(_radix4(v, KIND, 1), KIND, GROUP)
    v = gl.convert_layout(gl.convert_layout(v, first_layout(W, True), assert_trivial=True), second_layout(W, True))
    if GROUP == 16:
        v, largest = _last_digit(v, None, KIND, 4, True)
    else:
        v = _radix4(v, KIND, 4)
        if GROUP == 32:
            v, largest = _last_bit(v, None, 16, True)
        else:
            v, largest = _last_digit(v, None, KIND, 16, True)
    return gl.convert_layout(v, second_layout(W, True), assert_trivial=True), largest


@gluon.jit
def largest_of_thread(m, GROUP: gl.constexpr, W: gl.constexpr, HALF: gl.constexpr):
    """The running largest magnitude of a tile -> the largest of each thread, [32 W], without asking other threads."""
    if HALF:
        if GROUP == 32:
            m = gl.max(gl.reshape(m, (8 * W, 8, 4)), axis=1)  # bits 2, 3, 5
        else:
            m = gl.max(gl.reshape(m, (8 * W, 4, 4)), axis=1)  # bits 4, 5 or 2, 3
    elif GROUP == 512:
        m = gl.max(gl.reshape(m, (8 * W, 8, 4, 2)), axis=3)  # bits 0, and 3, 4, 5
        m = gl.max(m, axis=1)
    elif GROUP == 1024:
        m = gl.max(gl.reshape(m, (4 * W, 8, 8)), axis=1)  # bits 3, 4, 5
    elif GROUP == 16 or GROUP == 32:
        if GROUP == 16:
            m = gl.max(gl.reshape(m, (16 * W, 4, 2, 4)), axis=3)  # bits 0, 1, and 4, 5
        else:
            m = gl.max(gl.reshape(m, (16 * W, 2, 2, 2, 4)), axis=4)  # bits 0, 1, then 3, and 5
            m = gl.max(m, axis=2)
        m = gl.max(m, axis=1)
    else:
        m = gl.max(gl.reshape(m, (16 * W, 2, 2, 4)), axis=3)  # bits 0, 1, and 3
        m = gl.max(m, axis=1)
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    return gl.convert_layout(gl.reshape(m, (32 * W,)), threads, assert_trivial=True)


@gluon.jit
def negated(channel):
    """±1.0: the sign that channels of a whole tile still have to be multiplied by after regular stages."""
    return 1.0 - 2.0 * ((channel >> 2) & (channel >> 3) & 1).to(gl.float32)
