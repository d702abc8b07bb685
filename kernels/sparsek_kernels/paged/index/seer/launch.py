"""Launching SeerAttention-R's gates: gate keys of blocks, and logits of single tokens."""

from __future__ import annotations

import torch

from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.common.operators import pointers
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.config import next_power_of_2
from sparsek_kernels.paged.index.launch import Scores, select_tokens
from sparsek_kernels.paged.index.problem import Selection, Step
from sparsek_kernels.paged.index.seer.gates import NORM_EPS, Gates, view_gate_keys
from sparsek_kernels.paged.index.seer.kernels.gates import (
    gate_logits_kernel,
    gate_queries_kernel,
    write_gate_keys_kernel,
)
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import ceil_div
from sparsek_kernels.paged.scratch import workspace

_COLUMNS = 16
"""Channels of queries and keys that are multiplied at a time."""
_BLOCKS = 32
"""Gate keys that one program reads at a time."""


def write_gate_keys(
    k_cache: torch.Tensor, k_summary: torch.Tensor, batch: PagedBatch, size: int, gates: Gates
) -> None:
    """Triton form of :meth:`Seer.write`, for blocks of ``size``."""
    _, heads, page_size, dim = k_cache.shape
    kept, rotation = view_gate_keys(k_summary, page_size, size, dim), batch.rotation
    for part, most_tokens in batch.phases():
        run(
            write_gate_keys_kernel, (ceil_div(most_tokens, size), heads, part.num_requests),
            kept, k_cache, gates.key, *pointers(gates.key, gates.key_norm, rotation),
            part.block_table, part.seq_lens, part.cu_seqlens_q,
            0 if rotation is None else rotation.shape[0],
            *kept.stride()[:2], *k_cache.stride()[:3], part.block_table.stride(0),
            HEAD_DIM=dim, BLOCK_D=next_power_of_2(dim), COLUMNS=_COLUMNS, PAGE_SIZE=page_size,
            SEL_BLOCK=size, NORM=gates.key_norm is not None, NORM_EPS=NORM_EPS,
            TURN=rotation is not None, num_warps=4,
        )  # fmt: skip


def select(operands: PagedOperands, segment: Segment, gates: Gates) -> torch.Tensor:
    """Triton form of :meth:`Seer.select`."""
    return select_tokens(
        operands,
        segment,
        lambda call, step, most: gate_logits(call, step, most, gates),
        lambda call: call.q.shape[1] * call.width,
    )


def gate_logits(call: Selection, step: Step, most: int, gates: Gates) -> Scores:
    """Base-2 logits ``[step.count, Hkv, call.width]`` of a step's tokens; room is for ``most``."""
    q, batch, policy, heads = call.q, call.batch, call.policy, call.heads
    page_size, dim = call.k_cache.shape[2], q.shape[2]
    kept = view_gate_keys(call.operands.summary, page_size, policy.sel_block_size, dim)
    queries = workspace(q.device, "gate queries", most * heads * dim, torch.float32)
    logits = workspace(q.device, "gate logits", most * heads * call.width, torch.float32)
    shape: dict[str, int] = {
        "TOKENS_PER_REQUEST": batch.decode_query_len,
        "HEAD_DIM": dim,
        "BLOCK_D": next_power_of_2(dim),
        "num_warps": 4,
        **call.rule(),
    }
    run(
        gate_queries_kernel, (step.count, heads),
        queries, q, gates.query, *pointers(gates.query, gates.query_norm, batch.rotation),
        batch.seq_lens, batch.cu_seqlens_q, policy.dense_below, step.first,
        0 if batch.rotation is None else batch.rotation.shape[0], *q.stride()[:2],
        GROUP=call.group, COLUMNS=_COLUMNS, NORM=gates.query_norm is not None, NORM_EPS=NORM_EPS,
        TURN=batch.rotation is not None, **shape,
    )  # fmt: skip
    programs = max(4 * multiprocessors(q.device) // (most * heads), 1)
    run(
        gate_logits_kernel, (min(ceil_div(call.max_blocks, _BLOCKS), programs), heads, step.count),
        logits, queries, kept, batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
        dim**-0.5 * LOG2E.value, policy.dense_below, step.first,
        heads * call.width, call.width, *kept.stride()[:2], batch.block_table.stride(0),
        BLOCK_N=_BLOCKS, PAGE_SIZE=page_size, **shape,
    )  # fmt: skip
    return Scores(logits, (heads * call.width, call.width, 0), logit_rows=1)
