"""Weights of cells by the records of their segments, by NVIDIA's matrix units (Gluon).

One warp a program.  Each thread holds the registers that the matrix instructions take, so that
nothing moves between threads: a tensor of 32 numbers is a register.  Of a record the thread
``4 g + k`` holds rows ``g``, ``g + 8``, ``g + 16`` and ``g + 24`` of the levels, and of every row the
bytes from ``k * HEAD_DIM / 16`` on; of a query it holds column ``g`` and the same channels.

Levels are floats of 8 bits (e5m2) after one shift and one mask.  The query is scaled by the sizes
of the record's pairs in fp16, of which the first 8 bits are such a float, too.  With up to 4 columns
two records share the 8 columns of an instruction.

Reading bounds the kernel: 1.5 KiB for 64 keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sparsek_kernels.common.kernels.barrier_sm90 import thread_barrier
from sparsek_kernels.common.kernels.softmax import LN2, LOG2E

LANES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
NONE: gl.constexpr = gl.constexpr(-1.0e30)
STAGES: gl.constexpr = gl.constexpr(4)
"""Turns whose records are in shared memory."""
MOST_LEVEL: gl.constexpr = gl.constexpr(84.0)
"""The query's largest channel before sizes of pairs, up to 1.5, scale it to 8 bits."""

_LEVELS: gl.constexpr = gl.constexpr(
    """
    {
    .reg .b32 t, a0, a1, a2, a3;
    lop3.b32 a0, $4, 0xC0C0C0C0, 0x20202020, 0xEA;
    lop3.b32 a1, $5, 0xC0C0C0C0, 0x20202020, 0xEA;
    shl.b32 t, $4, 2;
    lop3.b32 a2, t, 0xC0C0C0C0, 0x20202020, 0xEA;
    shl.b32 t, $5, 2;
    lop3.b32 a3, t, 0xC0C0C0C0, 0x20202020, 0xEA;
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
        {$0, $1, $2, $3}, {a0, a1, a2, a3}, {$6, $7}, {$10, $11, $12, $13};
    shl.b32 t, $4, 4;
    lop3.b32 a0, t, 0xC0C0C0C0, 0x20202020, 0xEA;
    shl.b32 t, $5, 4;
    lop3.b32 a1, t, 0xC0C0C0C0, 0x20202020, 0xEA;
    shl.b32 t, $4, 6;
    lop3.b32 a2, t, 0xC0C0C0C0, 0x20202020, 0xEA;
    shl.b32 t, $5, 6;
    lop3.b32 a3, t, 0xC0C0C0C0, 0x20202020, 0xEA;
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
        {$0, $1, $2, $3}, {a0, a1, a2, a3}, {$8, $9}, {$0, $1, $2, $3};
    }
    """
)
"""Four bytes ``$4`` of a row's levels and ``$5`` of the eighth after it, times a scaled query."""

_SCALED: gl.constexpr = gl.constexpr(
    """
    {
    .reg .b32 t, u, s0, s1, s2, s3, m, n, c;
    mov.b32 c, 0x66006600;
    and.b32 t, $4, 0x0F0F0F0F;
    shl.b32 t, t, 1;
    prmt.b32 u, t, 0, 0x1404;
    sub.u32 s0, $5, u;
    prmt.b32 u, t, 0, 0x3424;
    sub.u32 s1, $5, u;
    and.b32 t, $4, 0xF0F0F0F0;
    shr.u32 t, t, 3;
    prmt.b32 u, t, 0, 0x1404;
    sub.u32 s2, $5, u;
    prmt.b32 u, t, 0, 0x3424;
    sub.u32 s3, $5, u;
    fma.rn.f16x2 m, $6, s0, c;
    fma.rn.f16x2 n, $7, s1, c;
    prmt.b32 $0, m, n, 0x6420;
    fma.rn.f16x2 m, $8, s2, c;
    fma.rn.f16x2 n, $9, s3, c;
    prmt.b32 $1, m, n, 0x6420;
    fma.rn.f16x2 m, $10, s0, c;
    fma.rn.f16x2 n, $11, s1, c;
    prmt.b32 $2, m, n, 0x6420;
    fma.rn.f16x2 m, $12, s2, c;
    fma.rn.f16x2 n, $13, s3, c;
    prmt.b32 $3, m, n, 0x6420;
    }
    """
)
"""Four words of a scaled query, of the bytes ``$4`` of the pairs and of eight words of a query.

A float16 of 1536 and a number has that number's integer in its low byte.
"""


