"""Counts of keys, ranks and sums within a warp, for the programs that cut (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def counters_of_keys():
    """Address of 65 counters for each lane in shared memory that the kernel has beside Triton's.

    Once a kernel: the name is the function's.
    """
    return gl.inline_asm_elementwise(
        ".shared .align 16 .b32 key_counters[2080]; mov.u32 $0, key_counters;", "=r", [],
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
def count_key(address, key):
    """Add 1 to a lane's counter of a key."""
    gl.inline_asm_elementwise(
        "{ .reg .b32 a; mad.lo.u32 a, $2, 128, $1; red.shared.add.u32 [a], 1; mov.b32 $0, 0; }",
        "=&r,r,r", [address, key], dtype=gl.int32, is_pure=False, pack=1,
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


def _mask(compare: str, mask: str) -> str:
    """A bit for each cell of a thread's segment, of a comparison of its threads' four cells."""
    votes = "".join(
        f"setp.{compare}.s32 p, ${2 + j}, $6;\n"
        f"vote.sync.ballot.b32 b{j}, p, 0xffffffff;\n"
        f"shr.u32 b{j}, b{j}, s;\n"
        for j in range(4)
    )
    return f"""{votes}
        prmt.b32 b0, b0, b1, 0x0040;
        prmt.b32 b2, b2, b3, 0x0040;
        prmt.b32 {mask}, b0, b2, 0x5410;
        """


_MASKS: gl.constexpr = gl.constexpr(
    """
    {
    .reg .pred p;
    .reg .b32 b0, b1, b2, b3, s;
    mov.u32 s, %laneid;
    and.b32 s, s, 24;
    """
    + _mask("gt", "$0")
    + _mask("eq", "$1")
    + "}"
)


@gluon.jit
def masks_of(k0, k1, k2, k3, threshold):
    """A bit for each cell of a thread's segment: keys above a threshold, and those equal to it."""
    return gl.inline_asm_elementwise(
        _MASKS, "=&r,=&r,r,r,r,r,r", [k0, k1, k2, k3, threshold],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


_LOWEST: gl.constexpr = gl.constexpr(
    """
    {
    .reg .pred p, q;
    .reg .b32 n, mask, low, t, c;
    popc.b32 n, $1;
    setp.gt.s32 p, n, $2;
    vote.sync.any.pred q, p, 0xffffffff;
    mov.b32 $0, $1;
    @!q bra.uni DONE${:uid};
    mov.b32 low, 0;
    """
    + "".join(
        f"""
        add.u32 t, low, {step};
        bfi.b32 mask, -1, 0, 0, t;
        and.b32 mask, mask, $1;
        popc.b32 c, mask;
        setp.le.s32 q, c, $2;
        @q mov.b32 low, t;
        """
        for step in (16, 8, 4, 2, 1)
    )
    + """
    bfi.b32 mask, -1, 0, 0, low;
    @p and.b32 $0, $1, mask;
    DONE${:uid}:
    }
    """
)
"""Of a word ``$1`` with more bits than ``$2``: those below the largest number that has as many."""


@gluon.jit
def lowest_bits(word, count):
    """The ``count`` lowest of a word's set bits, or all of them if it has no more."""
    return gl.inline_asm_elementwise(
        _LOWEST, "=&r,r,r", [word, count], dtype=gl.int32, is_pure=False, pack=1
    )


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
def bits_of(x):
    """How many bits of a word are set."""
    return gl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def fold(low, high, lane, BIT: gl.constexpr):
    """Of two registers of a pair of threads that differ in a bit, the sum of one in each."""
    upper = (lane & BIT) != 0
    other = gl.where(upper, low, high)
    other = gl.inline_asm_elementwise(
        f"shfl.sync.bfly.b32 $0, $1, {BIT}, 31, 0xffffffff;", "=r,r", [other],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.where(upper, high, low) + other
