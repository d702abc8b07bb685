"""InfLLM-v2's scores of blocks for single tokens (arXiv 2509.24663), from the means of cells.

Average ``n`` is half the sum of the means of cells ``n`` and ``n + 1``: of 32 keys every 16.  A
token sees those whose last key is not after it.  Logits are kept in base 2 (scaled by
``log2(e)``) throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.index.kernels.rope_rows import load_rows
from sparsek_kernels.paged.kernels.tiles import TOP_K, page_of, tile_sees_all, tile_span

LOWEST = tl.constexpr(-1.0e30)
"""Below every logit, and finite: no difference of two is NaN."""


@triton.jit
def load_means(
    means, table, cell, num_cells, stride_mp, HEAD_DIM, BLOCK_D: tl.constexpr, PAGE_SIZE, CELL
):
    """Means ``[ROWS, BLOCK_D]`` of the cells ``cell`` ``[ROWS]``, 0 from ``num_cells`` on."""
    live = cell < num_cells
    page = page_of(table, cell * CELL, live, PAGE_SIZE)
    rows = page * stride_mp + (cell * CELL % PAGE_SIZE) // CELL * HEAD_DIM
    offs_d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(means + rows[:, None] + offs_d[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["first_token"])
def average_logits_kernel(
    logit_ptr, lse_ptr, q_ptr, means_ptr, rotation_ptr, block_table_ptr, seq_lens_ptr,
    cu_seqlens_ptr,
    half_scale, dense_below, first_token, rotation_rows,
    stride_lt, stride_lh,
    stride_qt, stride_qh,
    stride_mp, stride_mh,
    stride_br,
    TOKENS_PER_REQUEST: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    CELL: tl.constexpr, SEL_BLOCK: tl.constexpr, SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr, SCORED_BLOCKS: tl.constexpr, TURN_BACK: tl.constexpr,
    TWO_TERMS: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Logits of one token and KV head, for a share of the averages, and their log-sum-exp.

    Grid ``(shares, Hkv, tokens)``.  A program takes every ``num_programs(0)``-th run of ``BLOCK_N``
    averages, so that the grid need not grow with the longest context allowed.  Row ``m`` of the
    tile is query head ``m`` of the group.  Writes ``[tokens, Hq, stride_lh]`` and
    ``[tokens, Hq, shares]``, float32; averages past a row's end and shares without a visible
    average are left out.  With
    ``TWO_TERMS`` a query is the sum of two bfloat16 numbers, else it is one already.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(1)
    local = tl.program_id(2)
    request, position, low, high, token_of_zero = tile_span(
        first_token + local, seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TOKENS_PER_REQUEST,
        1,
    )  # fmt: skip
    num_cells = (position + 1) // CELL
    num_averages = tl.minimum(num_cells - 1, stride_lh)
    begin = tl.program_id(0) * BLOCK_N
    full = tile_sees_all(
        position, dense_below, TOP_K, 1, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    if (high < low) | full | (begin >= num_averages):
        return
    member = tl.arange(0, BLOCK_M)
    live = member < GROUP
    head = kv_head * GROUP + member
    token = (token_of_zero + position).to(tl.int64)
    q = load_rows(
        q_ptr + token * stride_qt, head.to(tl.int64) * stride_qh,
        position + tl.zeros([BLOCK_M], tl.int32), live, rotation_ptr, rotation_rows,
        HEAD_DIM, BLOCK_D, TURN_BACK,
    )  # [BLOCK_M, BLOCK_D]  # fmt: skip
    q_high = q.to(tl.bfloat16)
    q_low = (q - q_high.to(tl.float32)).to(tl.bfloat16)
    q_high = tl.trans(q_high)  # [BLOCK_D, BLOCK_M]
    q_low = tl.trans(q_low)
    means = means_ptr + kv_head.to(tl.int64) * stride_mh
    table = block_table_ptr + request.to(tl.int64) * stride_br
    out = logit_ptr + (local.to(tl.int64) * stride_lt + head * stride_lh)[None, :]
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    stride = tl.num_programs(0) * BLOCK_N
    for first in tl.range(begin, num_averages, stride, num_stages=NUM_STAGES):
        average = first + tl.arange(0, BLOCK_N)
        here = load_means(
            means, table, average, num_cells, stride_mp, HEAD_DIM, BLOCK_D, PAGE_SIZE, CELL
        )  # [BLOCK_N, BLOCK_D]
        after = load_means(
            means, table, average + 1, num_cells, stride_mp, HEAD_DIM, BLOCK_D, PAGE_SIZE, CELL
        )
        logits = tl.dot(here, q_high)  # [BLOCK_N, BLOCK_M]
        logits = tl.dot(after, q_high, logits)
        if TWO_TERMS:
            logits = tl.dot(here, q_low, logits)
            logits = tl.dot(after, q_low, logits)
        visible = average < num_averages
        logits = tl.where(visible[:, None], logits * half_scale, float("-inf"))
        tl.store(out + average[:, None], logits, mask=visible[:, None] & live[None, :])
        higher = tl.maximum(top, tl.max(logits, axis=0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[None, :]), axis=0)
        top = higher
    row = local.to(tl.int64) * (tl.num_programs(1) * GROUP) + head
    lse = lse_ptr + row * tl.num_programs(0) + tl.program_id(0)
    tl.store(lse, top + tl.log2(total), mask=live)


@triton.jit(do_not_specialize=["first_token", "num_shares"])
def block_scores_kernel(
    score_ptr, logit_ptr, lse_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_token, num_shares,
    stride_st, stride_sh,
    stride_lt, stride_lh,
    TOKENS_PER_REQUEST: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_S: tl.constexpr, CELL: tl.constexpr, SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr, REACH_BLOCKS: tl.constexpr, SCORED_BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Scores of ``BLOCK_B`` blocks for one token and KV head.

    Grid ``(runs of blocks, Hkv, tokens)``.  An average's share is its part of each head's softmax,
    added up over the heads; a block has the largest share of the averages whose keys touch it.
    Writes ``[tokens, Hkv, stride_sh]`` float32, the blocks before the token's window alone.
    ``BLOCK_N`` averages were a run of :func:`average_logits_kernel`, and ``num_shares`` its shares,
    ``BLOCK_S`` at most.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(1)
    local = tl.program_id(2)
    _request, position, low, high, _token_of_zero = tile_span(
        first_token + local, seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TOKENS_PER_REQUEST,
        1,
    )  # fmt: skip
    num_averages = tl.minimum((position + 1) // CELL - 1, stride_lh)
    first_block = tl.program_id(0) * BLOCK_B
    last_block = tl.minimum(position // SEL_BLOCK - REACH_BLOCKS, stride_sh)
    full = tile_sees_all(
        position, dense_below, TOP_K, 1, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    if (high < low) | full | (first_block >= last_block):
        return
    # The averages that touch a block: its own cells', and the one before, of which half lies in it.
    PER_BLOCK: tl.constexpr = SEL_BLOCK // CELL
    place = tl.arange(0, triton.next_power_of_2(PER_BLOCK + 1))
    block = first_block + tl.arange(0, BLOCK_B)
    average = block[:, None] * PER_BLOCK + place[None, :] - 1  # [BLOCK_B, places]
    touching = (place <= PER_BLOCK)[None, :] & (average >= 0) & (average < num_averages)
    share = tl.arange(0, BLOCK_S)
    seen = (share < num_shares) & (share * BLOCK_N < num_averages)
    heads = tl.num_programs(1) * GROUP
    shares = tl.zeros(average.shape, tl.float32)
    for member in tl.range(0, GROUP):
        head = kv_head * GROUP + member
        row = local.to(tl.int64) * heads + head
        lse = tl.load(lse_ptr + row * num_shares + share, mask=seen, other=float("-inf"))
        top = tl.max(lse, axis=0)
        inverse = 1.0 / tl.sum(tl.exp2(lse - top), axis=0)
        logits = logit_ptr + local.to(tl.int64) * stride_lt + head * stride_lh
        logit = tl.load(logits + average, mask=touching, other=float("-inf"))
        shares += tl.exp2(logit - top) * inverse
    score = tl.max(shares, axis=1)
    scores = score_ptr + local.to(tl.int64) * stride_st + kv_head * stride_sh
    tl.store(scores + block, score, mask=block < last_block)
