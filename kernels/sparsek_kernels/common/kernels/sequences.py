"""Where a program's sequence lies: fixed-length batches and packed (varlen) sequences."""

import triton
import triton.language as tl


@triton.jit
def sequence_bounds(
    seq,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    num_q, num_k,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """``(batch, q_start, q_len, k_start, k_len)`` of sequence ``seq``."""
    if VARLEN:
        q_start = tl.load(cu_seqlens_q_ptr + seq)
        k_start = tl.load(cu_seqlens_k_ptr + seq)
        q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
        k_len = tl.load(cu_seqlens_k_ptr + seq + 1) - k_start
        return seq * 0, q_start, q_len, k_start, k_len
    else:
        return seq, 0, num_q, 0, num_k


@triton.jit
def tile_map_kernel(
    tiles_ptr, cu_seqlens_ptr,
    num_seqs, num_tiles,
    BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Fill ``tiles[t] = (sequence, block within it)`` for every block of every sequence.

    Program ``s < num_seqs`` writes the tiles of sequence ``s``, the last program marks the unused
    tail with sequence -1.  ``SCAN`` sequences are counted at a time.
    """
    seq = tl.program_id(0)
    first = 0
    for lo in range(0, num_seqs, SCAN):
        index = lo + tl.arange(0, SCAN)  # [SCAN]
        counted = (index < seq) & (index < num_seqs)
        begin = tl.load(cu_seqlens_ptr + index, mask=counted, other=0)
        end = tl.load(cu_seqlens_ptr + index + 1, mask=counted, other=0)
        first += tl.sum(tl.cdiv(end - begin, BLOCK))
    mark = -1
    count = num_tiles - first
    if seq < num_seqs:
        begin_seq = tl.load(cu_seqlens_ptr + seq)
        count = tl.cdiv(tl.load(cu_seqlens_ptr + seq + 1) - begin_seq, BLOCK)
        mark = seq
    for lo in range(0, count, SCAN):
        index = lo + tl.arange(0, SCAN)  # [SCAN]
        inside = index < count
        slot = (first + index).to(tl.int64) * 2
        tl.store(tiles_ptr + slot, tl.zeros([SCAN], dtype=tl.int32) + mark, mask=inside)
        tl.store(tiles_ptr + slot + 1, index, mask=inside)
