"""Launching InfLLM-v2's scores of single tokens, and the means that they are made of."""

from __future__ import annotations

import torch

from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.operators import pointers
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.config import next_power_of_2
from sparsek_kernels.paged.index.infllm.kernels.means import write_means_kernel
from sparsek_kernels.paged.index.infllm.kernels.scores import (
    average_logits_kernel,
    block_scores_kernel,
)
from sparsek_kernels.paged.index.infllm.means import view_means
from sparsek_kernels.paged.index.launch import Scores, select_tokens
from sparsek_kernels.paged.index.problem import Selection, Step
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import CELL_SIZE, ceil_div
from sparsek_kernels.paged.scratch import overlap_options, workspace

_SCORES = 512
"""Shares of averages that one program adds up at a time."""


def write_means(k_cache: torch.Tensor, k_summary: torch.Tensor, batch: PagedBatch) -> None:
    """Triton form of :meth:`InfLLM.write`."""
    _, heads, page_size, dim = k_cache.shape
    means, rotation = view_means(k_summary, page_size, dim), batch.rotation
    for part, most_tokens in batch.phases():
        run(
            write_means_kernel, (ceil_div(most_tokens, CELL_SIZE), heads, part.num_requests),
            means, k_cache, *pointers(k_cache, rotation),
            part.block_table, part.seq_lens, part.cu_seqlens_q,
            0 if rotation is None else rotation.shape[0],
            *means.stride()[:2], *k_cache.stride()[:3], part.block_table.stride(0),
            HEAD_DIM=dim, BLOCK_D=next_power_of_2(dim), PAGE_SIZE=page_size, CELL=CELL_SIZE,
            TURN_BACK=rotation is not None, num_warps=4,
        )  # fmt: skip


def select(operands: PagedOperands, segment: Segment) -> torch.Tensor:
    """Triton form of :meth:`InfLLM.select`."""
    return select_tokens(
        operands, segment, block_scores, lambda call: call.q.shape[1] * averages(call)
    )


def averages(call: Selection) -> int:
    """Averages of the longest sequence that the batch may hold, aligned as its blocks are."""
    return call.width * (call.policy.sel_block_size // CELL_SIZE)


def block_scores(call: Selection, step: Step, most: int) -> Scores:
    """Scores ``[step.count, Hkv, call.width]`` of a step's tokens, with room for ``most``."""
    q, batch, policy = call.q, call.batch, call.policy
    page_size = call.k_cache.shape[2]
    num_heads, dim = q.shape[1:]
    width = averages(call)
    means = view_means(call.operands.summary, page_size, dim)
    block_n = 64 if dim <= 128 else 32
    # About three programs on each multiprocessor, as means on the way (twice 16 KiB in two stages)
    # leave room for.
    programs = max(3 * multiprocessors(q.device) // (most * call.heads), 1)
    shares = min(ceil_div(width, block_n), programs)
    logits = workspace(q.device, "averages", most * num_heads * width, torch.float32)
    lse = workspace(q.device, "shares of averages", most * num_heads * shares, torch.float32)
    rule = {
        "TOKENS_PER_REQUEST": batch.decode_query_len,
        "GROUP": call.group,
        "BLOCK_N": block_n,
        "CELL": CELL_SIZE,
        "num_warps": 4,
        **call.rule(),
        **overlap_options(q.device),
    }
    turned = batch.rotation is not None
    run(
        average_logits_kernel, (shares, call.heads, step.count),
        logits, lse, q, means, *pointers(q, batch.rotation),
        batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
        0.5 * call.qk_scale, policy.dense_below, step.first,
        0 if batch.rotation is None else batch.rotation.shape[0],
        num_heads * width, width,
        *q.stride()[:2], *means.stride()[:2], batch.block_table.stride(0),
        HEAD_DIM=dim, BLOCK_D=max(next_power_of_2(dim), 16),
        BLOCK_M=max(next_power_of_2(call.group), 16), PAGE_SIZE=page_size, TURN_BACK=turned,
        TWO_TERMS=turned or q.dtype != torch.bfloat16, NUM_STAGES=2, **rule,
    )  # fmt: skip
    scores = workspace(q.device, "scores", most * call.heads * call.width, torch.float32)
    per_block = next_power_of_2(policy.sel_block_size // CELL_SIZE + 1)
    block_b = max(_SCORES // per_block, 1)
    run(
        block_scores_kernel, (ceil_div(call.max_blocks, block_b), call.heads, step.count),
        scores, logits, lse, batch.seq_lens, batch.cu_seqlens_q,
        policy.dense_below, step.first, shares,
        call.heads * call.width, call.width, num_heads * width, width,
        BLOCK_B=block_b, BLOCK_S=next_power_of_2(shares), **rule,
    )  # fmt: skip
    return Scores(scores, (call.heads * call.width, call.width, 0))
