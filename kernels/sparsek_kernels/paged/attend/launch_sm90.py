"""Launching the Hopper kernel of prefills: what it takes, tensor descriptors, persistent grid."""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsek_kernels.common.alignment import MOST_COLUMNS, columns_of, copyable
from sparsek_kernels.common.descriptors import describe_matrix
from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.attend.kernels.fwd_sm90 import attend_hopper_kernel
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.cache_sm90 import BOX, describe_cache, is_matrix, tensor_cores_take
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div


def attend_fits(operands: PagedOperands, policy: SelectionPolicy) -> bool:
    """Whether the Hopper kernel can attend a step's prefills, if there are enough of them."""
    q, k_cache, v_cache, out = operands.q, operands.k_cache, operands.v_cache, operands.out
    return (
        tensor_cores_take(q, k_cache, k_cache.shape[2])
        and q.shape[1] >= 2 * k_cache.shape[1]
        and policy.selects_blocks
        and policy.sel_block_size == BOX
        and policy.query_tile % BOX == 0
        and copyable(v_cache, out)
        and max(columns_of(q), columns_of(out)) <= MOST_COLUMNS
        and is_matrix(k_cache)
        and is_matrix(v_cache)
    )


def _describe_rows(x: torch.Tensor) -> TensorDescriptor:
    """Boxes of the queries, or of the output."""
    return describe_matrix(x, (x.shape[0], columns_of(x)), x.stride(0), (BOX, BOX))


def attend_hopper(
    operands: PagedOperands,
    batch: PagedBatch,
    policy: SelectionPolicy,
    selected: torch.Tensor,
    tiles: torch.Tensor,
) -> None:
    """Attend the prefills of a batch over their selected blocks (see :func:`attend_fits`)."""
    q, k_cache, v_cache, out = operands.q, operands.k_cache, operands.v_cache, operands.out
    sinks = operands.sinks
    heads, page_size, dim = k_cache.shape[1:]
    group = q.shape[1] // heads
    num_sms = multiprocessors(q.device)
    items = tiles.shape[0] * (policy.query_tile // BOX) * ceil_div(group, 2) * heads
    k_desc, *k_distances = describe_cache(k_cache)
    v_desc, *v_distances = describe_cache(v_cache)
    run(
        attend_hopper_kernel, (min(items, num_sms),),
        out, _describe_rows(out), _describe_rows(q), k_desc, v_desc,
        q if sinks is None else sinks, selected, tiles, batch.block_table, batch.seq_lens,
        batch.cu_seqlens_q,
        operands.softmax_scale * operands.k_scale * LOG2E.value, operands.v_scale,
        policy.dense_below, tiles.shape[0], items,
        *out.stride()[:2], *selected.stride()[:2], batch.block_table.stride(0), q.stride(1),
        *k_distances, *v_distances,
        GROUP=group, HEAD_DIM=dim, TILE=policy.query_tile, SINK_BLOCKS=policy.sink_blocks,
        REACH_BLOCKS=policy.reach_blocks, SCORED_BLOCKS=policy.shallow_blocks, GROWTH=policy.growth,
        PAGE_SIZE=page_size, HAS_SINKS=sinks is not None, K_STAGES=256 // dim,
        V_STAGES=256 // dim + 1, num_warps=4,
    )  # fmt: skip
