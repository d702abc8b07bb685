"""Tokens of listed blocks, taken a tile at a time, and how far into a list a bound reaches.

A row (column) of a pattern is an ascending list of blocks.  Loops treat it as one run of
``blocks * BLOCK`` tokens, so that a tile may span several small blocks.
"""

import triton
import triton.language as tl

SCAN = tl.constexpr(128)


@triton.jit
def blocks_below(list_ptr, begin, end, bound):
    """How many of the ascending entries ``[begin, end)`` of a list are below ``bound``."""
    count = 0
    for first in range(begin, end, SCAN):
        index = first + tl.arange(0, SCAN)  # [SCAN]
        entry = tl.load(list_ptr + index, mask=index < end, other=2147483647)
        count += tl.sum((entry < bound).to(tl.int32))
    return count


@triton.jit
def listed_tokens(
    list_ptr, begin, first, end, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """Tokens ``first .. first + TILE - 1`` of the run of blocks that starts at entry ``begin``.

    Returns the tokens and whether each lies before ``end``.  ``first`` is a multiple of ``TILE``
    where ``TILE`` divides ``BLOCK``.
    """
    step = first + tl.arange(0, TILE)  # [TILE]
    inside = step < end  # [TILE]
    if BLOCK % TILE == 0:
        block = tl.load(list_ptr + begin + first // BLOCK)
        token = block * BLOCK + first % BLOCK + tl.arange(0, TILE)  # [TILE]
    else:
        entry = list_ptr + begin + step // BLOCK
        block = tl.load(entry, mask=inside, other=0) if MASKED else tl.load(entry)  # [TILE]
        token = block * BLOCK + step % BLOCK  # [TILE]
    return token, inside


@triton.jit
def packed_rows(
    tile, pack, num_q, GROUP: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows of a query tile: ``ROWS`` tokens of each of ``PACK`` heads of one group.

    Returns the head within the group and the token of each row, and which rows exist.
    """
    offs = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    head = pack * PACK + offs // ROWS  # [BLOCK_M]
    token = tile * ROWS + offs % ROWS  # [BLOCK_M]
    exists = (offs < ROWS * PACK) & (head < GROUP) & (token < num_q)
    return head, token, exists


@triton.jit
def attending(mask_ptr, index, exists, HAS_MASK: tl.constexpr):
    """Rows that exist and are no padding, as a mask."""
    if HAS_MASK:
        exists = exists & (tl.load(mask_ptr + index, mask=exists, other=0) != 0)
    return exists
