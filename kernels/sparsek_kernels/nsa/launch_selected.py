"""Launches of attention inside chosen blocks: token-major or block-major, and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from sparsek_kernels.nsa.config import LaunchConfig, TileConfig
from sparsek_kernels.nsa.index import InverseIndex, build_index
from sparsek_kernels.nsa.kernels_selected import (
    nsa_selected_combine_kernel,
    nsa_selected_part_kernel,
)
from sparsek_kernels.nsa.kernels_selected_bwd import (
    nsa_selected_bwd_dkdv_kernel,
    nsa_selected_bwd_dq_kernel,
    nsa_selected_bwd_part_kernel,
)
from sparsek_kernels.nsa.kernels_selected_tokens import nsa_selected_tokens_kernel
from sparsek_kernels.nsa.launch_common import launch_config, problem_shape, tile_grid
from sparsek_kernels.sink_window.launch import row_dots

MAX_SEL_BLOCK = 128
"""Largest selection block that the kernels hold on chip."""


class _Call:
    """What the launches of one call share."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        block_indices: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        sel_block_size: int,
        config: LaunchConfig | None,
    ) -> None:
        if sel_block_size > MAX_SEL_BLOCK:
            raise NotImplementedError(
                f"sel_block_size: expected at most {MAX_SEL_BLOCK} on CUDA, got {sel_block_size}; "
                "split each block into smaller ones"
            )
        self.indices = block_indices.contiguous()
        self.slots = block_indices.shape[3]
        self.shape = problem_shape(q, k.shape[2], k.shape[1])
        self.config = config or launch_config(q, self.shape, self.slots)
        self.cu_seqlens = cu_seqlens
        self.cu = q if cu_seqlens is None else cu_seqlens
        self.sel_block_size = sel_block_size
        self.varlen = cu_seqlens is not None
        self.block_n = max(16, triton.next_power_of_2(sel_block_size))
        self.heads = {
            "GROUP": self.shape.group,
            "SLOTS": self.slots,
            "HEAD_DIM": self.shape.head_dim,
            "BLOCK_G": self.shape.padded_group,
            "BLOCK_D": self.shape.padded_dim,
        }

    def rows_to_tokens(self, rows: int) -> int:
        """Tokens in a tile of ``rows`` rows (tokens times padded heads), 16 rows at least."""
        return max(max(rows, 16) // self.shape.padded_group, 1)

    def index(self, far_only: bool = False) -> InverseIndex:
        """The inverse of the selection, or of the part that is not near to its queries."""
        return build_index(
            self.indices,
            self.shape.num_k,
            self.cu_seqlens,
            self.sel_block_size,
            self.config.chunk_rows,
            self.config.item_entries,
            far_only,
        )

    def chunks(self, index: InverseIndex) -> Iterator[tuple[int, int, int]]:
        """``(first row, rows, first key)`` of each chunk."""
        rows = self.shape.batch * self.shape.num_q
        keys = self.shape.num_kv_heads * index.num_blocks
        for chunk in range(index.num_chunks):
            first = chunk * index.chunk_rows
            yield first, min(index.chunk_rows, rows - first), chunk * keys

    def item_inputs(self, index: InverseIndex) -> tuple[torch.Tensor, ...]:
        """Index tensors in the order in which block-major kernels take them."""
        return (
            index.item_keys,
            index.item_offsets,
            index.entries,
            index.entry_rows,
            index.entry_offsets,
            index.block_seq,
            index.cu_blocks,
            self.cu,
        )

    def item_sizes(self, index: InverseIndex, first_row: int, first_key: int) -> tuple[int, ...]:
        """Sizes in the order in which block-major kernels take them."""
        shape = self.shape
        offset = 0 if self.varlen else shape.num_k - shape.num_q
        return (
            first_key,
            shape.num_kv_heads * index.num_blocks,
            first_row * shape.num_kv_heads * self.slots,
            index.num_blocks,
            shape.num_kv_heads,
            shape.num_q,
            shape.num_k,
            offset,
        )

    def item_options(self, index: InverseIndex, tile: TileConfig) -> dict[str, Any]:
        """Compile-time arguments of block-major kernels."""
        return {
            **self.heads,
            "SEL_BLOCK": self.sel_block_size,
            "ITEM": index.item_entries,
            "VARLEN": self.varlen,
            "BLOCK_E": self.rows_to_tokens(tile.block_m),
            "BLOCK_N": self.block_n,
            "PRECISION": self.config.precision,
            "NUM_STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }


def _forward_tokens(
    call: _Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
) -> None:
    shape, tile = call.shape, call.config.tokens
    block_t = call.rows_to_tokens(tile.block_m)
    grid, tiles = tile_grid(call.cu_seqlens, shape.num_q, block_t, shape.num_kv_heads, shape.batch)
    nsa_selected_tokens_kernel[grid](
        out,
        lse,
        q,
        k,
        v,
        call.indices,
        call.cu,
        call.cu if tiles is None else tiles,
        scale,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        shape.num_q,
        shape.num_k,
        0 if call.varlen else shape.num_k - shape.num_q,
        shape.num_kv_heads,
        **call.heads,
        SEL_BLOCK=call.sel_block_size,
        VARLEN=call.varlen,
        BLOCK_T=block_t,
        BLOCK_S=triton.next_power_of_2(call.slots),
        BLOCK_N=call.block_n,
        PRECISION=call.config.precision,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _forward_blocks(
    call: _Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
) -> None:
    shape, tile, merge = call.shape, call.config.selected, call.config.combine
    index = call.index(far_only=True)
    slots = index.chunk_rows * shape.num_kv_heads * call.slots
    part = torch.empty((slots, shape.group, shape.head_dim), dtype=q.dtype, device=q.device)
    part_lse = torch.empty((slots, shape.group), dtype=torch.float32, device=q.device)
    block_t = call.rows_to_tokens(merge.block_m)
    cu_first = call.cu_seqlens
    if cu_first is None and shape.batch > 1:
        cu_first = torch.arange(shape.batch + 1, dtype=torch.int32, device=q.device) * shape.num_q
    for first_row, num_rows, first_key in call.chunks(index):
        nsa_selected_part_kernel[(index.chunk_items,)](
            part,
            part_lse,
            q,
            k,
            v,
            *call.item_inputs(index),
            scale,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *call.item_sizes(index, first_row, first_key),
            **call.item_options(index, tile),
        )
        cu_rows = None if cu_first is None else cu_first.clamp(first_row, first_row + num_rows)
        grid, tiles = tile_grid(cu_rows, num_rows, block_t, shape.num_kv_heads, 1)
        nsa_selected_combine_kernel[grid](
            out,
            lse,
            part,
            part_lse,
            q,
            k,
            v,
            call.indices,
            q if cu_rows is None else cu_rows,
            q if cu_first is None else cu_first,
            q if tiles is None else tiles,
            scale,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            first_row,
            num_rows,
            shape.num_q,
            shape.num_k,
            0 if call.varlen else shape.num_k - shape.num_q,
            shape.num_kv_heads,
            **call.heads,
            SEL_BLOCK=call.sel_block_size,
            MAPPED=cu_first is not None,
            VARLEN=call.varlen,
            BLOCK_T=block_t,
            BLOCK_S=triton.next_power_of_2(call.slots),
            BLOCK_N=call.block_n,
            PRECISION=call.config.precision,
            NUM_STAGES=merge.num_stages,
            num_warps=merge.num_warps,
        )


def forward(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sel_block_size: int,
    scale: float,
    config: LaunchConfig | None = None,
) -> None:
    """Fill contiguous ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]``."""
    if out.numel() == 0:
        return
    if block_indices.shape[3] == 0:
        out.zero_()
        lse.fill_(float("-inf"))
        return
    call = _Call(q, k, block_indices, cu_seqlens, sel_block_size, config)
    design = _forward_tokens if call.config.token_major else _forward_blocks
    design(call, out, lse, q, k, v, scale)


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
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    if q.numel() == 0 or block_indices.numel() == 0:
        return dq.zero_(), dk.to(k.dtype), dv.to(v.dtype)
    call = _Call(q, k, block_indices, cu_seqlens, sel_block_size, config)
    shape, tile = call.shape, call.config.selected_bwd
    delta = row_dots(dout, dlse, out)
    index = call.index()
    slots = index.chunk_rows * shape.num_kv_heads * call.slots
    dq_part = torch.empty((slots, shape.group, shape.head_dim), dtype=q.dtype, device=q.device)
    parts = torch.empty(
        (2, index.chunk_items, call.block_n, shape.head_dim), dtype=torch.float32, device=q.device
    )
    block_t = call.rows_to_tokens(32)
    for first_row, num_rows, first_key in call.chunks(index):
        nsa_selected_bwd_part_kernel[(index.chunk_items,)](
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
            *dout.stride(),
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *call.item_sizes(index, first_row, first_key),
            **call.item_options(index, tile),
            ROWS_FIRST=tile.block_m >= 128,
        )
        nsa_selected_bwd_dq_kernel[(triton.cdiv(num_rows, block_t), shape.num_kv_heads)](
            dq,
            dq_part,
            call.indices,
            scale,
            first_row,
            num_rows,
            shape.num_kv_heads,
            **call.heads,
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
            first_key,
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