@gluon.jit
def shuffle(x, lane):
    """``x`` of the thread ``lane``."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [x, lane],
        dtype=x.dtype, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def shuffle_long(x, lane):
    """``x``, int64, of the thread ``lane``."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        mov.b64 {a, b}, $1;
        shfl.sync.idx.b32 a, a, $2, 31, 0xffffffff;
        shfl.sync.idx.b32 b, b, $2, 31, 0xffffffff;
        mov.b64 $0, {a, b};
        }
        """,
        "=l,l,r", [x, lane], dtype=gl.int64, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def to_lanes(x):
    return gl.convert_layout(x, LANES, assert_trivial=True)


@gluon.jit
def of_lanes(x):
    """An integer, as a register of each thread."""
    return x + gl.zeros([32], gl.int32, LANES)


@gluon.jit
def halves(word, DTYPE: gl.constexpr):
    """The two 16-bit floats of a word, float32."""
    low = word.to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    high = (word >> 16).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def pair_of_fp16(low, high):
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply_halves(x0, y0, x1, y1, b0, b1, c0, c1, c2, c3):
    """Float16 numbers of two records (8 rows each) times 8 columns over 16 channels."""
    return gl.inline_asm_elementwise(
        """
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};
        """,
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [x0, y0, x1, y1, b0, b1, c0, c1, c2, c3],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def halves_of_bytes(word):
    """Four float16 numbers whose first bytes are those of a word, in two words."""
    return gl.inline_asm_elementwise(
        "{ prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424; }", "=&r,=&r,r", [word],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def scaled_query(pairs, one, q, W: gl.constexpr):
    """The query times the sizes of pairs, floats of 8 bits: ``4 W`` words."""
    out = ()
    for w in gl.static_range(W):
        out = out + gl.inline_asm_elementwise(  # type: ignore[assignment]
            _SCALED, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
            [pairs[w], one]
            + [q[2 * W * 0 + 2 * w], q[2 * W * 0 + 2 * w + 1]]
            + [q[2 * W * 1 + 2 * w], q[2 * W * 1 + 2 * w + 1]]
            + [q[2 * W * 2 + 2 * w], q[2 * W * 2 + 2 * w + 1]]
            + [q[2 * W * 3 + 2 * w], q[2 * W * 3 + 2 * w + 1]],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return out


@gluon.jit
def multiply_levels(low, high, b0, b1, b2, b3, c0, c1, c2, c3):
    """Levels of two rows' four bytes times the scaled query."""
    return gl.inline_asm_elementwise(
        _LEVELS, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
        [low, high, b0, b1, b2, b3, c0, c1, c2, c3],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def record_product(levels, scaled, W: gl.constexpr):
    """The levels' products with two columns: cells ``g, g + 8, g + 16, g + 24`` by columns."""
    zero = gl.zeros([32], gl.int32, LANES)
    c0, c1, c2, c3 = zero, zero, zero, zero
    d0, d1, d2, d3 = zero, zero, zero, zero
    for w in gl.static_range(W):
        c0, c1, c2, c3 = multiply_levels(
            levels[w], levels[W + w], scaled[4 * w], scaled[4 * w + 1], scaled[4 * w + 2],
            scaled[4 * w + 3], c0, c1, c2, c3,
        )  # fmt: skip
        d0, d1, d2, d3 = multiply_levels(
            levels[2 * W + w], levels[3 * W + w], scaled[4 * w], scaled[4 * w + 1],
            scaled[4 * w + 2], scaled[4 * w + 3], d0, d1, d2, d3,
        )  # fmt: skip
    return c0, c1, c2, c3, d0, d1, d2, d3


@gluon.jit
def highest_of_rows(x):
    """The largest of the threads that differ in ``g``."""
    lane = gl.arange(0, 32, layout=LANES)
    x = gl.maximum(x, shuffle(x, lane ^ 4))
    x = gl.maximum(x, shuffle(x, lane ^ 8))
    return gl.maximum(x, shuffle(x, lane ^ 16))


@gluon.jit
def pack_weights(a, b, c, d):
    """Four weights of ``2 ** -31`` to 1 in a byte each: 5 bits of exponent and 3 of mantissa."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d;
        shl.b32 a, $1, 4;
        add.u32 a, a, 0x00800000;
        shl.b32 b, $2, 4;
        add.u32 b, b, 0x00800000;
        shl.b32 c, $3, 4;
        add.u32 c, c, 0x00800000;
        shl.b32 d, $4, 4;
        add.u32 d, d, 0x00800000;
        prmt.b32 a, a, b, 0x0073;
        prmt.b32 c, c, d, 0x0073;
        prmt.b32 $0, a, c, 0x5410;
        }
        """,
        "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def copy_rows(to, records, first, second, ROWS: gl.constexpr, LIMIT: gl.constexpr):
    """Begin to copy ``ROWS`` times 16 bytes of each of two records, or fewer: a limit.

    first, second: ``[32]``, where they are, in 16 bytes; one more for each thread.
    """
    EACH: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, EACH)
    TIMES: gl.constexpr = ROWS // 32
    if ROWS < 32:
        at = gl.where(gl.arange(0, 32, layout=LANES) < ROWS, first, second - ROWS)
    else:
        GRID: gl.constexpr = gl.BlockedLayout([2, TIMES, 1], [1, 1, 32], [1, 1, 1], [2, 1, 0])
        both = gl.convert_layout(
            gl.permute(gl.join(first, second), [1, 0]), gl.SliceLayout(1, GRID), assert_trivial=True
        )
        step = gl.arange(0, TIMES, layout=gl.SliceLayout(0, gl.SliceLayout(2, GRID)))
        at = gl.reshape(both[:, None, :] + 32 * step[None, :, None], [2 * ROWS])
    at = gl.convert_layout(at, ROW, assert_trivial=True)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, EACH))[None, :]
    inside = (gl.arange(0, 2 * ROWS, layout=ROW) % ROWS < LIMIT)[:, None] & (word >= 0)
    at = (records + 16 * at).to(gl.pointer_type(gl.int32))[:, None] + word
    async_copy.async_copy_global_to_shared(to, at, mask=inside)


