"""Adding up partial attention outputs that several programs computed over shares of the keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_splits(
    parts, states, num_parts, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MOST: tl.constexpr
):
    """Sum of the partial outputs of a tile, in split order: ``(row_max, row_sum, acc)``.

    ``parts`` and ``states`` point at split 0; loads bypass the L1 cache, which other programs'
    stores do not reach.  The first ``num_parts`` splits, one to ``MOST``, stored an output.  All
    loads are on their way at once, where a loop would wait for each.
    """
    last = num_parts - 1
    row_max = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)
    for s in tl.static_range(MOST):  # the last one again takes less code than a mask
        state = states + 2 * tl.minimum(s, last) * BLOCK_M
        row_max = tl.maximum(row_max, tl.load(state, cache_modifier=".cg"))
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for s in tl.static_range(MOST):
        split = tl.minimum(s, last)
        state = states + 2 * split * BLOCK_M
        part_max = tl.load(state, cache_modifier=".cg")
        part_sum = tl.load(state + BLOCK_M, cache_modifier=".cg")
        part = tl.load(parts + split * BLOCK_M * BLOCK_D, cache_modifier=".cg")
        weight = tl.where(s <= last, tl.exp2(part_max - row_max), 0.0)
        row_sum += part_sum * weight
        acc += part * weight[:, None]
    return row_max, row_sum, acc
