"""Where a program's query tile lies, and how many compressed blocks a query sees."""

import triton
import triton.language as tl


@triton.jit
def compressed_visible(pos, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr):
    """Compressed blocks that end at or before ``pos`` (they come first in the sequence)."""
    return tl.maximum(pos + 1 - CMP_BLOCK + CMP_STRIDE, 0) // CMP_STRIDE


@triton.jit
def locate_tile(
    tile, seq,
    tiles_ptr, cu_seqlens_ptr, cu_cmp_ptr,
    num_q, offset,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """``(seq, tile, batch, q_start, q_len, c_start, offset)`` of a tile of queries.

    Packed batches: ``tile`` indexes the map of (sequence, tile within it), sequence -1 is unused,
    and queries start at position 0 of their sequence.
    """
    if VARLEN:
        seq = tl.load(tiles_ptr + tile.to(tl.int64) * 2)
        tile = tl.load(tiles_ptr + tile.to(tl.int64) * 2 + 1)
        known = tl.maximum(seq, 0)
        q_start = tl.load(cu_seqlens_ptr + known)
        q_len = tl.load(cu_seqlens_ptr + known + 1) - q_start
        c_start = tl.load(cu_cmp_ptr + known)
        return seq, tile, seq * 0, q_start, q_len, c_start, seq * 0
    else:
        return seq, tile, seq, seq * 0, num_q, seq * 0, offset


@triton.jit
def locate_rows(
    tile, seq,
    tiles_ptr, cu_rows_ptr, cu_seqlens_ptr, cu_cmp_ptr,
    first_row, num_rows, offset, num_cmp,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """``(seq, tile, batch, q_start, q_len, c_start, c_len, offset)`` of a tile of a launch's rows.

    A launch serves rows ``first_row ..`` of q.  Packed: ``cu_rows`` are the sequences' offsets
    clipped to those rows, sequence -1 is unused.  ``offset + row - q_start`` is a position.
    """
    if VARLEN:
        seq = tl.load(tiles_ptr + tile.to(tl.int64) * 2)
        tile = tl.load(tiles_ptr + tile.to(tl.int64) * 2 + 1)
        known = tl.maximum(seq, 0)
        q_start = tl.load(cu_rows_ptr + known)
        q_len = tl.load(cu_rows_ptr + known + 1) - q_start
        c_start = tl.load(cu_cmp_ptr + known)
        c_len = tl.load(cu_cmp_ptr + known + 1) - c_start
        skipped = q_start - tl.load(cu_seqlens_ptr + known)
        return seq, tile, seq * 0, q_start, q_len, c_start, c_len, skipped
    else:
        start = seq * 0 + first_row
        return seq, tile, seq, start, num_rows, seq * 0, num_cmp, offset + first_row
