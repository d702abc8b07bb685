"""Products of queries with a turn's two records, by NVIDIA's matrix units (Gluon).

Levels are integers of 8 bits after one shift and one mask.  The query is scaled by the sizes of the
record's pairs and rounded to 8 bits; the thread ``4 g + k`` has its column ``g``.  With up to 4
columns two records share the 8 columns of an instruction.  Means and variances are multiplied in
float16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek_kernels.paged.index.page_records.kernels.lanes_sm80 import (
    LANES,
    halves,
    multiply_halves,
    pair_of_fp16,
    shuffle,
)

MOST_LEVEL: gl.constexpr = gl.constexpr(84.0)
"""A column's largest channel before sizes of pairs, up to 1.5, scale it to 8 bits."""

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
def largest_channel(q_row, live, k, DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The largest absolute channel of each thread's row; 1 for a row of zeros."""
    W: gl.constexpr = HEAD_DIM // 64
    most = gl.zeros([32], gl.float32, LANES)
    for p in gl.static_range(4):
        at = q_row + p * (HEAD_DIM // 4) + k * (4 * W)
        for i in gl.static_range(2 * W):
            word = gl.load((at + 2 * i).to(gl.pointer_type(gl.int32)), mask=live, other=0)
            low, high = halves(word, DTYPE)
            most = gl.maximum(most, gl.maximum(gl.abs(low), gl.abs(high)))
    lane = gl.arange(0, 32, layout=LANES)
    most = gl.maximum(most, shuffle(most, lane ^ 1))
    most = gl.maximum(most, shuffle(most, lane ^ 2))
    return gl.where(most > 0.0, most, 1.0)


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
def query_rows(
    row, live, unit, part, k,
    DTYPE: gl.constexpr, PARTS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
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
def query_squares(
    row, live, unit, part, k,
    DTYPE: gl.constexpr, PARTS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
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
def scaled_query(pairs, one, q, W: gl.constexpr):
    """The query times the sizes of pairs, floats of 8 bits: ``4 W`` words."""
    out = ()
    for w in gl.static_range(W):
        out = out + gl.inline_asm_elementwise(
            _SCALED, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
            [
                pairs[w], one, q[2 * w], q[2 * w + 1], q[2 * W + 2 * w], q[2 * W + 2 * w + 1],
                q[4 * W + 2 * w], q[4 * W + 2 * w + 1], q[6 * W + 2 * w], q[6 * W + 2 * w + 1],
            ],
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
def scale_of(code):
    """A vector's scale, float32."""
    code = code.to(gl.int32)
    return gl.where(code > 0, ((code + 1904) << 19).to(gl.float32, bitcast=True), 0.0)


@gluon.jit
def cell_products(read, query, r, g, k, factors, W: gl.constexpr, TWO: gl.constexpr):
    """Products of two columns with the levels of a thread's cells, times the ``factors`` of these
    columns; of record ``r``, or of both with ``TWO``.
    """
    rows, pairs, top, scales, _, _ = read
    if TWO:
        of_query, of_cells = shuffle(top, (g >> 2) * 2), shuffle(top, k)
        if W == 2:
            own = (gl.where(g < 4, pairs[0], pairs[2]), gl.where(g < 4, pairs[1], pairs[3]))
        else:
            own = (gl.where(g < 4, pairs[0], pairs[1]),)  # type: ignore[assignment]
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
    size = (((of_cells & ~1) + 126) << 22).to(gl.float32, bitcast=True)
    left, right = size * factors[0], size * factors[1]
    s0, s1, s2, s3 = scale_of(s0), scale_of(s1), scale_of(s2), scale_of(s3)
    return (
        c0.to(gl.float32) * (s0 * left), c1.to(gl.float32) * (s0 * right),
        c2.to(gl.float32) * (s1 * left), c3.to(gl.float32) * (s1 * right),
        d0.to(gl.float32) * (s2 * left), d1.to(gl.float32) * (s2 * right),
        d2.to(gl.float32) * (s3 * left), d3.to(gl.float32) * (s3 * right),
    )  # fmt: skip
