"""Backward launches of attention inside chosen blocks: parts by block, then their sums."""

from __future__ import annotations

from typing import Any

import torch
import triton

from sparsek_kernels.common.descriptors import tile_layout
from sparsek_kernels.nsa.config import LaunchConfig
from sparsek_kernels.nsa.selected.kernels.bwd import (
    nsa_selected_bwd_dkdv_kernel,
    nsa_selected_bwd_dq_kernel,
    nsa_selected_bwd_part_kernel,
)
from sparsek_kernels.nsa.selected.kernels.bwd_sm90 import nsa_selected_hopper_bwd_part_kernel
from sparsek_kernels.nsa.selected.problem import SelectedCall
from sparsek_kernels.sink_window.launch import row_dots


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sel_block_size: int,
    scale: float,
    config: LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v; bitwise reproducible."""
    delta = row_dots(dout, dlse, out)
    return backward_rows(
        dout, lse, delta, None, q, k, v, block_indices, cu_seqlens, sel_block_size, scale, config
    )


def backward_rows(
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq_acc: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sel_block_size: int,
    scale: float,
    config: LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`backward`, with ``delta [B, Hq, N]`` at hand.

    ``dq_acc [B, Hq, N, D]``, fp32 and unscaled, is added to the gradient of q.
    """
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    if q.numel() == 0 or block_indices.numel() == 0:
        return dq.zero_(), dk.to(k.dtype), dv.to(v.dtype)
    call = SelectedCall(q, k, block_indices, cu_seqlens, sel_block_size, config)
    shape, tile = call.shape, call.config.selected_bwd
    index = call.index(call.config.chunk_rows_bwd, call.config.item_entries_bwd)
    slots = index.chunk_rows * shape.num_kv_heads * call.slots
    dq_part = torch.empty((slots, shape.group, shape.head_dim), dtype=q.dtype, device=q.device)
    parts = torch.empty(
        (2, index.chunk_items, call.block_n, shape.head_dim), dtype=torch.float32, device=q.device
    )
    block_t = call.rows_to_tokens(32)
    strides = (*dout.stride(), *q.stride(), *k.stride(), *v.stride())
    options = {**call.item_options(tile), "ROWS_FIRST": tile.block_m >= 128}
    part_kernel: Any = nsa_selected_bwd_part_kernel
    hopper = call.hopper_tile(call.config.selected_bwd_hopper, dout, q, k, v)
    if hopper is not None:
        tile, strides = hopper
        options = call.hopper_options(tile, 12)
        options["DS_LAYOUT"] = tile_layout(sel_block_size, tile.block_m, q.dtype)
        part_kernel = nsa_selected_hopper_bwd_part_kernel
    for chunk in call.launches(index):
        first_row, num_rows = chunk.first_row, chunk.num_rows
        part_kernel[(chunk.items,)](
            parts[0],
            parts[1],
            dq_part,
            dout,
            q,
            k,
            v,
            lse,
            delta,
            *call.item_inputs(index),
            scale,
            *strides,
            *call.item_sizes(index, chunk),
            **options,
        )
        nsa_selected_bwd_dq_kernel[(triton.cdiv(num_rows, block_t), shape.num_kv_heads)](
            dq,
            dq_part,
            dq if dq_acc is None else dq_acc,
            call.indices,
            scale,
            first_row,
            num_rows,
            shape.num_q,
            shape.num_kv_heads,
            **call.heads,
            ADDED=dq_acc is not None,
            BLOCK_T=block_t,
            num_warps=4,
        )
        nsa_selected_bwd_dkdv_kernel[(index.num_blocks, shape.num_kv_heads)](
            dk,
            dv,
            parts[0],
            parts[1],
            index.item_offsets,
            index.block_seq,
            index.cu_blocks,
            call.cu,
            chunk.first_key,
            index.num_blocks,
            shape.num_kv_heads,
            shape.num_k,
            HEAD_DIM=shape.head_dim,
            SEL_BLOCK=sel_block_size,
            VARLEN=call.varlen,
            BLOCK_N=call.block_n,
            BLOCK_D=shape.padded_dim,
            num_warps=8,
        )
    return dq, dk.to(k.dtype), dv.to(v.dtype)
