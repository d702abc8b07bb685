"""The inverse of a selection (``index.py``) from sorted keys: where keys and items begin."""

import triton
import triton.language as tl


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


@triton.jit(do_not_specialize=["num_entries", "num_keys", "item_entries", "per_row", "num_q"])
def nsa_index_keys_kernel(
    entries_ptr, rows_ptr, offsets_ptr, items_ptr, item_offsets_ptr, ordered_ptr, places_ptr,
    num_entries, num_keys, item_entries, per_row, num_q,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK`` entries, in order, and the offsets and items of as many keys."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = offs < num_entries
    entry = tl.load(places_ptr + offs, mask=there, other=0).to(tl.int32)
    tl.store(entries_ptr + offs, entry, mask=there)
    tl.store(rows_ptr + offs, entry // per_row % num_q, mask=there)
    if tl.program_id(0) * BLOCK <= num_keys:
        begin = _lower_bound(ordered_ptr, offs, num_entries, STEPS)
        end = _lower_bound(ordered_ptr, offs + 1, num_entries, STEPS)
        tl.store(offsets_ptr + offs, begin, mask=offs <= num_keys)
        tl.store(items_ptr + offs, tl.cdiv(end - begin, item_entries), mask=offs < num_keys)
        tl.store(item_offsets_ptr + offs, 0, mask=offs == 0)


@triton.jit(do_not_specialize=["num_items", "num_keys"])
def nsa_index_items_kernel(
    item_keys_ptr, item_offsets_ptr,
    num_items, num_keys,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the keys of ``BLOCK`` items; ``num_keys`` after the last one."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = _lower_bound(item_offsets_ptr + 1, item + 1, num_keys, STEPS)
    tl.store(item_keys_ptr + item, key, mask=item < num_items)
