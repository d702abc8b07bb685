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
def locate_item(
    item_keys_ptr, item_offsets_ptr, entry_offsets_ptr, block_seq_ptr, cu_blocks_ptr,
    cu_seqlens_ptr,
    first_key, num_keys, num_blocks, num_kv_heads, offset, num_k, item_entries,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Which block, head, sequence and entries a program serves.

    Items ``item_offsets[first_key] ..`` belong to this launch, one per program.  Returns
    ``(live, kv_head, batch, k_start, k_len, first_token, entry, entry_end, shift)``: keys
    ``first_token ..`` of the sequence, entries ``entry .. entry_end - 1`` of the inverse index,
    and ``shift``, the position of a query in its sequence minus its row of q.
    """
    item = tl.load(item_offsets_ptr + first_key) + tl.program_id(0)
    live = item < tl.load(item_offsets_ptr + first_key + num_keys)
    key = tl.load(item_keys_ptr + item, mask=live, other=0)
    begin = tl.load(entry_offsets_ptr + key)
    end = tl.load(entry_offsets_ptr + key + 1)
    entry = begin + (item - tl.load(item_offsets_ptr + key)) * item_entries
    entry_end = tl.minimum(entry + item_entries, end)
    kv_head = (key // num_blocks) % num_kv_heads
    block = key % num_blocks
    seq = tl.load(block_seq_ptr + block)
    local_block = block - tl.load(cu_blocks_ptr + seq)
    if VARLEN:
        k_start = tl.load(cu_seqlens_ptr + seq)
        k_len = tl.load(cu_seqlens_ptr + seq + 1) - k_start
        return live, kv_head, seq * 0, k_start, k_len, local_block, entry, entry_end, -k_start
    else:
        return live, kv_head, seq, seq * 0, num_k, local_block, entry, entry_end, offset


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
