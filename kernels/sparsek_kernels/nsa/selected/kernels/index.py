"""The inverse of a selection (``index.py``): keys to sort by, then where keys and items begin."""

import triton
import triton.language as tl

from sparsek_kernels.nsa.selected.kernels.fwd_combine import is_near
from sparsek_kernels.nsa.selected.kernels.items import first_block, first_item

# Whatever these numbers are, one compiled kernel serves.
SIZES = ["num_keys", "num_q", "num_blocks", "num_seqs"]


@triton.jit
def _lower_bound(values_ptr, wanted, count, STEPS: tl.constexpr):
    """How many of ``count < 2^STEPS`` ascending values lie below each of ``wanted``."""
    low = wanted * 0
    high = low + count
    for _step in range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        below = tl.load(values_ptr + middle, mask=open_, other=0) < wanted
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    return low


@triton.jit
def _sequence_of(cu_seqlens_ptr, wanted, num_seqs, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """The last of ``num_seqs < 2^STEPS`` sequences that begins at or before each of ``wanted``.

    ``wanted`` are rows where ``BLOCK`` is 0, else blocks of ``BLOCK`` tokens.
    """
    low = wanted * 0
    high = low + num_seqs
    for _step in range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        start = tl.load(cu_seqlens_ptr + middle, mask=open_, other=0)
        if BLOCK > 0:
            start = first_block(start, middle, BLOCK)
        low = tl.where(open_ & (start <= wanted), middle + 1, low)
        high = tl.where(open_ & (start > wanted), middle, high)
    return low - 1


@triton.jit
def _store_items(item_keys_ptr, key, begin, end, item_entries, mask):
    """The key of each of its items, -1 for an item that has no entries."""
    first = first_item(begin, key, item_entries)
    past = first_item(end, key + 1, item_entries)
    used = first + tl.cdiv(end - begin, item_entries)
    for step in range(tl.max(tl.where(mask, past - first, 0), 0)):
        item = first + step
        tl.store(item_keys_ptr + item, tl.where(item < used, key, -1), mask=mask & (item < past))


@triton.jit(do_not_specialize=[*SIZES, "num_entries", "num_k", "offset", "chunk_rows"])
def nsa_index_keys_kernel(
    keys_ptr, indices_ptr, cu_seqlens_ptr,
    num_entries, num_keys, num_q, num_k, offset, chunk_rows, num_blocks, num_seqs, num_kv_heads,
    TOP_N: tl.constexpr, SEL_BLOCK: tl.constexpr, VARLEN: tl.constexpr, SEQ_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the sort keys of ``BLOCK`` places in ``block_indices``."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < num_entries
    block = tl.load(indices_ptr + place, mask=there, other=-1)
    kv_head = place // TOP_N % num_kv_heads
    row = place // (TOP_N * num_kv_heads)
    if VARLEN:
        seq = _sequence_of(cu_seqlens_ptr, row, num_seqs, 0, SEQ_STEPS)
        start = tl.load(cu_seqlens_ptr + seq, mask=there, other=0)
        pos = row - start
        first = first_block(start, seq, SEL_BLOCK)
    else:
        pos = row % num_q + offset
        first = row // num_q * tl.cdiv(num_k, SEL_BLOCK)
    key = (row // chunk_rows * num_kv_heads + kv_head) * num_blocks + first + block
    key += tl.where(is_near(block, pos // SEL_BLOCK), num_keys, 0)
    tl.store(keys_ptr + place, tl.where(block < 0, 2 * num_keys, key), mask=there)


@triton.jit(do_not_specialize=[*SIZES, "num_entries", "item_entries"])
def nsa_index_order_kernel(
    entries_ptr, rows_ptr, offsets_ptr, item_keys_ptr, block_seq_ptr, ordered_ptr, places_ptr,
    cu_seqlens_ptr,
    num_entries, num_keys, num_q, num_blocks, num_seqs, item_entries,
    PER_ROW: tl.constexpr, SEL_BLOCK: tl.constexpr, VARLEN: tl.constexpr, SEQ_STEPS: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK`` entries in the order of their keys, and as many keys and blocks.

    Keys below ``num_keys`` have items; ``offsets`` are of twice as many.
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = offs < num_entries
    entry = tl.load(places_ptr + offs, mask=there, other=0).to(tl.int32)
    tl.store(entries_ptr + offs, entry, mask=there)
    tl.store(rows_ptr + offs, entry // PER_ROW % num_q, mask=there)
    if tl.program_id(0) * BLOCK <= 2 * num_keys:
        begin = _lower_bound(ordered_ptr, offs, num_entries, STEPS)
        tl.store(offsets_ptr + offs, begin, mask=offs <= 2 * num_keys)
        end = _lower_bound(ordered_ptr, offs + 1, num_entries, STEPS)
        _store_items(item_keys_ptr, offs, begin, end, item_entries, offs < num_keys)
    if VARLEN:
        seq = _sequence_of(cu_seqlens_ptr, offs, num_seqs, SEL_BLOCK, SEQ_STEPS)
        tl.store(block_seq_ptr + offs, seq, mask=offs < num_blocks)


@triton.jit
def _merged_begin(offsets_ptr, key, num_keys, chunk_keys, together):
    """Where the entries of a key of chunks ``together`` begin."""
    local = key % chunk_keys
    chunk = key // chunk_keys * together * chunk_keys  # the first key of its first chunk
    first = tl.minimum(chunk, num_keys)
    begin = tl.load(offsets_ptr + first) + tl.load(offsets_ptr + num_keys + first)
    begin -= tl.load(offsets_ptr + num_keys)
    for _chunk in range(together):
        inside = chunk < num_keys
        for kind in tl.static_range(2):
            run_ptr = offsets_ptr + kind * num_keys + chunk
            begin += tl.load(run_ptr + local, mask=inside, other=0)
            begin -= tl.load(run_ptr, mask=inside, other=0)
        chunk += chunk_keys
    return begin


@triton.jit(do_not_specialize=[*SIZES, "item_entries", "num_merged", "chunk_keys", "together"])
def nsa_index_merge_kernel(
    entries_ptr, rows_ptr, merged_offsets_ptr, item_keys_ptr, block_seq_ptr, far_entries_ptr,
    offsets_ptr, cu_seqlens_ptr,
    num_keys, num_q, num_blocks, num_seqs, item_entries, num_merged, chunk_keys, together,
    PER_ROW: tl.constexpr, SEL_BLOCK: tl.constexpr, VARLEN: tl.constexpr, SEQ_STEPS: tl.constexpr,
    STEPS: tl.constexpr, RUN_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK`` entries of ``nsa_index_order_kernel`` to their places in an order.

    Here a key has entries of ``together`` chunks, in the order of their rows, whether they have
    items there or not.  The program also writes offsets, items and blocks, ``BLOCK`` of each.
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = offs < tl.load(offsets_ptr + 2 * num_keys)
    entry = tl.load(far_entries_ptr + offs, mask=there, other=0)
    run = _lower_bound(offsets_ptr, offs + 1, 2 * num_keys, STEPS) - 1
    other = tl.where(run < num_keys, run + num_keys, run - num_keys)
    key = tl.minimum(run, other)
    local = key % chunk_keys
    merged = key // (together * chunk_keys) * chunk_keys + local
    at = _merged_begin(offsets_ptr, merged, num_keys, chunk_keys, together)
    before = key // (together * chunk_keys) * (together * chunk_keys) + local
    for _chunk in range(together):
        for kind in tl.static_range(2):
            run_ptr = offsets_ptr + kind * num_keys + before
            at += tl.load(run_ptr + 1, mask=before < key, other=0)
            at -= tl.load(run_ptr, mask=before < key, other=0)
        before += chunk_keys
    at += offs - tl.load(offsets_ptr + run)
    begin = tl.load(offsets_ptr + other)
    size = tl.load(offsets_ptr + other + 1) - begin
    at += _lower_bound(far_entries_ptr + begin, entry, size, RUN_STEPS)
    tl.store(entries_ptr + at, entry, mask=there)
    tl.store(rows_ptr + at, entry // PER_ROW % num_q, mask=there)
    if tl.program_id(0) * BLOCK <= num_merged:
        some = tl.minimum(offs, num_merged)
        begin = _merged_begin(offsets_ptr, some, num_keys, chunk_keys, together)
        end = _merged_begin(
            offsets_ptr, tl.minimum(some + 1, num_merged), num_keys, chunk_keys, together
        )
        tl.store(merged_offsets_ptr + offs, begin, mask=offs <= num_merged)
        _store_items(item_keys_ptr, offs, begin, end, item_entries, offs < num_merged)
    if VARLEN:
        seq = _sequence_of(cu_seqlens_ptr, offs, num_seqs, SEL_BLOCK, SEQ_STEPS)
        tl.store(block_seq_ptr + offs, seq, mask=offs < num_blocks)
