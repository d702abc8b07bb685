"""Which block and queries a program of the block-major kernels serves.

``InverseIndex`` (``index.py``) lists the queries that chose each block.  An *entry* is one of them,
for one KV head; its *slot* is its place in ``block_indices [B, N, Hkv, S]``.  An *item* is some
entries of one block: the work of one program.
"""

import triton
import triton.language as tl

# Whatever these numbers are, one compiled kernel serves.
SIZES = [
    *("first_key", "num_keys", "first_slot", "num_blocks", "num_q", "num_k", "offset"),
    "item_entries",
]


@triton.jit
def first_block(start, seq, SEL_BLOCK: tl.constexpr):
    """The number of the first block of packed sequence ``seq``, which begins at token ``start``.

    No two sequences share a number, and no sum over the sequences is needed.  Some stay unused.
    """
    return start // SEL_BLOCK + seq


@triton.jit
def first_item(begin, key, item_entries):
    """The number of the first item of a key, whose entries begin at ``begin``.

    A key has as many items as numbers up to the next key's first, or one fewer.
    """
    return begin // item_entries + key


@triton.jit
def locate_block(
    block, block_seq_ptr, cu_seqlens_ptr,
    num_k,
    SEL_BLOCK: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """``(sequence, its block, first token of it, its length)`` of a block of the batch.

    The first token counts from that of the batch entry.
    """
    if VARLEN:
        seq = tl.load(block_seq_ptr + block)
        start = tl.load(cu_seqlens_ptr + seq)
        length = tl.load(cu_seqlens_ptr + seq + 1) - start
        return seq, block - first_block(start, seq, SEL_BLOCK), start, length
    else:
        per_seq = tl.cdiv(num_k, SEL_BLOCK)
        return block // per_seq, block % per_seq, block * 0, num_k


@triton.jit
def locate_item(
    item_keys_ptr, entry_offsets_ptr, block_seq_ptr, cu_seqlens_ptr,
    first_key, num_keys, num_blocks, num_kv_heads, offset, num_k, item_entries,
    SEL_BLOCK: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Which block, head, sequence and entries a program serves.

    Items from the first of ``first_key`` on belong to this launch, one per program.  Returns
    ``(live, kv_head, batch, k_start, k_len, block, begin, entry, entry_end, shift)``: a block of
    the sequence, where the entries of its key begin, entries ``entry .. entry_end - 1`` of the
    inverse index, and ``shift``, the position of a query in its sequence minus its row of q.
    """
    item = first_item(tl.load(entry_offsets_ptr + first_key), first_key, item_entries)
    item += tl.program_id(0)
    past_key = first_key + num_keys
    inside = item < first_item(tl.load(entry_offsets_ptr + past_key), past_key, item_entries)
    key = tl.load(item_keys_ptr + item, mask=inside, other=-1)
    live = key >= 0
    key = tl.maximum(key, 0)
    begin = tl.load(entry_offsets_ptr + key)
    end = tl.load(entry_offsets_ptr + key + 1)
    entry = begin + (item - first_item(begin, key, item_entries)) * item_entries
    entry_end = tl.minimum(entry + item_entries, end)
    kv_head = (key // num_blocks) % num_kv_heads
    seq, block, k_start, k_len = locate_block(
        key % num_blocks, block_seq_ptr, cu_seqlens_ptr, num_k, SEL_BLOCK, VARLEN
    )
    if VARLEN:
        return live, kv_head, seq * 0, k_start, k_len, block, begin, entry, entry_end, -k_start
    else:
        return live, kv_head, seq, k_start, k_len, block, begin, entry, entry_end, offset


@triton.jit
def load_entries(
    entries_ptr, entry_rows_ptr,
    entry, entry_end,
    GROUP: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """``(slot, row of q, group member, mask)`` of ``BLOCK_E`` entries times ``BLOCK_G`` heads."""
    offs_r = tl.arange(0, BLOCK_E * BLOCK_G)
    at = entry + offs_r // BLOCK_G
    member = offs_r % BLOCK_G
    mask = (at < entry_end) & (member < GROUP)
    slot = tl.load(entries_ptr + at, mask=mask, other=0)  # [BLOCK_E * BLOCK_G]
    row = tl.load(entry_rows_ptr + at, mask=mask, other=0)
    return slot, row, member, mask
