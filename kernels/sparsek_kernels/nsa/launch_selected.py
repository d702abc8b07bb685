"""Launches of attention inside chosen blocks: token-major or block-major, and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsek_kernels.common.descriptors import (
    boxable,
    describe_boxes,
    multiprocessors,
    tile_layout,
)
from sparsek_kernels.nsa import launch_gate
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
from sparsek_kernels.nsa.kernels_selected_hopper import nsa_selected_hopper_part_kernel
from sparsek_kernels.nsa.kernels_selected_hopper_bwd import nsa_selected_hopper_bwd_part_kernel
from sparsek_kernels.nsa.kernels_selected_hopper_combine import (
    nsa_selected_hopper_combine_kernel,
)
from sparsek_kernels.nsa.kernels_selected_hopper_tma import nsa_selected_hopper_tma_part_kernel
from sparsek_kernels.nsa.kernels_selected_tokens import nsa_selected_tokens_kernel
from sparsek_kernels.nsa.launch_common import launch_config, problem_shape, tile_grid
from sparsek_kernels.sink_window.launch import row_dots
from sparsek_kernels.sink_window.launch_hopper import copyable

MAX_SEL_BLOCK = 128
"""Largest selection block that the kernels hold on chip."""

MAX_RING_SLOTS = 32
"""Most blocks per token whose parts one word can mark."""


@dataclass(frozen=True)
class _Chunks:
    """Rows, keys and items (an upper bound) of one launch of block-major kernels."""

    first_row: int
    num_rows: int
    first_key: int
    num_keys: int
    items: int


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
        self.dtype = q.dtype
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

    def index(self, chunk_rows: int, item_entries: int, far_only: bool = False) -> InverseIndex:
        """The inverse of the selection, or of the part that is not near to its queries."""
        return build_index(
            self.indices,
            self.shape.num_k,
            self.cu_seqlens,
            self.sel_block_size,
            chunk_rows,
            item_entries,
            far_only,
        )

    def launches(self, index: InverseIndex, together: int = 1) -> Iterator[_Chunks]:
        """What each launch serves, which is ``together`` chunks."""
        rows = self.shape.batch * self.shape.num_q
        keys = self.shape.num_kv_heads * index.num_blocks
        for chunk in range(0, index.num_chunks, together):
            chunks = min(together, index.num_chunks - chunk)
            first = chunk * index.chunk_rows
            yield _Chunks(
                first_row=first,
                num_rows=min(chunks * index.chunk_rows, rows - first),
                first_key=chunk * keys,
                num_keys=chunks * keys,
                items=chunks * index.chunk_items,
            )

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

    def item_sizes(self, index: InverseIndex, chunks: _Chunks) -> tuple[int, ...]:
        """Sizes in the order in which block-major kernels take them."""
        shape = self.shape
        offset = 0 if self.varlen else shape.num_k - shape.num_q
        return (
            chunks.first_key,
            chunks.num_keys,
            chunks.first_row * shape.num_kv_heads * self.slots,
            index.num_blocks,
            shape.num_kv_heads,
            shape.num_q,
            shape.num_k,
            offset,
            index.item_entries,
        )

    def item_options(self, tile: TileConfig) -> dict[str, Any]:
        """Compile-time arguments of block-major kernels."""
        return {
            **self.heads,
            "SEL_BLOCK": self.sel_block_size,
            "VARLEN": self.varlen,
            "BLOCK_E": self.rows_to_tokens(tile.block_m),
            "BLOCK_N": self.block_n,
            "PRECISION": self.config.precision,
            "NUM_STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "maxnreg": tile.max_registers,
        }

    def hopper_tile(
        self, tile: TileConfig | None, *tensors: torch.Tensor
    ) -> tuple[TileConfig, tuple[int, ...]] | None:
        """``tile`` and strides in groups of eight elements, where Hopper kernels can run."""
        whole = self.sel_block_size == 64 and self.shape.padded_group <= 64
        if tile is None or not whole or not copyable(*tensors):
            return None
        return tile, tuple(x // 8 for y in tensors for x in y.stride()[:3])

    def boxes(
        self, tile: TileConfig | None, part: torch.Tensor, *qkv: torch.Tensor
    ) -> tuple[tuple[TensorDescriptor, ...], dict[str, Any]] | None:
        """Descriptors of the parts, q, k and v, and options, where bulk copies can be made."""
        group, dim = self.shape.group, self.shape.head_dim
        whole = self.sel_block_size == 64 and group in (8, 16, 32, 64)
        if tile is None or not whole or not boxable(*qkv):
            return None
        options = self.hopper_options(tile, 16)
        del options["BLOCK_G"]
        options["maxnreg"] = tile.max_registers
        rows = (describe_boxes(x, 1, group, 64) for x in (part[None], qkv[0]))
        keys = (describe_boxes(x, self.sel_block_size, 1, dim) for x in qkv[1:])
        return (*rows, *keys), options

    def merge_options(self, tile: TileConfig, block_t: int) -> dict[str, Any]:
        """Compile-time arguments of the kernel that adds parts up."""
        return {
            **self.heads,
            "SEL_BLOCK": self.sel_block_size,
            "VARLEN": self.varlen,
            "BLOCK_T": block_t,
            "BLOCK_S": triton.next_power_of_2(self.slots),
            "BLOCK_N": self.block_n,
            "PRECISION": self.config.precision,
            "NEAR_STAGES": 2 if tile.max_registers is None else 1,
            "NUM_STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
            "maxnreg": tile.max_registers,
        }

    def ring_options(self, tile: TileConfig) -> dict[str, Any]:
        """Likewise of its counterpart for Hopper, of which two share a multiprocessor."""
        return {
            "Q_LAYOUT": tile_layout(tile.block_m, self.shape.head_dim, self.dtype),
            "GROUP": self.shape.group,
            "SLOTS": self.slots,
            "HEAD_DIM": self.shape.head_dim,
            "SEL_BLOCK": self.sel_block_size,
            "VARLEN": self.varlen,
            "BLOCK_G": self.shape.padded_group,
            "BLOCK_S": max(triton.next_power_of_2(self.slots), 16),
            "STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
            "maxnreg": 128,
        }

    def hopper_options(self, tile: TileConfig, warps: int) -> dict[str, Any]:
        """Compile-time arguments of Hopper kernels that share a multiprocessor's ``warps``."""
        return {
            "Q_LAYOUT": tile_layout(tile.block_m, self.shape.head_dim, self.dtype),
            "K_LAYOUT": tile_layout(self.sel_block_size, self.shape.head_dim, self.dtype),
            "GROUP": self.shape.group,
            "HEAD_DIM": self.shape.head_dim,
            "SEL_BLOCK": self.sel_block_size,
            "VARLEN": self.varlen,
            "ROWS": tile.block_m,
            "BLOCK_G": self.shape.padded_group,
            "STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
            "maxnreg": 65536 // (32 * warps) // 8 * 8,
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
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    others: Sequence[torch.Tensor] = (),
    gates: Sequence[torch.Tensor] = (),
) -> None:
    """Without ``lse``: add the gated ``others`` (compressed, sliding) to this branch's output."""
    shape, tile, merge = call.shape, call.config.selected, call.config.combine
    together = -(-call.config.chunk_rows // call.config.index_rows)
    index = call.index(call.config.index_rows, call.config.item_entries, far_only=True)
    slots = together * index.chunk_rows * shape.num_kv_heads * call.slots
    part = torch.empty((slots, shape.group, shape.head_dim), dtype=q.dtype, device=q.device)
    part_lse = torch.empty((slots, shape.group), dtype=torch.float32, device=q.device)
    strides: tuple[int, ...] = (*q.stride(), *k.stride(), *v.stride())
    options = call.item_options(tile)
    part_kernel: Any = nsa_selected_part_kernel
    tensors: tuple[Any, ...] = (part, q, k, v)
    hopper = call.hopper_tile(call.config.selected_hopper, q, k, v)
    boxes = call.boxes(call.config.selected_boxes, part, q, k, v)
    if boxes is not None:
        strides = ()
        tensors, options = boxes
        part_kernel = nsa_selected_hopper_tma_part_kernel
    elif hopper is not None:
        tile, strides = hopper
        options = call.hopper_options(tile, 16)
        part_kernel = nsa_selected_hopper_part_kernel
    block_t = call.rows_to_tokens(merge.block_m)
    merge_strides = (*q.stride(), *k.stride(), *v.stride())
    merge_options = call.merge_options(merge, block_t)
    merge_kernel: Any = nsa_selected_combine_kernel
    ring = call.hopper_tile(call.config.combine_hopper, q, k, v)
    if ring is not None and call.slots <= MAX_RING_SLOTS:
        merge, merge_strides = ring
        block_t = merge.block_m // shape.padded_group
        merge_options = call.ring_options(merge)
        merge_kernel = nsa_selected_hopper_combine_kernel
    cu_first = call.cu_seqlens
    if cu_first is None and shape.batch > 1:
        cu_first = torch.arange(shape.batch + 1, dtype=torch.int32, device=q.device) * shape.num_q
    gated = (*others, *gates) if lse is None else (q,) * 5
    for chunks in call.launches(index, together):
        first_row, num_rows = chunks.first_row, chunks.num_rows
        part_kernel[(chunks.items,)](
            tensors[0],
            part_lse,
            *tensors[1:],
            *call.item_inputs(index),
            scale,
            *strides,
            *call.item_sizes(index, chunks),
            **options,
        )
        cu_rows = None if cu_first is None else cu_first.clamp(first_row, first_row + num_rows)
        grid, tiles = tile_grid(cu_rows, num_rows, block_t, shape.num_kv_heads, 1)
        tail: tuple[int, ...] = ()
        if merge_kernel is nsa_selected_hopper_combine_kernel:
            items = grid[0] * grid[1]
            tail = (grid[0], items)
            grid = (min(items, 2 * multiprocessors(q.device)), 1, 1)
        merge_kernel[grid](
            out,
            out if lse is None else lse,
            part,
            part_lse,
            q,
            k,
            v,
            *gated,
            call.indices,
            q if cu_rows is None else cu_rows,
            q if cu_first is None else cu_first,
            q if tiles is None else tiles,
            scale,
            *merge_strides,
            first_row,
            num_rows,
            shape.num_q,
            shape.num_k,
            0 if call.varlen else shape.num_k - shape.num_q,
            shape.num_kv_heads,
            *tail,
            MAPPED=cu_first is not None,
            GATED=lse is None,
            **merge_options,
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
        call = _Call(q, k, block_indices, cu_seqlens, sel_block_size, config)
        if not call.config.token_major:
            _forward_blocks(call, out, None, q, k, v, scale, (out_cmp, out_swa), gates)
            return
    out_slc = torch.empty_like(out)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    forward(out_slc, lse, q, k, v, block_indices, cu_seqlens, sel_block_size, scale, config)
    launch_gate.forward(out, (out_cmp, out_slc, out_swa), gates)


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
    call = _Call(q, k, block_indices, cu_seqlens, sel_block_size, config)
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
