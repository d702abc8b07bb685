"""The best blocks of each token (arXiv 2502.11089, equation 11), from block scores.

Nothing is sorted: the score of the worst winner is found by bisection over the bits of the scores,
and counts of set bits place the winners in ascending order.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.nsa.compressed.kernels.block_sums_sm90 import BLOCK_SUMS_SCALE, block_sums_of


@triton.jit
def _num_bits(word):
    """Set bits of each uint32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _place_of_bit(word, n):
    """Place of each uint32's set bit that has ``n`` set bits below it; there must be one."""
    place = n * 0
    for step in tl.static_range(5):
        below = _num_bits((word >> place.to(tl.uint32)) & ((1 << (16 >> step)) - 1))
        beyond = n >= below
        n = tl.where(beyond, n - below, n)
        place = tl.where(beyond, place + (16 >> step), place)
    return place


@triton.jit
def _packed(flags):
    """Flags ``[ROWS, 32]`` as uint32 ``[ROWS]``."""
    return tl.sum(flags.to(tl.uint32) << tl.arange(0, 32).to(tl.uint32)[None, :], 1)


@triton.jit
def _token_row(
    indices_ptr, token_seq_ptr, cu_seqlens_ptr,
    first_row, num_q, offset,
    TOP_N: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Where the program's token has its blocks, and the token's position."""
    token = first_row + tl.program_id(0)
    if VARLEN:
        seq = tl.load(token_seq_ptr + token)
        pos = token - tl.load(cu_seqlens_ptr + seq)
    else:
        pos = token + offset
    row = (tl.program_id(2).to(tl.int64) * num_q + token) * tl.num_programs(1) + tl.program_id(1)
    return indices_ptr + row * TOP_N, pos


@triton.jit
def forced_blocks(
    out, pos,
    SEL_BLOCK: tl.constexpr, TOP_N: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr,
    BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Write the entries that the token's position decides: forced blocks, and -1 after the last.

    Returns where the other ``num_free`` blocks go, and the range ``num_init .. first_local`` that
    they are chosen from: ``(out, num_free, num_init, first_local)``.
    """
    FREE: tl.constexpr = TOP_N - NUM_INIT - NUM_LOCAL
    own = pos // SEL_BLOCK
    num_init = tl.minimum(own + 1, NUM_INIT)
    first_local = tl.maximum(own - NUM_LOCAL + 1, num_init)
    num_local = own + 1 - first_local
    num_free = tl.minimum(first_local - num_init, FREE)
    offs_o = tl.arange(0, BLOCK_O)  # [BLOCK_O]
    after = offs_o - num_init - num_free
    rest = tl.where(offs_o < num_init, offs_o, tl.where(after < num_local, first_local + after, -1))
    by_rule = (offs_o < num_init) | (after >= 0)
    tl.store(out + offs_o, rest, mask=by_rule & (offs_o < TOP_N))
    return out + num_init, num_free, num_init, first_local


@triton.jit
def store_best(
    out, score, num_free, num_init, first_local, FREE: tl.constexpr, BLOCK_O: tl.constexpr
):
    """Write the ``num_free`` best blocks, ascending, of ``score [BLOCK_R, 32]``.

    The score of the worst winner is found by bisection, and a running count places the winners;
    among equals the lower indices win.

    ``best_of`` of the paged kernels has a loop of its own: here one warp mostly has the row, so
    maxima of columns narrow the range before it is halved, and winners are bits of words.
    """
    BLOCK_R: tl.constexpr = score.shape[0]
    COLS: tl.constexpr = score.shape[1]
    block = tl.arange(0, BLOCK_R)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    inside = (block >= num_init) & (block < first_local)  # [BLOCK_R, COLS]
    # NaN counts as zero: whatever q holds, valid blocks come out.  The bits of numbers that
    # are not negative are ordered as the numbers are.
    bits = tl.where(score > 0.0, score, 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(inside, bits, -1)  # [BLOCK_R, COLS]
    best = tl.max(bits, 0)  # [COLS]
    # As many scores as there are columns lie at or above the least of these maxima.
    least = tl.min(best, 0) if COLS >= FREE else -1
    above = tl.max(best, 0) + 1
    count = tl.sum((bits >= least).to(tl.int32))
    while (count != num_free) & (above - least > 1):
        middle = least + (above - least) // 2
        found = tl.sum((bits >= middle).to(tl.int32))
        enough = found >= num_free
        least = tl.where(enough, middle, least)
        count = tl.where(enough, found, count)
        above = tl.where(enough, above, middle)
    won = _packed(bits >= least)  # [BLOCK_R]
    if count != num_free:
        # Scores equal to the worst winner's fill the room that is left, lower blocks first.
        equal = _packed(bits == least)
        size = _num_bits(equal)
        room = num_free - tl.sum((bits > least).to(tl.int32))
        room -= tl.cumsum(size, 0) - size  # [BLOCK_R]
        ahead = (tl.full([BLOCK_R], 1, tl.uint32) << _place_of_bit(equal, room).to(tl.uint32)) - 1
        equal = tl.where(room >= size, equal, tl.where(room > 0, equal & ahead, 0))
        won = _packed(bits > least) | equal
    # The row that holds each winner, and its place there.
    offs_o = tl.arange(0, BLOCK_O)  # [BLOCK_O]
    size = _num_bits(won)
    before = tl.cumsum(size, 0) - size
    rank = offs_o[:, None] - before[None, :]
    holds = (rank >= 0) & (rank < size[None, :])  # [BLOCK_O, BLOCK_R]
    word = tl.sum(tl.where(holds, won[None, :], 0), 1)  # [BLOCK_O]
    rank = tl.sum(tl.where(holds, rank, 0), 1)
    first = tl.sum(tl.where(holds, tl.arange(0, BLOCK_R)[None, :] * COLS, 0), 1)
    winner = first + _place_of_bit(word, rank)
    tl.store(out + offs_o, winner, mask=offs_o < num_free)


@triton.jit
def nsa_top_blocks_kernel(
    indices_ptr, scores_ptr, token_seq_ptr, cu_seqlens_ptr,
    first_row, num_rows, num_q, offset, pitch,
    SEL_BLOCK: tl.constexpr, TOP_N: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """One program: one token and KV head.

    Candidates are the blocks from ``NUM_INIT`` on that lie before the ``NUM_LOCAL`` latest; the
    ``TOP_N - NUM_INIT - NUM_LOCAL`` best of them and the forced blocks are written ascending, -1
    after the last, to contiguous ``[B, N, Hkv, TOP_N]`` int32.
    """
    out, pos = _token_row(
        indices_ptr, token_seq_ptr, cu_seqlens_ptr, first_row, num_q, offset, TOP_N, VARLEN
    )
    out, num_free, num_init, first_local = forced_blocks(
        out, pos, SEL_BLOCK, TOP_N, NUM_INIT, NUM_LOCAL, BLOCK_O
    )
    if num_free > 0:
        COLS: tl.constexpr = 32
        row = tl.program_id(2).to(tl.int64) * num_rows + tl.program_id(0)
        at = (row * tl.num_programs(1) + tl.program_id(1)) * pitch
        first = tl.arange(0, BLOCK_B // COLS)[:, None] * COLS
        # Unwritten places are read with the rest, so that loads are wide.
        score = tl.load(
            scores_ptr + at + first + tl.arange(0, COLS)[None, :],
            mask=first < first_local,
            other=0.0,
        )  # [BLOCK_B / COLS, COLS]
        FREE: tl.constexpr = TOP_N - NUM_INIT - NUM_LOCAL
        store_best(out, score, num_free, num_init, first_local, FREE, BLOCK_O)


@triton.jit
def nsa_top_summed_blocks_kernel(
    indices_ptr, words_ptr, maxima_ptr, lse_ptr, token_seq_ptr, cu_seqlens_ptr,
    first_row, num_rows, num_q, pitch,
    GROUP: tl.constexpr, SEL_BLOCK: tl.constexpr, TOP_N: tl.constexpr, NUM_INIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr, VARLEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """:func:`nsa_top_blocks_kernel` for scores that come as block sums of each head.

    ``words [B, num_rows, Hq, pitch, 16]`` holds the sums of ``pitch`` tiles of 32 blocks, relative
    to ``maxima [B, num_rows, Hq, pitch]``.
    """
    out, pos = _token_row(
        indices_ptr, token_seq_ptr, cu_seqlens_ptr, first_row, num_q, 0, TOP_N, VARLEN
    )
    out, num_free, num_init, first_local = forced_blocks(
        out, pos, SEL_BLOCK, TOP_N, NUM_INIT, NUM_LOCAL, BLOCK_O
    )
    if num_free > 0:
        batch = tl.program_id(2).to(tl.int64)
        row = tl.program_id(0)
        num_heads = tl.num_programs(1) * GROUP
        head = tl.program_id(1) * GROUP
        at = (batch * num_rows + row) * num_heads + head
        lse_ptr += (batch * num_heads + head) * num_q + first_row + row
        tile = tl.arange(0, BLOCK_R)  # [BLOCK_R]
        reached = tile * 32 < first_local
        words_ptr += at * pitch * 16
        maxima_ptr += at * pitch
        score = tl.zeros([BLOCK_R, 32], tl.float32)
        for member in tl.static_range(GROUP):
            words = tl.load(
                words_ptr + (member * pitch + tile)[:, None] * 16 + tl.arange(0, 16)[None, :],
                mask=reached[:, None],
                other=0,
                eviction_policy="evict_first",
            )  # [BLOCK_R, 16]
            maxima = tl.load(maxima_ptr + member * pitch + tile, mask=reached, other=float("-inf"))
            lse = tl.load(lse_ptr + member * num_q)
            lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
            share = tl.exp2(maxima - lse) * BLOCK_SUMS_SCALE  # [BLOCK_R]
            score += block_sums_of(words) * share[:, None]
        FREE: tl.constexpr = TOP_N - NUM_INIT - NUM_LOCAL
        store_best(out, score, num_free, num_init, first_local, FREE, BLOCK_O)
