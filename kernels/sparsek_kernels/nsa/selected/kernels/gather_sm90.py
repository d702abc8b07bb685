"""Copies of scattered rows ``[B, N, H, D]``, q or its gradient, to shared memory (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek_kernels.common.kernels.gluon_names import async_load

GATHER_WARPS: gl.constexpr = gl.constexpr(4)
CHUNK: gl.constexpr = gl.constexpr(32)


@gluon.jit
def copy_rows(
    tile, rows,
    base_ptr,
    kv_head, octet_t, octet_h,
    GROUP: gl.constexpr, BLOCK_G: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Start copies to ``tile [ROWS, HEAD_DIM]``: row ``r`` is head ``r % BLOCK_G`` of ``rows[r]``.

    Padding repeats the last head of the group.  Strides count groups of eight elements.
    """
    WIDE: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [GATHER_WARPS, 1], [1, 0]
    )
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, WIDE))[None, :]
    for chunk in gl.static_range(ROWS // CHUNK):
        offs = chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, WIDE))
        head = kv_head * GROUP + gl.minimum(offs % BLOCK_G, GROUP - 1)
        row = rows.slice(chunk * CHUNK, CHUNK).load(gl.SliceLayout(1, WIDE))
        at = (row.to(gl.int64) * octet_t + head.to(gl.int64) * octet_h) * 8
        async_load(tile.slice(chunk * CHUNK, CHUNK), base_ptr + at[:, None] + col)
