"""Forward launches of attention inside chosen blocks: token-major, or block-major in two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from sparsek_kernels.common.descriptors import (
    boxable,
    describe_boxes,
    multiprocessors,
    tile_layout,
)
from sparsek_kernels.nsa.config import BOX_GROUPS, LaunchConfig
from sparsek_kernels.nsa.gate import launch as launch_gate
from sparsek_kernels.nsa.launching import tile_grid
from sparsek_kernels.nsa.selected.kernels.combine_sm90 import nsa_selected_hopper_combine_kernel
from sparsek_kernels.nsa.selected.kernels.fwd import (
    nsa_selected_combine_kernel,
    nsa_selected_part_kernel,
)
from sparsek_kernels.nsa.selected.kernels.fwd_sm90 import nsa_selected_hopper_part_kernel
from sparsek_kernels.nsa.selected.kernels.fwd_tma_sm90 import nsa_selected_hopper_tma_part_kernel
from sparsek_kernels.nsa.selected.kernels.fwd_tokens import nsa_selected_tokens_kernel
from sparsek_kernels.nsa.selected.problem import SelectedCall

MAX_RING_SLOTS = 32
"""Most blocks per token whose parts one word can mark."""


def _forward_tokens(
    call: SelectedCall,
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


@dataclass(frozen=True)
class _Step:
    """One of the two kernels of a block-major pass, and what it takes for this call."""

    kernel: Any
    tensors: tuple[Any, ...]
    strides: tuple[int, ...]
    options: dict[str, Any]


def _part_step(
    call: SelectedCall, part: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> _Step:
    """The kernel that writes parts."""
    tile = call.config.selected_boxes
    group, dim = call.shape.group, call.shape.head_dim
    whole = call.sel_block_size == 64 and group in BOX_GROUPS
    if tile is not None and whole and boxable(q, k, v):
        rows = (describe_boxes(x, 1, group, 64) for x in (part[None], q))
        keys = (describe_boxes(x, call.sel_block_size, 1, dim) for x in (k, v))
        options = {**call.hopper_options(tile, 16), "maxnreg": tile.max_registers}
        del options["BLOCK_G"]
        return _Step(nsa_selected_hopper_tma_part_kernel, (*rows, *keys), (), options)
    hopper = call.hopper_tile(call.config.selected_hopper, q, k, v)
    if hopper is not None:
        tile, strides = hopper
        options = call.hopper_options(tile, 16)
        return _Step(nsa_selected_hopper_part_kernel, (part, q, k, v), strides, options)
    strides = (*q.stride(), *k.stride(), *v.stride())
    options = call.item_options(call.config.selected)
    return _Step(nsa_selected_part_kernel, (part, q, k, v), strides, options)


def _merge_step(
    call: SelectedCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[_Step, int]:
    """The kernel that merges them, and tokens of a tile."""
    shape, tile = call.shape, call.config.combine
    shared = {
        "GROUP": shape.group,
        "SLOTS": call.slots,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_G": shape.padded_group,
        "SEL_BLOCK": call.sel_block_size,
        "VARLEN": call.varlen,
    }
    slots = triton.next_power_of_2(call.slots)
    hopper = call.hopper_tile(call.config.combine_hopper, q, k, v)
    if hopper is not None and call.slots <= MAX_RING_SLOTS:
        tile, strides = hopper
        options = {
            **shared,
            "Q_LAYOUT": tile_layout(tile.block_m, shape.head_dim, call.dtype),
            "BLOCK_S": max(slots, 16),
            "STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
            "maxnreg": tile.max_registers,
        }
        step = _Step(nsa_selected_hopper_combine_kernel, (q, k, v), strides, options)
        return step, tile.block_m // shape.padded_group
    block_t = call.rows_to_tokens(tile.block_m)
    options = {
        **shared,
        "BLOCK_T": block_t,
        "BLOCK_S": slots,
        "BLOCK_N": call.block_n,
        "BLOCK_D": shape.padded_dim,
        "PRECISION": call.config.precision,
        "NEAR_STAGES": 2 if tile.max_registers is None else 1,
        "NUM_STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
        "maxnreg": tile.max_registers,
    }
    strides = (*q.stride(), *k.stride(), *v.stride())
    return _Step(nsa_selected_combine_kernel, (q, k, v), strides, options), block_t


def _forward_blocks(
    call: SelectedCall,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    others: Sequence[torch.Tensor] = (),
    gates: Sequence[torch.Tensor] = (),
) -> None:
    """Without ``lse``: add the gated ``others`` (compressed, sliding) to this branch's output."""
    shape = call.shape
    together = -(-call.config.chunk_rows // call.config.index_rows)
    index = call.index(call.config.index_rows, call.config.item_entries, far_only=True)
    slots = together * index.chunk_rows * shape.num_kv_heads * call.slots
    part = torch.empty((slots, shape.group, shape.head_dim), dtype=q.dtype, device=q.device)
    part_lse = torch.empty((slots, shape.group), dtype=torch.float32, device=q.device)
    write = _part_step(call, part, q, k, v)
    merge, block_t = _merge_step(call, q, k, v)
    cu_first = call.cu_seqlens
    if cu_first is None and shape.batch > 1:
        cu_first = torch.arange(shape.batch + 1, dtype=torch.int32, device=q.device) * shape.num_q
    gated = (*others, *gates) if lse is None else (q,) * 5
    for chunks in call.launches(index, together):
        first_row, num_rows = chunks.first_row, chunks.num_rows
        write.kernel[(chunks.items,)](
            write.tensors[0],
            part_lse,
            *write.tensors[1:],
            *call.item_inputs(index),
            scale,
            *write.strides,
            *call.item_sizes(index, chunks),
            **write.options,
        )
        cu_rows = None if cu_first is None else cu_first.clamp(first_row, first_row + num_rows)
        grid, tiles = tile_grid(cu_rows, num_rows, block_t, shape.num_kv_heads, 1)
        counts: tuple[int, ...] = ()
        if merge.kernel is nsa_selected_hopper_combine_kernel:  # persistent programs
            counts = (grid[0], grid[0] * grid[1])
            grid = (min(counts[1], 2 * multiprocessors(q.device)), 1, 1)
        merge.kernel[grid](
            out,
            out if lse is None else lse,
            part,
            part_lse,
            *merge.tensors,
            *gated,
            call.indices,
            q if cu_rows is None else cu_rows,
            q if cu_first is None else cu_first,
            q if tiles is None else tiles,
            scale,
            *merge.strides,
            first_row,
            num_rows,
            shape.num_q,
            shape.num_k,
            0 if call.varlen else shape.num_k - shape.num_q,
            shape.num_kv_heads,
            *counts,
            MAPPED=cu_first is not None,
            GATED=lse is None,
            **merge.options,
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
    call = SelectedCall(q, k, block_indices, cu_seqlens, sel_block_size, config)
    design = _forward_tokens if call.config.token_major else _forward_blocks
    design(call, out, lse, q, k, v, scale)


def forward_gated(
    out: torch.Tensor,
    out_cmp: torch.Tensor,
    out_swa: torch.Tensor,
    gates: Sequence[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sel_block_size: int,
    scale: float,
    config: LaunchConfig | None = None,
) -> None:
    """Fill ``out`` with the gated sum of three branches, of which this is the selected one.

    All outputs ``[B, N, Hq, D]`` are contiguous; ``gates [B, N, Hq]`` are compressed, selected,
    sliding.
    """
    gates = [x.contiguous() for x in gates]
    if out.numel() and block_indices.shape[3]:
        call = SelectedCall(q, k, block_indices, cu_seqlens, sel_block_size, config)
        if not call.config.token_major:
            _forward_blocks(call, out, None, q, k, v, scale, (out_cmp, out_swa), gates)
            return
    out_slc = torch.empty_like(out)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    forward(out_slc, lse, q, k, v, block_indices, cu_seqlens, sel_block_size, scale, config)
    launch_gate.forward(out, (out_cmp, out_slc, out_swa), gates)
