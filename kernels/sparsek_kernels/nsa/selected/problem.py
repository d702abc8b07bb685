"""What the launches of attention inside chosen blocks share: index, chunks, tiles, options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from sparsek_kernels.common.descriptors import tile_layout
from sparsek_kernels.nsa.config import LaunchConfig, TileConfig
from sparsek_kernels.nsa.launching import launch_config, problem_shape
from sparsek_kernels.nsa.selected.index import InverseIndex, build_index
from sparsek_kernels.sink_window.launch_sm90 import copyable

MAX_SEL_BLOCK = 128
"""Largest selection block that the kernels hold on chip."""


@dataclass(frozen=True)
class Chunks:
    """Rows, keys and items (an upper bound) of one launch of block-major kernels."""

    first_row: int
    num_rows: int
    first_key: int
    num_keys: int
    items: int


class SelectedCall:
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

    def launches(self, index: InverseIndex, together: int = 1) -> Iterator[Chunks]:
        """What each launch serves, which is ``together`` chunks."""
        rows = self.shape.batch * self.shape.num_q
        keys = self.shape.num_kv_heads * index.num_blocks
        for chunk in range(0, index.num_chunks, together):
            chunks = min(together, index.num_chunks - chunk)
            first = chunk * index.chunk_rows
            yield Chunks(
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

    def item_sizes(self, index: InverseIndex, chunks: Chunks) -> tuple[int, ...]:
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
