"""Which blocks the tokens of a tile share, and what the inverse index lists of the others."""

import triton
import triton.language as tl

from sparsek_kernels.nsa.selected.kernels.fwd_combine import is_near


@triton.jit
def _far_blocks(
    indices_ptr, entry, start, end, offset, num_kv_heads, kv_head,
    TOP_N: tl.constexpr, SEL_BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Far blocks of entries, below 0 and all different where there is none; blocks and slots."""
    row = start + entry // BLOCK_S
    slot = (row.to(tl.int64) * num_kv_heads + kv_head) * TOP_N + entry % BLOCK_S
    inside = (row < end) & (entry % BLOCK_S < TOP_N)
    block = tl.load(indices_ptr + slot, mask=inside, other=-1)
    near = is_near(block, (row + offset) // SEL_BLOCK)
    return tl.where((block < 0) | near, -1 - entry, block), block, slot, inside


@triton.jit(do_not_specialize=["num_rows", "launch_rows", "launch_tiles", "chunk_rows", "offset"])
def nsa_share_blocks_kernel(
    keys_ptr, far_ptr, lists_ptr, counts_ptr, indices_ptr,
    num_rows, launch_rows, launch_tiles, chunk_rows, num_keys, num_blocks, offset, num_kv_heads,
    TOP_N: tl.constexpr, SEL_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_T`` neighbouring tokens of one KV head.

    Far blocks that ``LEAST`` of them chose are the tile's: ``lists [tiles, Hkv, MOST]``, in the
    order in which the tokens name them, and ``counts[..., 0]``.  Each token's other far blocks have
    parts: bits of ``far [rows, Hkv]``, which together are ``counts[..., 1]``, and keys of the
    inverse index below ``num_keys`` (``index.py``).
    """
    ENTRIES: tl.constexpr = BLOCK_T * BLOCK_S
    TOGETHER: tl.constexpr = min(ENTRIES, 32)
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    launch = tile // launch_tiles
    start = launch * launch_rows + tile % launch_tiles * BLOCK_T
    end = tl.minimum((launch + 1) * launch_rows, num_rows)
    entry = tl.arange(0, ENTRIES)
    block, chosen, slot, inside = _far_blocks(
        indices_ptr, entry, start, end, offset, num_kv_heads, kv_head, TOP_N, SEL_BLOCK, BLOCK_S
    )
    found = tl.zeros([ENTRIES], tl.int32)  # tokens that chose the block, and those before << 16
    for first in range(0, ENTRIES, TOGETHER):
        other_entry = first + tl.arange(0, TOGETHER)
        other, _chosen, _slot, _inside = _far_blocks(
            indices_ptr, other_entry, start, end, offset, num_kv_heads, kv_head, TOP_N, SEL_BLOCK,
            BLOCK_S,
        )  # fmt: skip
        each = tl.where(other_entry[None, :] < entry[:, None], 65537, 1)
        found += tl.sum(tl.where(block[:, None] == other[None, :], each, 0), 1)
    shared = (block >= 0) & ((found & 65535) >= LEAST)
    first_named = shared & (found < 65536)
    place = tl.cumsum(first_named.to(tl.int32), 0) - 1
    at = tile.to(tl.int64) * num_kv_heads + kv_head
    tl.store(lists_ptr + at * MOST + place, block, mask=first_named)
    far = (block >= 0) & (shared == 0)
    base = (start + entry // BLOCK_S) // chunk_rows * num_kv_heads + kv_head
    key = base * num_blocks + chosen + tl.where(far, 0, num_keys)
    tl.store(keys_ptr + slot, tl.where(chosen < 0, 2 * num_keys, key), mask=inside)
    bits = tl.reshape(far.to(tl.int32), [BLOCK_T, BLOCK_S])
    offs_s = tl.arange(0, BLOCK_S)
    row = start + tl.arange(0, BLOCK_T)
    token = row.to(tl.int64) * num_kv_heads + kv_head
    tl.store(far_ptr + token, tl.sum(bits << offs_s[None, :], 1), mask=row < end)
    tl.store(counts_ptr + 2 * at, tl.sum(first_named.to(tl.int32), 0))
    tl.store(counts_ptr + 2 * at + 1, tl.sum(tl.max(bits, 0) << offs_s, 0))
