"""Dropout of attention weights: what stays follows from the place of a weight alone.

The weight of query ``i`` and key ``j`` in head ``h`` of batch entry ``b`` has 16 random bits:
the half ``j % 2`` (the lower one first) of the word ``j % 8 // 2`` that Philox-4x32 with 7 rounds
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4) gives for the
counter ``(j // 8, i, b Hq + h, offset)`` and the key ``seed``.  It is dropped where the bits are
below ``drop_below``.  Tiles and passes do not enter, so every kernel drops the same weights.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def dropout_state(rng_ptr, DROPOUT: tl.constexpr):
    """Seed and offset of a call; zeros without dropout."""
    if DROPOUT:
        seed = tl.load(rng_ptr)
        offset = tl.load(rng_ptr + 1)
    else:
        seed = tl.full([], 0, dtype=tl.int64)
        offset = tl.full([], 0, dtype=tl.int64)
    return seed, offset


@triton.jit
def kept_weights(
    seed, offset, drop_below, plane, query, key, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """``[BLOCK_M, BLOCK_N]`` bool: the weights that stay.

    plane: ``[BLOCK_M]``, ``b Hq + h`` of each row; query: ``[BLOCK_M]``; key: ``[BLOCK_N]``, in
    runs of 8 that start at a multiple of 8.
    """
    octet = tl.max(tl.reshape(key, [BLOCK_N // 8, 8]), 1) // 8  # [BLOCK_N / 8]
    grid = tl.zeros([BLOCK_M, BLOCK_N // 8], dtype=tl.int32)
    first, second, third, fourth = tl.philox(
        seed,
        grid + octet[None, :].to(tl.int32),
        grid + query[:, None].to(tl.int32),
        grid + plane[:, None].to(tl.int32),
        grid + offset.to(tl.int32),
        ROUNDS,
    )
    words = tl.join(tl.join(first, third), tl.join(second, fourth))  # [BLOCK_M, BLOCK_N / 8, 2, 2]
    bits = tl.join(words & 0xFFFF, words >> 16).to(tl.int32)
    kept = (bits >= drop_below).to(tl.int8)
    return tl.reshape(kept, [BLOCK_M, BLOCK_N]) != 0
