"""Launching block selection: by summaries, and for tiles then by exact masses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from triton import knobs

from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.checks import given_summary
from sparsek_kernels.paged.config import logits_config, next_power_of_2, top_warps
from sparsek_kernels.paged.kernels.select import top_blocks_kernel
from sparsek_kernels.paged.kernels.sketch_logits import decode_logits_kernel
from sparsek_kernels.paged.launch.infllm import averages, block_scores
from sparsek_kernels.paged.launch.rank import rank_blocks, tiles_ranked
from sparsek_kernels.paged.launch.scores import score_tiles
from sparsek_kernels.paged.launch.scratch import (
    MOST_ROWS,
    overlap_options,
    rows_per_step,
    workspace,
)
from sparsek_kernels.paged.launch.seer import gate_logits
from sparsek_kernels.paged.launch.selection import Selection, Step
from sparsek_kernels.paged.launch.tiles import prefill_tiles
from sparsek_kernels.paged.lists import listed_blocks
from sparsek_kernels.paged.plan import first_sparse
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div
from sparsek_kernels.paged.seer.gates import Gates
from sparsek_kernels.paged.sketch import VECTOR_SIZE, rotation_size

_SCRATCH_ELEMENTS = 1 << 24
"""Most float32 elements (64 MiB) of one scratch tensor of scores; larger steps go in batches."""


def select_blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    k_summary: torch.Tensor | None,
    softmax_scale: float,
    k_scale: float = 1.0,
    lists: torch.Tensor | None = None,
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None,
    gates: Gates | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selected blocks of the decodes, and of the prefills; -1 where a tile sees everything.

    Prefills follow ``lists`` where they are given (``block_lists``), else scores.  ``largest`` is
    that of :class:`Selection`.

    Returns:
        ``[decode tokens, Hkv, scored_blocks of policy.per_token()]`` and
        ``[prefill tiles, Hkv, scored_blocks of policy]``, int32.  Row ``t`` of the decodes is query
        token ``t``; the prefills' tiles stand in the order of ``prefill_tiles``.
    """
    heads, page_size = k_cache.shape[1:3]
    longest = max(batch.max_seq_len, batch.block_table.shape[1] * page_size)

    def selects(rule: SelectionPolicy) -> bool:
        return rule.scored_blocks > 0 and not rule.sees_all(longest - 1)

    def rows(count: int, rule: SelectionPolicy) -> torch.Tensor:
        shape = (count, heads, rule.scored_blocks)
        if count and not selects(rule):  # one row for all: it may be longer than any context
            return q.new_full((1, 1, rule.scored_blocks), -1, dtype=torch.int32).expand(shape)
        return torch.empty(shape, dtype=torch.int32, device=q.device)

    single = policy.per_token()
    decodes = rows(batch.num_decode_tokens, single)
    scale = softmax_scale * k_scale * LOG2E.value
    call = Selection(
        decodes,
        q,
        k_cache,
        k_summary,
        batch,
        single,
        scale,
        largest=largest,
        gates=gates,
    )
    if batch.num_decodes and selects(single):
        _select_decodes(call)
    if not batch.num_prefills:
        return decodes, rows(0, policy)
    tiles = prefill_tiles(batch, policy.query_tile, q.shape[0])
    if lists is not None:
        return decodes, listed_blocks(lists, tiles[:, 1], policy)
    prefills = rows(tiles.shape[0], policy)
    if selects(policy):
        call = replace(call, out=prefills, policy=policy, tiles=tiles)
        if policy.query_tile == 1:
            _select_tokens(call)
        else:
            _select_tiles(call, tiles)
    return decodes, prefills


