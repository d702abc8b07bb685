"""Launching block selection: bounded scratch, decodes and prefill tiles."""

from __future__ import annotations

import torch

from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.checks import given_summary
from sparsek_kernels.paged.config import logits_config, next_power_of_2, top_warps
from sparsek_kernels.paged.kernels.select import decode_logits_kernel, top_blocks_kernel
from sparsek_kernels.paged.launch.scores import score_tiles
from sparsek_kernels.paged.launch.scratch import (
    MOST_ROWS,
    overlap_options,
    rows_per_step,
    workspace,
)
from sparsek_kernels.paged.launch.tiles import prefill_tiles
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy, ceil_div

_SCRATCH_ELEMENTS = 1 << 24
"""Most float32 elements (64 MiB) of one scratch tensor of scores; larger steps go in batches."""


def _max_blocks(batch: PagedBatch, sel_block: int) -> int:
    return max(ceil_div(batch.max_seq_len, sel_block), 1)


def _cells(policy: SelectionPolicy) -> int:
    width = 2 * CELL_SIZE if policy.score_kind == "min_max" else CELL_SIZE
    return policy.sel_block_size // width


def select_blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    k_summary: torch.Tensor | None,
    softmax_scale: float,
    k_scale: float = 1.0,
) -> torch.Tensor:
    """Selected blocks ``[tiles, Hkv, scored_blocks]`` int32; -1 where a tile sees everything.

    Row ``t`` of the decodes is query token ``t``; the prefills' tiles follow in order.
    """
    heads, page_size = k_cache.shape[1:3]
    tiles: torch.Tensor | None = None
    count = batch.num_decode_tokens
    if batch.num_prefills:
        tiles = prefill_tiles(batch, policy.query_tile, q.shape[0])
        count += tiles.shape[0]
    out = torch.empty(count, heads, policy.scored_blocks, dtype=torch.int32, device=q.device)
    if policy.scored_blocks == 0:
        return out
    scale = softmax_scale * k_scale * LOG2E.value
    if batch.num_decodes:
        _select_decodes(out, q, given_summary(k_summary), batch, policy, scale, page_size)
    if tiles is None:
        return out
    if policy.query_tile == 1:
        _select_tokens(out, q, given_summary(k_summary), batch, policy, scale, page_size)
    else:
        _select_tiles(out, q, k_cache, batch, policy, tiles, scale)
    return out


def _select_decodes(
    out: torch.Tensor,
    q: torch.Tensor,
    k_summary: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    qk_scale: float,
    page_size: int,
) -> None:
    heads = k_summary.shape[1]
    num_heads, dim = q.shape[1:]
    group = num_heads // heads
    max_blocks = _max_blocks(batch, policy.sel_block_size)
    width = ceil_div(max_blocks, 16) * 16
    length = batch.decode_query_len
    per_request = length * num_heads * width
    step = max(min(_SCRATCH_ELEMENTS // per_request, batch.num_decodes, MOST_ROWS), 1)
    logits = workspace(q.device, "logits", step * per_request, torch.float32)
    config = logits_config(
        requests=step,
        num_kv_heads=heads,
        group=group,
        head_dim=dim,
        queries=length,
        cells=_cells(policy),
        num_sms=multiprocessors(q.device),
    )
    chunks = min(ceil_div(max_blocks, config.block_n), config.splits)
    for first in range(0, batch.num_decodes, step):
        requests = min(step, batch.num_decodes - first)
        decode_logits_kernel[(chunks, heads, requests)](
            logits,
            q,
            k_summary,
            batch.block_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            qk_scale,
            batch.block_table.shape[1],
            policy.dense_below,
            first,
            num_heads * width,
            width,
            *q.stride()[:2],
            *k_summary.stride()[:3],
            batch.block_table.stride(0),
            NUM_KV_HEADS=heads,
            GROUP=group,
            QUERY_LEN=length,
            HEAD_DIM=dim,
            BLOCK_D=next_power_of_2(dim),
            BLOCK_H=config.block_h,
            BLOCK_M=config.block_m,
            BLOCK_B=config.block_n,
            PAGE_SIZE=page_size,
            SEL_BLOCK=policy.sel_block_size,
            SINK_BLOCKS=policy.sink_blocks,
            REACH_BLOCKS=policy.reach_blocks,
            SCORED_BLOCKS=policy.scored_blocks,
            MIN_MAX=policy.score_kind == "min_max",
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
            **overlap_options(q.device),
        )
        _top_blocks(
            out,
            logits,
            None,
            batch,
            policy,
            (requests * length, heads),
            first * length,
            0,
            (num_heads * width, group * width, width),
            group,
            max_blocks,
        )


def _top_blocks(
    out: torch.Tensor,
    scores: torch.Tensor,
    tiles: torch.Tensor | None,
    batch: PagedBatch,
    policy: SelectionPolicy,
    grid: tuple[int, int],
    first_tile: int,
    out_tile: int,
    strides: tuple[int, int, int],
    group: int,
    max_blocks: int,
) -> None:
    top_blocks_kernel[grid](
        out,
        scores,
        batch.seq_lens if tiles is None else tiles,
        batch.seq_lens,
        batch.cu_seqlens_q,
        policy.dense_below,
        first_tile,
        out_tile,
        *out.stride()[:2],
        *strides,
        FROM_TABLE=tiles is not None,
        TILES_PER_REQUEST=1 if tiles is not None else batch.decode_query_len,
        POLICY_TILE=1 if tiles is None else policy.query_tile,
        GROUP=group,
        SEL_BLOCK=policy.sel_block_size,
        SINK_BLOCKS=policy.sink_blocks,
        REACH_BLOCKS=policy.reach_blocks,
        SCORED_BLOCKS=policy.scored_blocks,
        MAX_BLOCKS=next_power_of_2(max(max_blocks, 16)),
        num_warps=top_warps(max_blocks),
        **overlap_options(out.device),
    )


def _select_tokens(
    out: torch.Tensor,
    q: torch.Tensor,
    k_summary: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    qk_scale: float,
    page_size: int,
) -> None:
    """Blocks of prefills whose tiles are single tokens: each is scored as if it were decoded."""
    first = batch.first_row + batch.num_decode_tokens
    step = rows_per_step(batch.block_table.shape[1])
    for begin in range(first, q.shape[0], step):
        end = min(begin + step, q.shape[0])
        rows = out[batch.num_decode_tokens + begin - first :]
        tokens = batch.by_token(begin, end)
        _select_decodes(rows, q[begin:end], k_summary, tokens, policy, qk_scale, page_size)


def _select_tiles(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    tiles: torch.Tensor,
    qk_scale: float,
) -> None:
    heads = k_cache.shape[1]
    group = q.shape[1] // heads
    max_blocks = _max_blocks(batch, policy.sel_block_size)
    width = ceil_div(max_blocks, 16) * 16
    count = tiles.shape[0]
    step = max(min(_SCRATCH_ELEMENTS // (heads * width), count), 1)
    scores = workspace(q.device, "scores", step * heads * width, torch.float32)
    for first in range(0, count, step):
        here = min(step, count - first)
        score_tiles(scores, q, k_cache, batch, policy, tiles, qk_scale, first, here, width)
        _top_blocks(
            out,
            scores,
            tiles,
            batch,
            policy,
            (here, heads),
            first,
            batch.num_decode_tokens,
            (heads * width, width, 0),
            group,
            max_blocks,
        )
