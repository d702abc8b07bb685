"""Counts of keys, sums of shares and lists, for the programs that cut (Gluon).

A thread has four cells of a segment: ``t``, ``8 + t``, ``16 + t`` and ``24 + t`` of thread ``t`` of
its eight.  A word has their keys in its bytes, or two numbers in its halves.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek_kernels.paged.sample import CELL_BITS, STEPS, WHOLE_BITS


@gluon.jit
def counters_of_keys(WORDS: gl.constexpr):
    """Address of 65 counters for each lane in shared memory that the kernel has beside Triton's.

    Behind them are ``WORDS`` words for each of 128 threads.  Once a kernel: the name is the
    function's.
    """
    SIZE: gl.constexpr = 65 * 32 + 128 * WORDS
    return gl.inline_asm_elementwise(
        f".shared .align 16 .b32 key_counters[{SIZE}]; mov.u32 $0, key_counters;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def clear_counters(address):
    """Set 16 neighbouring counters to 0."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .b32 z;
        mov.b32 z, 0;
        st.shared.v4.b32 [$1], {z, z, z, z};
        st.shared.v4.b32 [$1 + 16], {z, z, z, z};
        st.shared.v4.b32 [$1 + 32], {z, z, z, z};
        st.shared.v4.b32 [$1 + 48], {z, z, z, z};
        mov.b32 $0, z;
        }
        """,
        "=&r,r", [address], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def read_counters(address):
    """The sum of 16 neighbouring counters."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, s;
        ld.shared.v4.b32 {a, b, c, d}, [$1];
        add.u32 a, a, b; add.u32 c, c, d; add.u32 s, a, c;
        ld.shared.v4.b32 {a, b, c, d}, [$1 + 16];
        add.u32 a, a, b; add.u32 c, c, d; add.u32 s, s, a; add.u32 s, s, c;
        ld.shared.v4.b32 {a, b, c, d}, [$1 + 32];
        add.u32 a, a, b; add.u32 c, c, d; add.u32 s, s, a; add.u32 s, s, c;
        ld.shared.v4.b32 {a, b, c, d}, [$1 + 48];
        add.u32 a, a, b; add.u32 c, c, d; add.u32 s, s, a; add.u32 $0, s, c;
        }
        """,
        "=&r,r", [address], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# Bytes of weights become bfloat16 numbers, two at a time: even bytes, or odd ones.
_EVEN: gl.constexpr = gl.constexpr("shl.b32 t, {}, 4; lop3.b32 t, t, 0x0FF00FF0, 0x30003000, 0xEA;")
_ODD: gl.constexpr = gl.constexpr("shr.u32 t, {}, 4; lop3.b32 t, t, 0x0FF00FF0, 0x30003000, 0xEA;")

_ADD_SCORES: gl.constexpr = gl.constexpr(
    "{ .reg .b32 t;"
    + _EVEN.value.format("$4")
    + "fma.rn.bf16x2 $0, t, $6, $2;"
    + _ODD.value.format("$4")
    + "fma.rn.bf16x2 $0, t, $7, $0;"
    + _EVEN.value.format("$5")
    + "fma.rn.bf16x2 $1, t, $6, $3;"
    + _ODD.value.format("$5")
    + "fma.rn.bf16x2 $1, t, $7, $1; }"
)


@gluon.jit
def add_scores(first, second, a, b, left, right):
    """Add two columns' weights, times what each counts, to the scores of a thread's cells.

    first, second: scores of two cells each, bfloat16; a, b: words of four weights, of a cell's two
    columns and of the next cell's; left, right: what a column's weights count, twice.
    """
    return gl.inline_asm_elementwise(
        _ADD_SCORES, "=&r,=&r,r,r,r,r,r,r", [first, second, a, b, left, right],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


_COUNT: gl.constexpr = gl.constexpr("mad.lo.u32 a, a, 4, $6; red.shared.add.u32 [a], 1;")
_KEYS: gl.constexpr = gl.constexpr(
    "{ .reg .pred p; .reg .b32 x, y, a; setp.ne.s32 p, $5, 0;"
    + "".join(
        f"max.bf16x2 {x}, {score}, $3; min.bf16x2 {x}, {x}, $4; sub.u32 {x}, {x}, $3;"
        f"selp.b32 {x}, {x}, 0x08000800, p;"  # beyond the last key
        f"and.b32 a, {x}, 0xFE0; {_COUNT.value}"
        f"shr.u32 a, {x}, 16; and.b32 a, a, 0xFE0; {_COUNT.value}"
        f"shr.u32 {x}, {x}, 5; lop3.b32 {x}, {x}, 0x003F003F, 0x00400040, 0xEA;"
        for x, score in (("x", "$1"), ("y", "$2"))
    )
    + "prmt.b32 x, x, y, 0x6420; selp.b32 $0, x, 0, p; }"
)


@gluon.jit
def count_keys(first, second, lowest, highest, inside, address):
    """A word with the integer keys of a thread's four cells, which are counted; 0 outside.

    A key is the quarter of an octave that a score lies in, counted from that of ``lowest`` and cut
    off at that of ``highest``.  Each byte of the word has 64 more than its key.

    first, second: the scores, two bfloat16 numbers each; inside: whether the cells compete;
    address: where the counters of the thread's lane begin.
    """
    return gl.inline_asm_elementwise(
        _KEYS, "=&r,r,r,r,r,r,r", [first, second, lowest, highest, inside, address],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def store_own(address, word):
    """Leave a word where no other thread reads it: Triton would put barriers around its loads."""
    gl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, 0;", "=&r,r,r", [address, word],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_own(address):
    """What ``store_own`` left."""
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1
    )


_SHARES: gl.constexpr = gl.constexpr(
    "{ .reg .b32 a;"
    + "".join(
        f"bfe.u32 a, $4, {8 * i}, 8; mad.lo.u32 a, a, 4, $5; ld.shared.b32 ${i}, [a];"
        for i in range(4)
    )
    + "}"
)


@gluon.jit
def shares_of(keys, table):
    """The shares of a thread's four cells, by a table of what each byte of ``count_keys`` has."""
    return gl.inline_asm_elementwise(
        _SHARES, "=&r,=&r,=&r,=&r,r,r", [keys, table],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


_DRAWN: gl.constexpr = gl.constexpr(
    "{ .reg .pred p; .reg .b32 n, m, e, k; .reg .b64 at; mov.b32 e, $2;"
    + "".join(
        f"shr.u32 n, e, {WHOLE_BITS}; add.u32 e, e, ${3 + i}; shr.u32 m, e, {WHOLE_BITS};"
        "setp.ne.u32 p, n, m; setp.lt.and.u32 p, n, $10, p;"
        f"bfe.u32 k, $7, {8 * i}, 8; mul.lo.u32 k, k, {STEPS // 4}; sub.s32 k, $9, k;"
        f"max.s32 k, k, 0; shl.b32 k, k, {CELL_BITS}; add.u32 k, k, $8; add.u32 k, k, {8 * i};"
        "mad.wide.u32 at, n, 4, $1; @p st.global.b32 [at], k;"
        for i in range(4)
    )
    + "mov.b32 $0, 0; }"
)


@gluon.jit
def list_drawn(address, before, p0, p1, p2, p3, keys, first, steps, places):
    """Write the entries of a thread's cells that are drawn: where the sum of shares passes a whole.

    address: of the list, int64; before: the sum before the thread's cells; p0 to p3: their shares;
    keys: a word of ``count_keys``; first: the first cell's number; steps: of the weight of a byte
    of 0; places: of the list.
    """
    gl.inline_asm_elementwise(
        _DRAWN, "=&r,l,r,r,r,r,r,r,r,r,r",
        [address, before, p0, p1, p2, p3, keys, first, steps, places],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def shuffle_up(x, DISTANCE: gl.constexpr):
    """``x`` of the thread ``DISTANCE`` before in its warp, 0 for the first ones."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        shfl.sync.up.b32 $0|p, $1, $2, 0, 0xffffffff;
        @!p mov.b32 $0, 0;
        }
        """,
        "=&r,r,r", [x, x * 0 + DISTANCE], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def last_of_warp(x):
    """``x`` of the warp's last thread."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 31, 31, 0xffffffff;", "=r,r", [x],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def leave_sum_of_warp(address, x):
    """Leave the sum of a warp's ``x`` in shared memory, in its place of four."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .b32 n, w;
        redux.sync.add.s32 n, $2, 0xffffffff;
        mov.u32 w, %tid.x;
        shr.u32 w, w, 5;
        mad.lo.u32 w, w, 4, $1;
        st.shared.b32 [w], n;
        mov.b32 $0, 0;
        }
        """,
        "=&r,r,r", [address, x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def sum_of_warps_before(address):
    """What the warps before this one left."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b32 w, a, b, c, d;
        mov.u32 w, %tid.x;
        ld.shared.v4.b32 {a, b, c, d}, [$1];
        setp.ge.u32 p, w, 32;
        selp.b32 $0, a, 0, p;
        setp.ge.u32 p, w, 64;
        @p add.u32 $0, $0, b;
        setp.ge.u32 p, w, 96;
        @p add.u32 $0, $0, c;
        }
        """,
        "=&r,r", [address], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def twice(x):
    """A float32 number as two of bfloat16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1
    )