def _select_decodes(call: Selection) -> None:
    """Blocks of single tokens: logits of the sketch or gates, or InfLLM-v2's scores; the best."""
    batch, num_heads, length = call.batch, call.q.shape[1], call.batch.decode_query_len
    as_trained = call.policy.ranking == "infllm"
    most = length * num_heads * (averages(call) if as_trained else call.width)
    requests = max(min(_SCRATCH_ELEMENTS // most, batch.num_decodes, MOST_ROWS // length), 1)
    for first in range(0, batch.num_decodes, requests):
        here = min(requests, batch.num_decodes - first)
        step = Step(first * length, here * length)
        # As large for the last requests as for the others, since its size decides what is compiled.
        if as_trained:
            scores = block_scores(call, step, requests * length)
            strides = (call.heads * call.width, call.width, 0)
        elif call.gates is not None:
            scores = gate_logits(call, step, requests * length)
            strides = (call.heads * call.width, call.width, 0)
        else:
            scores = _decode_logits(call, first, here, requests)
            strides = (num_heads * call.width, call.group * call.width, call.width)
        _top_blocks(call, step, call.out, scores, strides)


def _decode_logits(call: Selection, first: int, count: int, most: int) -> torch.Tensor:
    """Logits ``[count * decode_query_len, Hq, width]`` of some requests' tokens, flat."""
    q, batch, policy = call.q, call.batch, call.policy
    k_summary = given_summary(call.k_summary)
    num_heads, dim = q.shape[1:]
    length = batch.decode_query_len
    numel = most * length * num_heads * call.width
    logits = workspace(q.device, "logits", numel, torch.float32)
    config = logits_config(
        requests=most,
        num_kv_heads=call.heads,
        group=call.group,
        head_dim=dim,
        queries=length,
        vectors=policy.sel_block_size // VECTOR_SIZE,
        num_sms=multiprocessors(q.device),
    )
    chunks = min(ceil_div(call.max_blocks, config.block_n), config.splits)
    run(
        decode_logits_kernel,
        (chunks, call.heads, count),
        logits,
        q,
        k_summary,
        batch.block_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        call.qk_scale,
        batch.block_table.shape[1],
        policy.dense_below,
        first,
        num_heads * call.width,
        call.width,
        *q.stride()[:2],
        *k_summary.stride()[:2],
        batch.block_table.stride(0),
        GROUP=call.group,
        QUERY_LEN=length,
        HEAD_DIM=dim,
        ROTATION=rotation_size(dim),
        BLOCK_D=max(next_power_of_2(dim), 64),
        BLOCK_H=config.block_h,
        BLOCK_M=config.block_m,
        BLOCK_B=config.block_n,
        PAGE_SIZE=call.k_cache.shape[2],
        SEL_BLOCK=policy.sel_block_size,
        VECTOR=VECTOR_SIZE,
        SINK_BLOCKS=policy.sink_blocks,
        REACH_BLOCKS=policy.reach_blocks,
        SCORED_BLOCKS=policy.scored_blocks,
        NUM_STAGES=config.num_stages,
        ASM=not knobs.runtime.interpret and torch.version.hip is None,
        SHARDED=call.largest is not None,
        num_warps=config.num_warps,
        **overlap_options(q.device),
    )
    return call.complete(logits, count * length * num_heads * call.width)


def _top_blocks(
    call: Selection, step: Step, out: torch.Tensor, scores: torch.Tensor, strides: tuple[int, ...]
) -> None:
    """Write the best blocks of a step's tiles: of single tokens the selection, else candidates.

    Args:
        out: ``[tiles, Hkv, blocks]`` int32, rows as :func:`top_blocks_kernel` says.
        scores: of logits or summed probabilities, from tile ``step.first`` on.
        strides: of ``scores``, from tile to tile, KV head and query head.
    """
    batch, policy = call.batch, call.policy
    # No row of a shorter sequence is sorted, so its batch needs no kernel of its own.
    blocks = max(call.max_blocks, _fewest_blocks(policy), 16)
    warps, registers = top_warps(blocks)
    run(
        top_blocks_kernel,
        (step.count, call.heads),
        out,
        scores,
        batch.seq_lens if call.tiles is None else call.tiles,
        batch.seq_lens,
        batch.cu_seqlens_q,
        policy.dense_below,
        step.first,
        call.width,
        *out.stride()[:2],
        *strides,
        FROM_LOGITS=call.tiles is None and policy.ranking != "infllm",
        COUNT=out.shape[2],
        MAX_BLOCKS=next_power_of_2(blocks),
        num_warps=warps,
        maxnreg=registers,
        **call.tile_keys(),
        **overlap_options(scores.device),
    )


@lru_cache(maxsize=256)
def _fewest_blocks(policy: SelectionPolicy) -> int:
    """Blocks of the shortest sequence of which some are chosen."""
    return first_sparse(policy, 0, 1 << 31) // policy.sel_block_size + 1


def _select_tokens(call: Selection) -> None:
    """Blocks of prefills whose tiles are single tokens: each is scored as if it were decoded."""
    batch = call.batch
    first = batch.first_row + batch.num_decode_tokens
    step = rows_per_step(batch.block_table.shape[1])
    for begin in range(first, call.q.shape[0], step):
        end = min(begin + step, call.q.shape[0])
        rows, tokens = call.out[begin - first :], batch.by_token(begin, end)
        _select_decodes(replace(call, out=rows, q=call.q[begin:end], batch=tokens, tiles=None))


def _select_tiles(call: Selection, tiles: torch.Tensor) -> None:
    """Blocks of prefill tiles: scores by summaries, candidates, ranks."""
    q, k_cache, batch, policy, heads = call.q, call.k_cache, call.batch, call.policy, call.heads
    width = call.width
    scored = max(min(_SCRATCH_ELEMENTS // (heads * width), tiles.shape[0]), 1)
    ranked = tiles_ranked(call, _SCRATCH_ELEMENTS)
    scores = workspace(q.device, "scores", scored * heads * width, torch.float32)
    for first in range(0, tiles.shape[0], scored):
        end = min(first + scored, tiles.shape[0])
        score_tiles(
            scores, q, k_cache, batch, policy, tiles, call.qk_scale, first, end - first, width
        )
        for begin in range(first, end, ranked):
            step = Step(begin, min(ranked, end - begin))
            mine = scores[(begin - first) * heads * width :]
            shape = (step.count, heads, policy.listed_blocks)
            numel = math.prod(shape)
            candidates = workspace(q.device, "candidates", numel, torch.int32)[:numel].view(shape)
            _top_blocks(call, step, candidates, mine, (heads * width, width, 0))
            rank_blocks(call, step, candidates)
