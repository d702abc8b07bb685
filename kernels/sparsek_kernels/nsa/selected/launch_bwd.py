"""Backward launches of selected attention: parts by block, then their sums."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.common.descriptors import tile_layout
from sparsek_kernels.common.operators import new_like, pointers
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.row_dots import row_dots
from sparsek_kernels.common.shapes import cdiv, octet_strides
from sparsek_kernels.nsa.selected.index import merge_selection, sort_selection
from sparsek_kernels.nsa.selected.kernels.bwd import (
    nsa_selected_bwd_dkdv_kernel,
    nsa_selected_bwd_dq_kernel,
    nsa_selected_bwd_part_kernel,
)
from sparsek_kernels.nsa.selected.kernels.bwd_sm90 import nsa_selected_hopper_bwd_part_kernel
from sparsek_kernels.nsa.selected.plan import LaunchPlan
from sparsek_kernels.nsa.selected.problem import SelectedProblem

_REGISTERS = 168  # of a thread in the Hopper kernel: one program fills a multiprocessor
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def backward(
    problem: SelectedProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Gradients:
    """Gradients of q, k and v; bitwise reproducible."""
    return backward_rows(problem, dout, lse, row_dots(dout, dlse, out))


def backward_rows(
    problem: SelectedProblem,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq_acc: torch.Tensor | None = None,
) -> Gradients:
    """Gradients of q, k and v from ``delta [B, Hq, N]``, the row sums of ``out * dout`` less dlse.

    ``dq_acc [B, Hq, N, D]``, fp32 and unscaled, is added to the gradient of q.
    """
    q, k, v = problem.q, problem.k, problem.v
    dq, dk, dv = (new_like(x) for x in (q, k, v))
    if q.numel() == 0 or problem.block_indices.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    shape, config = problem.shape, problem.config
    kept = problem.index
    if kept is None or config.token_major:
        kept = problem.new_index()
        sort_selection(problem, kept)
    index = merge_selection(problem, kept)
    plan = LaunchPlan(problem, index)
    sums: tuple[torch.Tensor, ...] | torch.Tensor = (dk, dv)
    if index.num_chunks > 1:
        sums = torch.empty((2, *k.shape), dtype=torch.float32, device=k.device)
    dq_part = torch.empty(plan.part_shape, dtype=q.dtype, device=q.device)
    size = (2, index.chunk_items, problem.block_n, shape.head_dim)
    dk_part, dv_part = torch.empty(size, dtype=torch.float32, device=q.device)
    block_t = problem.tile_tokens(32)
    part_kernel: Any = nsa_selected_bwd_part_kernel
    strides = (*dout.stride(), *q.stride(), *k.stride(), *v.stride())
    options = plan.portable_options(config.selected_bwd)
    sm90 = problem.sm90_tile(config.selected_bwd_hopper, dout, q, k, v)
    if sm90 is not None:
        part_kernel = nsa_selected_hopper_bwd_part_kernel
        strides = octet_strides(dout, q, k, v)
        options = {
            **plan.sm90_options(sm90, _REGISTERS),
            "BLOCK_G": shape.padded_group,
            "DS_LAYOUT": tile_layout(problem.sel_block_size, sm90.block_m, q.dtype),
        }
    for number, chunk in enumerate(plan.chunks(), 1):
        run(
            part_kernel, (chunk.items,),
            dk_part, dv_part, dq_part, dout, q, k, v, lse, delta, *plan.item_tensors,
            problem.softmax_scale,
            *strides, *plan.item_sizes(chunk),
            **options,
        )  # fmt: skip
        run(
            nsa_selected_bwd_dq_kernel, (cdiv(chunk.num_rows, block_t), shape.num_kv_heads),
            dq, dq_part, dq if dq_acc is None else dq_acc, problem.block_indices,
            problem.softmax_scale, chunk.first_row, chunk.num_rows, shape.num_q, shape.num_kv_heads,
            GROUP=shape.group, TOP_N=problem.top_n, HEAD_DIM=shape.head_dim,
            ADDED=dq_acc is not None, BLOCK_T=block_t, BLOCK_G=shape.padded_group,
            BLOCK_D=shape.padded_dim, num_warps=4,
        )  # fmt: skip
        run(
            nsa_selected_bwd_dkdv_kernel, (index.num_blocks, shape.num_kv_heads),
            dk, dv, *sums, dk_part, dv_part, index.entry_offsets, index.block_seq,
            *pointers(problem.q, problem.cu_seqlens), chunk.first_key, index.num_blocks,
            shape.num_kv_heads, shape.num_k, index.item_entries,
            HEAD_DIM=shape.head_dim, SEL_BLOCK=problem.sel_block_size,
            VARLEN=problem.cu_seqlens is not None, FIRST=number == 1,
            LAST=number == index.num_chunks, BLOCK_N=problem.block_n, BLOCK_D=shape.padded_dim,
            num_warps=8,
        )  # fmt: skip
    return dq, dk, dv
