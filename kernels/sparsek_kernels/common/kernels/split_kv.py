"""Adding up partial attention outputs that several programs computed over shares of the keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_splits(
    parts, states, mask_m, mask_out, num_parts,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Sum of the partial outputs of a tile, in split order: ``(row_max, row_sum, acc)``.

    ``parts`` and ``states`` point at split 0; loads bypass the L1 cache, which other programs'
    stores do not reach.  The first ``num_parts`` splits, at most ``MOST``, stored an output; the
    others had no keys.  All loads are on their way at once, where a loop would wait for each.
    """
    last = tl.maximum(num_parts - 1, 0)
    row_max = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)
    for s in tl.static_range(MOST):  # the last maximum again takes fewer registers than a mask
        state = states + 2 * tl.minimum(s, last) * BLOCK_M
        part_max = tl.load(state, mask=mask_m, other=-1.0e30, cache_modifier=".cg")
        row_max = tl.maximum(row_max, part_max)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for s in tl.static_range(MOST):
        there = s < num_parts
        state = states + 2 * s * BLOCK_M
        part_max = tl.load(state, mask=mask_m & there, other=-1.0e30, cache_modifier=".cg")
        part_sum = tl.load(state + BLOCK_M, mask=mask_m & there, other=0.0, cache_modifier=".cg")
        part = tl.load(
            parts + s * BLOCK_M * BLOCK_D, mask=mask_out & there, other=0.0, cache_modifier=".cg"
        )
        weight = tl.exp2(part_max - row_max)
        row_sum += part_sum * weight
        acc += part * weight[:, None]
    return row_max, row_sum, acc
