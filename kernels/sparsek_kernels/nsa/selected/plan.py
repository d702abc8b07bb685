"""How the kernels of selected attention are launched: configuration, inverse index, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from sparsek_kernels.common.descriptors import tile_layout
from sparsek_kernels.nsa.config import LaunchConfig, TileConfig
from sparsek_kernels.nsa.launching import launch_config
from sparsek_kernels.nsa.selected.index import InverseIndex
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.sink_window.launch_sm90 import copyable

MAX_SEL_BLOCK = 128
"""Largest selection block that the kernels hold on chip."""


@dataclass(frozen=True)
class Chunk:
    """Rows, keys and items (an upper bound) of one launch of block-major kernels."""

    first_row: int
    num_rows: int
    first_key: int
    num_keys: int
    items: int


@dataclass(frozen=True)
class LaunchPlan:
    """A problem and the configuration of its kernels."""

    problem: SelectedProblem
    config: LaunchConfig

    @classmethod
    def make(cls, problem: SelectedProblem, config: LaunchConfig | None) -> LaunchPlan:
        """The plan with ``config``, or with the table's configuration.

        Raises:
            NotImplementedError: blocks that are larger than the kernels hold.
        """
        if problem.sel_block_size > MAX_SEL_BLOCK:
            raise NotImplementedError(
                f"sel_block_size: expected at most {MAX_SEL_BLOCK} on CUDA, "
                f"got {problem.sel_block_size}; split each block into smaller ones"
            )
        return cls(problem, config or launch_config(problem.q, problem.shape, problem.top_n))

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Offsets of packed sequences; any tensor where kernels read none."""
        cu_seqlens = self.problem.cu_seqlens
        return self.problem.q if cu_seqlens is None else cu_seqlens

    @property
    def block_n(self) -> int:
        """Keys of a tile: those of one block, padded."""
        return max(16, triton.next_power_of_2(self.problem.sel_block_size))

    def tokens(self, rows: int) -> int:
        """Tokens in a tile of ``rows`` rows (tokens times padded heads), 16 rows at least."""
        return max(max(rows, 16) // self.problem.shape.padded_group, 1)

    @property
    def rules(self) -> dict[str, Any]:
        """Compile-time arguments that every kernel takes."""
        shape = self.problem.shape
        return {
            "GROUP": shape.group,
            "HEAD_DIM": shape.head_dim,
            "SEL_BLOCK": self.problem.sel_block_size,
            "VARLEN": self.problem.packed,
        }

    @property
    def portable_rules(self) -> dict[str, Any]:
        """Compile-time arguments that every portable kernel takes."""
        return {
            **self.rules,
            "BLOCK_G": self.problem.shape.padded_group,
            "BLOCK_N": self.block_n,
            "BLOCK_D": self.problem.shape.padded_dim,
            "PRECISION": self.config.precision,
        }

    def chunks(self, index: InverseIndex, together: int = 1) -> Iterator[Chunk]:
        """The rows of each launch, ``together`` chunks of ``index`` at a time."""
        shape = self.problem.shape
        rows = shape.batch * shape.num_q
        keys = shape.num_kv_heads * index.num_blocks
        for chunk in range(0, index.num_chunks, together):
            chunks = min(together, index.num_chunks - chunk)
            first = chunk * index.chunk_rows
            yield Chunk(
                first_row=first,
                num_rows=min(chunks * index.chunk_rows, rows - first),
                first_key=chunk * keys,
                num_keys=chunks * keys,
                items=chunks * index.chunk_items,
            )

    def item_tensors(self, index: InverseIndex) -> tuple[torch.Tensor, ...]:
        """Index tensors in the order in which block-major kernels take them."""
        return (
            index.item_keys,
            index.item_offsets,
            index.entries,
            index.entry_rows,
            index.entry_offsets,
            index.block_seq,
            index.cu_blocks,
            self.cu_seqlens,
        )

    def item_sizes(self, index: InverseIndex, chunk: Chunk) -> tuple[int, ...]:
        """Sizes in the order in which block-major kernels take them."""
        shape = self.problem.shape
        return (
            chunk.first_key,
            chunk.num_keys,
            chunk.first_row * shape.num_kv_heads * self.problem.top_n,
            index.num_blocks,
            shape.num_kv_heads,
            shape.num_q,
            shape.num_k,
            self.problem.offset,
            index.item_entries,
        )

    def item_options(self, tile: TileConfig) -> dict[str, Any]:
        """Compile-time arguments of portable block-major kernels."""
        return {
            **self.portable_rules,
            "BLOCK_E": self.tokens(tile.block_m),
            "NUM_STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "maxnreg": tile.max_registers,
        }

    def sm90_tile(self, tile: TileConfig | None, *tensors: torch.Tensor) -> TileConfig | None:
        """``tile`` where Hopper kernels can copy rows of ``tensors`` by eight elements."""
        whole = self.problem.sel_block_size == 64 and self.problem.shape.padded_group <= 64
        return tile if tile is not None and whole and copyable(*tensors) else None

    def sm90_options(self, tile: TileConfig, registers: int | None) -> dict[str, Any]:
        """Compile-time arguments of block-major Hopper kernels with ``registers`` a thread."""
        dim, dtype = self.problem.shape.head_dim, self.problem.q.dtype
        return {
            **self.rules,
            "Q_LAYOUT": tile_layout(tile.block_m, dim, dtype),
            "K_LAYOUT": tile_layout(self.problem.sel_block_size, dim, dtype),
            "ROWS": tile.block_m,
            "STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
            "maxnreg": registers,
        }


def octet_strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Strides of each ``[B, N, H, D]`` tensor but the last, in groups of eight elements."""
    return tuple(stride // 8 for x in tensors for stride in x.stride()[:3])
