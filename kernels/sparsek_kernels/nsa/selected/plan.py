"""How block-major kernels of selected attention are launched: chunk by chunk, item by item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sparsek_kernels.common.descriptors import tile_layout
from sparsek_kernels.common.operators import pointers
from sparsek_kernels.nsa.config import TileConfig
from sparsek_kernels.nsa.selected.index import InverseIndex
from sparsek_kernels.nsa.selected.problem import SelectedProblem


@dataclass(frozen=True)
class Chunk:
    """Rows, keys and items (an upper bound) of one launch."""

    first_row: int
    num_rows: int
    first_key: int
    num_keys: int
    items: int


@dataclass(frozen=True)
class LaunchPlan:
    """A problem and the inverse index of its selection, ``together`` chunks of it in a launch."""

    problem: SelectedProblem
    index: InverseIndex
    together: int = 1

    @property
    def part_shape(self) -> tuple[int, int, int]:
        """``[slots, group, D]`` of the parts that one launch writes."""
        shape = self.problem.shape
        rows = self.together * self.index.chunk_rows
        return rows * shape.num_kv_heads * self.problem.top_n, shape.group, shape.head_dim

    def chunks(self) -> Iterator[Chunk]:
        """The launches, in order."""
        shape, index = self.problem.shape, self.index
        rows = shape.batch * shape.num_q
        keys = shape.num_kv_heads * index.num_blocks
        for chunk in range(0, index.num_chunks, self.together):
            chunks = min(self.together, index.num_chunks - chunk)
            first = chunk * index.chunk_rows
            yield Chunk(
                first_row=first,
                num_rows=min(chunks * index.chunk_rows, rows - first),
                first_key=chunk * keys,
                num_keys=chunks * keys,
                items=chunks * index.chunk_items,
            )

    @cached_property
    def item_tensors(self) -> tuple[torch.Tensor, ...]:
        """Index tensors in the order in which kernels take them."""
        index = self.index
        return (
            index.item_keys, index.entries, index.entry_rows, index.entry_offsets, index.block_seq,
            *pointers(self.problem.q, self.problem.cu_seqlens),
        )  # fmt: skip

    def item_sizes(self, chunk: Chunk) -> tuple[int, ...]:
        """Sizes in the order in which kernels take them."""
        shape = self.problem.shape
        first_slot = chunk.first_row * shape.num_kv_heads * self.problem.top_n
        return (
            chunk.first_key, chunk.num_keys, first_slot, self.index.num_blocks, shape.num_kv_heads,
            shape.num_q, shape.num_k, self.problem.offset, self.index.item_entries,
        )  # fmt: skip

    def portable_options(self, tile: TileConfig) -> dict[str, Any]:
        """Compile-time arguments of portable kernels."""
        return {
            **self.problem.portable_rules,
            "BLOCK_E": self.problem.tile_tokens(tile.block_m),
            **tile.pipeline,
        }

    def sm90_options(self, tile: TileConfig, registers: int | None) -> dict[str, Any]:
        """Compile-time arguments of Hopper kernels, with ``registers`` for a thread."""
        dim, dtype = self.problem.shape.head_dim, self.problem.q.dtype
        return {
            **self.problem.rules,
            "Q_LAYOUT": tile_layout(tile.block_m, dim, dtype),
            "K_LAYOUT": tile_layout(self.problem.sel_block_size, dim, dtype),
            "ROWS": tile.block_m,
            "STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
            "maxnreg": registers,
        }