@gluon.jit
def copy_turn(levels, rest, records, units, which, HEAD_DIM: gl.constexpr, RECORD: gl.constexpr):
    """Begin to copy the record ``which`` and the next one of 32 to shared memory.

    units: where each thread's record is, in 16 bytes.
    """
    ROWS: gl.constexpr = HEAD_DIM // 2  # of the levels
    lane = gl.arange(0, 32, layout=LANES)
    first = shuffle_long(units, of_lanes(which)) + lane
    second = shuffle_long(units, of_lanes(which + 1)) + lane
    copy_rows(levels, records, first, second, ROWS, ROWS)
    copy_rows(rest, records, first + ROWS, second + ROWS, HEAD_DIM // 4, RECORD // 16 - ROWS)


@gluon.jit
def unpack(x, N: gl.constexpr):
    """Registers of ``[32, N]``, ``N`` a power of two up to 8."""
    if N == 1:
        words = (to_lanes(gl.reshape(x, [32])),)
    elif N == 2:
        a, b = gl.split(x)
        words = (to_lanes(a), to_lanes(b))
    else:
        low, high = gl.split(gl.permute(gl.reshape(x, [32, 2, N // 2]), [0, 2, 1]))
        words = unpack_half(low, N // 2) + unpack_half(high, N // 2)
    return words


@gluon.jit
def unpack_half(x, N: gl.constexpr):
    if N == 2:
        a, b = gl.split(x)
        words = (to_lanes(a), to_lanes(b))
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [32, 2, 2]), [0, 2, 1]))
        a, c = gl.split(a)
        b, d = gl.split(b)
        words = (to_lanes(a), to_lanes(c), to_lanes(b), to_lanes(d))
    return words


@gluon.jit
def load_levels(levels, RECORD: gl.constexpr, W: gl.constexpr):
    """A record's levels, of ``[4 * records, 32, W]``: of rows ``g + 8 j``, ``W`` words each."""
    LINE: gl.constexpr = gl.BlockedLayout([1, W], [32, 1], [1, 1], [1, 0])
    out = ()
    for j in gl.static_range(4):
        out = out + unpack(levels.index(4 * RECORD + j).load(LINE), W)  # type: ignore[assignment]
    return out


@gluon.jit
def load_rows(rows, FIRST: gl.constexpr, N: gl.constexpr):
    """``N`` words of row ``FIRST + k`` of ``[rows, N]``."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 1, N], [8, 4, 1], [1, 1, 1], [2, 1, 0])
    x = rows.slice(FIRST, 4, dim=0).load(gl.SliceLayout(0, LINE))
    x = x[None, :, :] + gl.zeros([8, 4, N], gl.int32, LINE)
    return unpack(gl.reshape(x, [32, N]), N)


@gluon.jit
def load_bytes(rows, ROW: gl.constexpr):
    """Byte ``g`` of row ``ROW`` of ``[2, rows, 8]``, of the record ``k / 2``."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1], [2, 1, 8, 2], [1, 1, 1, 1], [3, 0, 2, 1])
    x = rows.slice(ROW, 1, dim=1).load(gl.SliceLayout(3, LINE)).to(gl.int32)
    x = x[:, :, :, None] + gl.zeros([2, 1, 8, 2], gl.int32, LINE)
    return to_lanes(gl.reshape(gl.permute(x, [2, 1, 0, 3]), [32]))


@gluon.jit
def load_turn(levels, rest, PARTS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """What a turn takes of its two records.

    levels: ``[8, 32, W]`` words; rest: ``[HEAD_DIM / 2, 4]`` words.
    """
    W: gl.constexpr = HEAD_DIM // 64
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    MEANS: gl.constexpr = HEAD_DIM // PARTS // 8  # words of a thread
    KEPT: gl.constexpr = 2 if HEAD_DIM // PARTS < 32 else PARTS
    VARIANCES: gl.constexpr = HEAD_DIM // KEPT // 32
    of_means = rest._reinterpret(gl.int32, [2, HEAD_DIM // MEANS, MEANS], PLAIN3)
    of_variances = rest._reinterpret(gl.int32, [2, HEAD_DIM // VARIANCES, VARIANCES], PLAIN3)
    of_rows = rest._reinterpret(gl.int32, [2, HEAD_DIM // W, W], PLAIN)
    of_bytes = rest._reinterpret(gl.uint8, [2, HEAD_DIM // 2, 8], PLAIN3)
    means = load_parts(of_means, 0, PARTS, MEANS)
    words = load_parts(of_variances, HEAD_DIM // 2 // VARIANCES, KEPT, VARIANCES)
    variances = ()
    for i in gl.static_range(VARIANCES):
        variances = variances + halves_of_bytes(words[i])  # type: ignore[assignment]
    pairs, rows = (), ()
    for r in gl.static_range(2):
        pairs = pairs + load_rows(of_rows.index(r), 48, W)  # type: ignore[assignment]
        rows = rows + load_levels(levels, r, W)  # type: ignore[assignment]
    AT: gl.constexpr = 13 * HEAD_DIM // 32  # of the scales, in 8 bytes
    scales = (
        load_bytes(of_bytes, AT), load_bytes(of_bytes, AT + 1),
        load_bytes(of_bytes, AT + 2), load_bytes(of_bytes, AT + 3),
    )  # fmt: skip
    return rows, pairs, load_bytes(of_bytes, AT + 4), scales, means, variances


@gluon.jit
def scale_of(code, size):
    """A vector's scale, float32, times ``size``."""
    code = code.to(gl.int32)
    return gl.where(code > 0, ((code + 1904) << 19).to(gl.float32, bitcast=True), 0.0) * size


@gluon.jit
def query_pair(row, live, channel, unit, DTYPE: gl.constexpr):
    """Two neighbouring channels of each thread's row, float32, with ``unit`` for 1."""
    word = gl.load((row + channel).to(gl.pointer_type(gl.int32)), mask=live, other=0)
    low, high = halves(word, DTYPE)
    return low * unit, high * unit


@gluon.jit
def query_columns(row, live, unit, k, DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Words of a query that levels are multiplied with: of quarters, channels ``HEAD_DIM / 16 k``
    on.  row: ``[32]`` pointers to the rows of each thread's column.
    """
    EACH: gl.constexpr = HEAD_DIM // 16
    words = ()
    for i in gl.static_range(2 * EACH):
        channel = i // (EACH // 2) * (HEAD_DIM // 4) + i % (EACH // 2) * 2 + k * EACH
        low, high = query_pair(row, live, channel, unit, DTYPE)
        words = words + (pair_of_fp16(low, high),)  # type: ignore[assignment]  # noqa: RUF005
    return words


@gluon.jit
def query_rows(row, live, unit, part, k, DTYPE: gl.constexpr, PARTS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Words of a query that means are multiplied with: of two of its ``PARTS`` parts, in turn."""
    EACH: gl.constexpr = HEAD_DIM // PARTS // 4  # channels
    words = ()
    for i in gl.static_range(EACH // 2):
        channel = part * (HEAD_DIM // PARTS) + k * EACH + 2 * i
        low, high = query_pair(row, live, channel, unit, DTYPE)
        words = words + (pair_of_fp16(low, high),)  # type: ignore[assignment]  # noqa: RUF005
        low, high = query_pair(row, live, channel + HEAD_DIM // 2, unit, DTYPE)
        words = words + (pair_of_fp16(low, high),)  # type: ignore[assignment]  # noqa: RUF005
    return words


@gluon.jit
def query_squares(row, live, unit, part, k, DTYPE: gl.constexpr, PARTS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Words of the squares of a query's pairs, of two of their parts, in turn."""
    KEPT: gl.constexpr = 2 if HEAD_DIM // PARTS < 32 else PARTS  # the other parts are 0
    EACH: gl.constexpr = HEAD_DIM // 2 // KEPT // 4  # pairs
    words = ()
    for i in gl.static_range(EACH // 2):
        for later in gl.static_range(2):
            of = part + later * (PARTS // 2)
            pair = of * (HEAD_DIM // 2 // KEPT) + k * EACH + 2 * i
            here = live & (of < KEPT)
            a, b = query_pair(row, here, pair, unit, DTYPE)
            c, d = query_pair(row, here, pair + HEAD_DIM // 2, unit, DTYPE)
            words = words + (pair_of_fp16(a * a + c * c, b * b + d * d),)  # type: ignore[assignment]  # noqa: RUF005
    return words


@gluon.jit
def largest_channel(q_row, live, k, DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The largest absolute channel of each thread's part of its row."""
    W: gl.constexpr = HEAD_DIM // 64
    most = gl.zeros([32], gl.float32, LANES)
    for p in gl.static_range(4):
        at = q_row + p * (HEAD_DIM // 4) + k * (4 * W)
        for i in gl.static_range(2 * W):
            word = gl.load((at + 2 * i).to(gl.pointer_type(gl.int32)), mask=live, other=0)
            low, high = halves(word, DTYPE)
            most = gl.maximum(most, gl.maximum(gl.abs(low), gl.abs(high)))
    return most


@gluon.jit
def product_of_parts(rows, columns, N: gl.constexpr, PARTS: gl.constexpr, k, g):
    """A row's product with the record ``k / 2``, of the products of its parts.

    Rows of a matrix are heads, part by part, and columns records times parts: the product of a
    part with its own is on the diagonal.  The head is ``g`` modulo 16 over the number of parts.
    """
    zero = gl.zeros([32], gl.float32, LANES)
    c0, c1, c2, c3 = zero, zero, zero, zero
    for i in gl.static_range(N // 2):
        c0, c1, c2, c3 = multiply_halves(
            rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3],
            columns[2 * i], columns[2 * i + 1], c0, c1, c2, c3,
        )  # fmt: skip
    if PARTS == 2:
        x = c0 + c3
    else:
        x = gl.where(k % 2 == 1, gl.where(g < 4, c2, c3), gl.where(g < 4, c0, c1))
        lane = 4 * g + k
        x = x + shuffle(x, lane ^ 16)
        x = x + shuffle(x, lane ^ 1)
    return x


@gluon.jit
def load_parts(rows, FIRST: gl.constexpr, PARTS: gl.constexpr, N: gl.constexpr):
    """``N`` words of the row that a thread's part has, of ``[2, rows, N]``, from ``FIRST`` on."""
    LINE: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, N], [2, 4 // PARTS, 4 * PARTS, 1], [1, 1, 1, 1], [3, 2, 1, 0]
    )
    x = rows.slice(FIRST, 4 * PARTS, dim=1).load(gl.SliceLayout(1, LINE))
    x = x[:, None, :, :] + gl.zeros([2, 4 // PARTS, 4 * PARTS, N], gl.int32, LINE)
    return unpack(gl.reshape(x, [32, N]), N)


@gluon.jit
def cell_products(read, query, r, g, k, factor, W: gl.constexpr, TWO: gl.constexpr):
    """Products of two columns with the levels of a thread's cells, scaled; of record ``r``, or of
    both with ``TWO``.
    """
    rows, pairs, top, scales, _, _ = read
    if TWO:
        of_query, of_cells = shuffle(top, (g >> 2) * 2), shuffle(top, k)
        if W == 2:
            own = (gl.where(g < 4, pairs[0], pairs[2]), gl.where(g < 4, pairs[1], pairs[3]))
        else:
            own = (gl.where(g < 4, pairs[0], pairs[1]),)
        one = 0x3C003C00 + (of_query & 1) * 0x02000200
        scaled = scaled_query(own, one, query, W)
        x = record_product(rows, scaled, W)
        y = record_product(rows[4 * W :], scaled, W)
        left = k < 2
        c0, c1 = gl.where(left, x[0], y[0]), gl.where(left, x[1], y[1])
        c2, c3 = gl.where(left, x[2], y[2]), gl.where(left, x[3], y[3])
        d0, d1 = gl.where(left, x[4], y[4]), gl.where(left, x[5], y[5])
        d2, d3 = gl.where(left, x[6], y[6]), gl.where(left, x[7], y[7])
        s0, s1, s2, s3 = scales
    else:
        of_cells = shuffle(top, 2 * r + 0 * k)
        one = 0x3C003C00 + (of_cells & 1) * 0x02000200
        scaled = scaled_query(pairs[r * W :], one, query, W)
        c0, c1, c2, c3, d0, d1, d2, d3 = record_product(rows[4 * W * r :], scaled, W)
        lane = 4 * g + 2 * r
        s0, s1 = shuffle(scales[0], lane), shuffle(scales[1], lane)
        s2, s3 = shuffle(scales[2], lane), shuffle(scales[3], lane)
    size = (((of_cells & ~1) + 126) << 22).to(gl.float32, bitcast=True) * factor
    s0, s1, s2, s3 = scale_of(s0, size), scale_of(s1, size), scale_of(s2, size), scale_of(s3, size)
    return (
        c0.to(gl.float32) * s0, c1.to(gl.float32) * s0,
        c2.to(gl.float32) * s1, c3.to(gl.float32) * s1,
        d0.to(gl.float32) * s2, d1.to(gl.float32) * s2,
        d2.to(gl.float32) * s3, d3.to(gl.float32) * s3,
    )  # fmt: skip


@gluon.jit
def weigh_cells(
    products, base, state, spot, half, valid, weights_ptr, tops_ptr, g, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Store weights of a thread's cells for two columns, and add them to the running sums.

    spot: ``[32]``, segments counted from those of all tokens before; half: which two columns;
    valid: which threads have cells that compete.
    """
    b0, b1 = base
    c0, c1, c2, c3, d0, d1, d2, d3 = products
    c0, c1, c2, c3 = c0 + b0, c1 + b1, c2 + b0, c3 + b1
    d0, d1, d2, d3 = d0 + b0, d1 + b1, d2 + b0, d3 + b1
    m0 = gl.maximum(gl.maximum(c0, c2), gl.maximum(d0, d2))
    m1 = gl.maximum(gl.maximum(c1, c3), gl.maximum(d1, d3))
    m0 = gl.maximum(highest_of_rows(m0), NONE)
    m1 = gl.maximum(highest_of_rows(m1), NONE)
    LEAST: gl.constexpr = 4.656612873077393e-10  # 2 ** -31
    c0, c1 = gl.maximum(gl.exp2(c0 - m0), LEAST), gl.maximum(gl.exp2(c1 - m1), LEAST)
    c2, c3 = gl.maximum(gl.exp2(c2 - m0), LEAST), gl.maximum(gl.exp2(c3 - m1), LEAST)
    d0, d1 = gl.maximum(gl.exp2(d0 - m0), LEAST), gl.maximum(gl.exp2(d1 - m1), LEAST)
    d2, d3 = gl.maximum(gl.exp2(d2 - m0), LEAST), gl.maximum(gl.exp2(d3 - m1), LEAST)
    # weights: [segments, 8 rows, columns / 2, 4 cells, 2 columns]
    at = weights_ptr + spot * (32 * COLUMNS) + g * (4 * COLUMNS) + half * 8
    PAIR: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [1, 1], [1, 0])
    both = gl.join(pack_weights(c0, c1, c2, c3), pack_weights(d0, d1, d2, d3))
    both = gl.convert_layout(both, PAIR, assert_trivial=True)
    at = gl.convert_layout(at, gl.SliceLayout(1, PAIR), assert_trivial=True)
    two = gl.arange(0, 2, layout=gl.SliceLayout(0, PAIR))[None, :]
    at = at.to(gl.pointer_type(gl.int32))[:, None] + two
    gl.store(at, both, mask=gl.convert_layout(valid, gl.SliceLayout(1, PAIR), assert_trivial=True)[:, None])
    at = spot * COLUMNS + 2 * half
    gl.store(tops_ptr + at, m0, mask=valid & (g == 0))
    gl.store(tops_ptr + at + 1, m1, mask=valid & (g == 0))
    h0, t0, h1, t1 = state
    n0 = gl.where(valid, gl.maximum(h0, m0), h0)
    n1 = gl.where(valid, gl.maximum(h1, m1), h1)
    a0 = gl.where(valid, c0 + c2 + d0 + d2, 0.0) * gl.exp2(m0 - n0)
    a1 = gl.where(valid, c1 + c3 + d1 + d3, 0.0) * gl.exp2(m1 - n1)
    return n0, t0 * gl.exp2(h0 - n0) + a0, n1, t1 * gl.exp2(h1 - n1) + a1


@gluon.jit
def join_state(state, lane, OFF: gl.constexpr):
    """Running sums of two columns, with those of the thread ``lane ^ OFF``."""
    h0, t0, h1, t1 = state
    o0, u0 = shuffle(h0, lane ^ OFF), shuffle(t0, lane ^ OFF)
    o1, u1 = shuffle(h1, lane ^ OFF), shuffle(t1, lane ^ OFF)
    n0, n1 = gl.maximum(h0, o0), gl.maximum(h1, o1)
    t0 = t0 * gl.exp2(h0 - n0) + u0 * gl.exp2(o0 - n0)
    t1 = t1 * gl.exp2(h1 - n1) + u1 * gl.exp2(o1 - n1)
    return n0, t0, n1, t1


@gluon.jit
def near_sums(
    states, q_row, k_ptr, table, segment, position, qk_scale, stride_qh, stride_qt, k_strides,
    ROWS: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr,
    HEAD_DIM: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Leave each row's maximum and sum of exps of the keys of one near segment.

    position: of the first token; the others follow it.
    """
    stride_kp, _stride_kh, stride_kt = k_strides
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    bk = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, B))[:, None]
    bn = gl.arange(0, N, layout=gl.SliceLayout(0, B))[None, :]
    at = q_row + (bn // GROUP) * stride_qt + (bn % GROUP) * stride_qh + bk
    q = gl.load(at, mask=bn < ROWS, other=0.0)
    am = gl.arange(0, 16, layout=gl.SliceLayout(1, A))
    ak = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, A))[None, :]
    cm = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))[:, None]
    cn = gl.arange(0, N, layout=gl.SliceLayout(0, MMA))[None, :]
    page = gl.load(table + segment * 64 // PAGE).to(gl.int64)
    highest = gl.full([16, N], NONE, gl.float32, MMA)
    total = gl.zeros([16, N], gl.float32, MMA)
    reach = position + (ROWS - 1) // GROUP
    for part in range(4):
        key = segment * 64 + part * 16 + am
        rows = k_ptr + page * stride_kp + ((key % PAGE) * stride_kt)[:, None] + ak
        k = gl.load(rows, mask=(key <= reach)[:, None], other=0.0)
        logit = mma_v2(k.to(q.dtype), q, gl.zeros([16, N], gl.float32, MMA)) * qk_scale
        place = segment * 64 + part * 16 + cm
        logit = gl.where(place <= position + cn // GROUP, logit, NONE)
        top = gl.maximum(highest, logit)
        total = total * gl.exp2(highest - top) + gl.exp2(logit - top)
        highest = top
    every = gl.max(highest, axis=0)
    sums = gl.sum(total * gl.exp2(highest - every[None, :]), axis=0)
    n = gl.arange(0, N, layout=gl.SliceLayout(0, MMA))
    gl.store(states + 2 * n, every, mask=n < COLUMNS)
    gl.store(states + 2 * n + 1, gl.where(every > NONE, sums, 0.0), mask=n < COLUMNS)


@gluon.jit(do_not_specialize=["dense_below", "members", "segments", "width"])
def weigh_cells_kernel(
    weights_ptr,
    tops_ptr,
    gains_ptr,
    state_ptr,
    q_ptr,
    k_ptr,
    records_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    dense_below,
    members,
    segments,
    width,
    q_strides,
    k_strides,
    record_strides,
    stride_br,
    RULE: gl.constexpr,
    SHAPE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Weights of far cells, and sums over them and over near keys, for requests' rows of a KV head.

    A program takes one near segment, or ``segments`` far ones (a multiple of 8).  ``members``
    programs for each request and KV head.
    """
    GROUP: gl.constexpr = SHAPE.GROUP
    NUM_KV_HEADS: gl.constexpr = SHAPE.NUM_KV_HEADS
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    PAGE: gl.constexpr = SHAPE.PAGE_SIZE
    RECORD: gl.constexpr = SHAPE.RECORD
    QUERY_LEN: gl.constexpr = SHAPE.QUERY_LEN
    COUNT: gl.constexpr = RULE.SCORED_BLOCKS
    SINKS: gl.constexpr = RULE.SINK_BLOCKS // 32
    REACH: gl.constexpr = RULE.REACH_BLOCKS // 32
    NEAR: gl.constexpr = SINKS + REACH + (2 if QUERY_LEN > 1 else 1)
    ROWS: gl.constexpr = QUERY_LEN * GROUP
    COLUMNS: gl.constexpr = SHAPE.COLUMNS
    TWO: gl.constexpr = COLUMNS == 4
    PARTS: gl.constexpr = 1 if TWO else COLUMNS // 8
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    job = gl.program_id(0) // members
    member = gl.program_id(0) % members
    request = job // NUM_KV_HEADS
    kv_head = job % NUM_KV_HEADS
    seq_len = gl.load(seq_lens_ptr + request)
    first_token = gl.load(cu_seqlens_ptr + request)
    num_tokens = gl.load(cu_seqlens_ptr + request + 1) - first_token
    position = seq_len - num_tokens
    last = gl.maximum(position // 64 - REACH, 0)  # first segment of the window
    full = (position < dense_below) | ((last - gl.minimum(last, SINKS)) * 32 <= COUNT)
    if full | (num_tokens <= 0):
        return
    begin = SINKS + (member - NEAR) * segments
    if (member >= NEAR) & (begin >= last):
        return
    table = block_table_ptr + request.to(gl.int64) * stride_br
    q_row = q_ptr + first_token.to(gl.int64) * q_strides[0] + kv_head * GROUP * q_strides[1]
    states = state_ptr + (job.to(gl.int64) * members + member) * (2 * COLUMNS)
    if member < NEAR:
        segment = gl.where(member < SINKS, member, last + member - SINKS)
        if segment * 64 < seq_len:
            near_sums(
                states, q_row, k_ptr + kv_head.to(gl.int64) * k_strides[1], table, segment,
                position, qk_scale, q_strides[1], q_strides[0], k_strides,
                ROWS, GROUP, max(COLUMNS, 8), COLUMNS, HEAD_DIM, PAGE,
            )  # fmt: skip
        else:
            n = gl.arange(0, 32, layout=LANES)
            gl.store(states + 2 * n, gl.full([32], NONE, gl.float32, LANES), mask=n < COLUMNS)
            gl.store(states + 2 * n + 1, gl.zeros([32], gl.float32, LANES), mask=n < COLUMNS)
        return

    lane = gl.arange(0, 32, layout=LANES)
    g = lane >> 2
    k = lane & 3
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    records = records_ptr + kv_head.to(gl.int64) * record_strides[1]
    page_units = record_strides[0] // 16
    spot = job.to(gl.int64) * width
    end = gl.minimum(begin + segments, last)
    W: gl.constexpr = HEAD_DIM // 64
    SPLIT: gl.constexpr = 4 if TWO else 2
    MEANS: gl.constexpr = HEAD_DIM // SPLIT // 8
    VARIANCES: gl.constexpr = 2 * (HEAD_DIM // (2 if HEAD_DIM // SPLIT < 32 else SPLIT) // 32)
    PLAIN2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    level_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HEAD_DIM, 4], PLAIN2)
    rest_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HEAD_DIM // 2, 4], PLAIN2)

    def_state = (gl.full([32], NONE, gl.float32, LANES), gl.zeros([32], gl.float32, LANES), gl.full([32], NONE, gl.float32, LANES), gl.zeros([32], gl.float32, LANES))
    states0 = def_state
    states1 = def_state
    turns = (end - begin + 1) // 2
    units = units_of(table, gl.minimum(begin + lane, last - 1), page_units, PAGE, RECORD)
    for turn in gl.static_range(STAGES - 1):
        copy_turn(
            level_ring.index(turn), rest_ring.index(turn), records, units, 2 * turn, HEAD_DIM, RECORD
        )
        async_copy.commit_group()
    column = (g & 3) if TWO else g
    most = gl.zeros([32], gl.float32, LANES)
    for part in gl.static_range(PARTS):
        row = 8 * part + column
        live = (row < ROWS) & (row // GROUP < num_tokens)
        at = q_row + (row // GROUP) * q_strides[0] + (row % GROUP) * q_strides[1]
        most = gl.maximum(most, largest_channel(at, live, k, DTYPE, HEAD_DIM))
    largest = gl.max(most, axis=0)
    largest = gl.where(largest > 0.0, largest, 1.0)
    queries, heads, squares = (), (), ()
    unit = MOST_LEVEL / largest
    for part in gl.static_range(PARTS):
        row = 8 * part + column
        live = (row < ROWS) & (row // GROUP < num_tokens)
        at = q_row + (row // GROUP) * q_strides[0] + (row % GROUP) * q_strides[1]
        words = query_columns(at, live, unit, k, DTYPE, HEAD_DIM)
        queries = queries + (words,)  # type: ignore[assignment]  # noqa: RUF005
        of = g // (16 // SPLIT)
        words = query_rows(at, live, unit, of, k, DTYPE, SPLIT, HEAD_DIM)
        heads = heads + (words,)  # type: ignore[assignment]  # noqa: RUF005
        words = query_squares(at, live, 1.0 / largest, of, k, DTYPE, SPLIT, HEAD_DIM)
        squares = squares + (words,)  # type: ignore[assignment]  # noqa: RUF005
    factor = largest * qk_scale * (1.0 / (32.0 * MOST_LEVEL))
    factor_of_mean = largest * qk_scale * (1.0 / MOST_LEVEL)
    deviation = largest * qk_scale * LN2
    for turn in range(turns):
        async_copy.wait_group(STAGES - 2)
        thread_barrier()
        coming = turn + STAGES - 1
        if coming < turns:
            if coming % 16 == 0:
                following = gl.minimum(begin + 2 * coming + lane, last - 1)
                units = units_of(table, following, page_units, PAGE, RECORD)
            copy_turn(
                level_ring.index(coming % STAGES), rest_ring.index(coming % STAGES), records, units,
                coming % 16 * 2, HEAD_DIM, RECORD,
            )  # fmt: skip
        async_copy.commit_group()
        read = load_turn(
            level_ring.index(turn % STAGES)._reinterpret(gl.int32, [8, 32, W], PLAIN2),
            rest_ring.index(turn % STAGES), SPLIT, HEAD_DIM,
        )  # fmt: skip
        at_segment = begin + turn * 2
        for part in gl.static_range(PARTS):
            to_weights, to_tops = weights_ptr + part * 32, tops_ptr + 8 * part
            mean = product_of_parts(heads[part], read[4], MEANS, SPLIT, k, g) * factor_of_mean
            variance = product_of_parts(squares[part], read[5], VARIANCES, SPLIT, k, g)
            gain = (gl.sqrt(1.0 + variance * (deviation * deviation)) - 1.0) * LOG2E
            head = g % (16 // SPLIT)
            segment = at_segment + (k >> 1)
            to_gain = gains_ptr + (spot + segment) * COLUMNS + (8 * part + head)
            first = (k % 2 == 0) & (g < 16 // SPLIT) & (head < COLUMNS) & (segment < end)
            gl.store(to_gain, gain, mask=first)
            state = states0 if part == 0 else states1
            if TWO:
                products = cell_products(read, queries[part], 0, g, k, factor, W, True)
                source = (k & 1) * 8 + k
                base = (shuffle(mean, source), shuffle(mean, source + 4))
                state = weigh_cells(
                    products, base, state, spot + segment, k & 1, segment < end,
                    to_weights, to_tops, g, COLUMNS,
                )  # fmt: skip
            else:
                for r in gl.static_range(2):
                    products = cell_products(read, queries[part], r, g, k, factor, W, False)
                    base = (shuffle(mean, 8 * k + 2 * r), shuffle(mean, 8 * k + 2 * r + 4))
                    segment = at_segment + r + 0 * k
                    state = weigh_cells(
                        products, base, state, spot + segment, k, segment < end,
                        to_weights, to_tops, g, COLUMNS,
                    )  # fmt: skip
            if part == 0:
                states0 = state
            else:
                states1 = state
    for part in gl.static_range(PARTS):
        state = states0 if part == 0 else states1
        state = join_state(join_state(join_state(state, lane, 4), lane, 8), lane, 16)
        if TWO:
            state = join_state(state, lane, 2)
        at = states + 2 * (8 * part + 2 * k)
        keep = (g == 0) & (8 * part + 2 * k < COLUMNS)
        gl.store(at, state[0], mask=keep)
        gl.store(at + 1, 2.0 * state[1], mask=keep)
        gl.store(at + 2, state[2], mask=keep)
        gl.store(at + 3, 2.0 * state[3], mask=keep)


@gluon.jit
def units_of(table, segment, page_units, PAGE: gl.constexpr, RECORD: gl.constexpr):
    """Where segments' records are from the first one on, in 16 bytes, int64."""
    page = gl.load(table + segment * 64 // PAGE).to(gl.int64)
    return page * page_units + (segment * 64 % PAGE) // 64 * (RECORD // 16)
