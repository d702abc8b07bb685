"""Launching the logits of single tokens over the quantised key means."""

from __future__ import annotations

import torch
from triton import knobs

from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.config import next_power_of_2
from sparsek_kernels.paged.index.key_means.config import logits_config
from sparsek_kernels.paged.index.key_means.kernels.logits import decode_logits_kernel
from sparsek_kernels.paged.index.key_means.sketch import VECTOR_SIZE, rotation_size
from sparsek_kernels.paged.index.launch import Scores, select_tokens
from sparsek_kernels.paged.index.problem import Selection, Step
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import ceil_div
from sparsek_kernels.paged.scratch import overlap_options, workspace


def select(operands: PagedOperands, segment: Segment) -> torch.Tensor:
    """Triton form of :meth:`KeyMeans.select`."""
    return select_tokens(operands, segment, _logits, lambda call: call.q.shape[1] * call.width)


def _logits(call: Selection, step: Step, most: int) -> Scores:
    """Logits ``[step.count, Hq, width]`` of a step's tokens."""
    q, batch, policy = call.q, call.batch, call.policy
    k_summary = call.operands.summary
    num_heads, dim = q.shape[1:]
    length = batch.decode_query_len
    requests = most // length
    logits = workspace(q.device, "logits", most * num_heads * call.width, torch.float32)
    config = logits_config(
        requests=requests,
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
        (chunks, call.heads, step.count // length),
        logits,
        q,
        k_summary,
        batch.block_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        call.qk_scale,
        batch.block_table.shape[1],
        policy.dense_below,
        step.first // length,
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
        PAGE_SIZE=call.operands.page_size,
        VECTOR=VECTOR_SIZE,
        NUM_STAGES=config.num_stages,
        ASM=not knobs.runtime.interpret and torch.version.hip is None,
        SHARDED=call.operands.ranks is not None,
        num_warps=config.num_warps,
        **call.rule(),
        **overlap_options(q.device),
    )
    values = call.complete(logits, step.count * num_heads * call.width)
    strides = (num_heads * call.width, call.group * call.width, call.width)
    return Scores(values, strides, logit_rows=call.group)
