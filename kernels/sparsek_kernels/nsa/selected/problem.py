"""One call of selected attention: its tensors, its sizes, its launch parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sparsek_kernels.common.alignment import copyable
from sparsek_kernels.common.operators import make_contiguous
from sparsek_kernels.nsa.config import LaunchConfig, ProblemShape, TileConfig, launch_config

MAX_SEL_BLOCK = 128
"""Largest selection block that the kernels hold on chip."""


@dataclass(frozen=True, eq=False)
class SelectedProblem:
    """Checked inputs of one call, as ``selected_attention`` names them.

    ``block_indices`` and ``cu_seqlens`` are made contiguous; ``tuned`` are launch parameters
    instead of the table's.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_indices: torch.Tensor
    cu_seqlens: torch.Tensor | None
    sel_block_size: int
    softmax_scale: float
    tuned: LaunchConfig | None = None

    def __post_init__(self) -> None:
        make_contiguous(self, "block_indices", "cu_seqlens")

    @cached_property
    def shape(self) -> ProblemShape:
        """Sizes, as the table of launch parameters takes them."""
        return ProblemShape.of(self.q, *self.k.shape[1:3])

    @cached_property
    def config(self) -> LaunchConfig:
        """Launch parameters.

        Raises:
            NotImplementedError: blocks that are larger than the kernels hold.
        """
        if self.sel_block_size > MAX_SEL_BLOCK:
            raise NotImplementedError(
                f"sel_block_size: expected at most {MAX_SEL_BLOCK} on CUDA, "
                f"got {self.sel_block_size}; split each block into smaller ones"
            )
        return self.tuned or launch_config(self.q, self.shape, self.top_n)

    @property
    def top_n(self) -> int:
        """Blocks per token, S."""
        return int(self.block_indices.shape[3])

    @property
    def offset(self) -> int:
        """Position of the first query; packed sequences start at 0."""
        return self.k.shape[1] - self.q.shape[1]

    def tile_tokens(self, rows: int) -> int:
        """Tokens in a tile of ``rows`` rows (tokens times padded heads), 16 rows at least."""
        return max(max(rows, 16) // self.shape.padded_group, 1)

    def sm90_tile(self, tile: TileConfig | None, *tensors: torch.Tensor) -> TileConfig | None:
        """``tile`` where Hopper kernels can copy rows of ``tensors`` by eight elements."""
        whole = self.sel_block_size == 64 and self.shape.padded_group <= 64
        return tile if tile is not None and whole and copyable(*tensors) else None

    @property
    def rules(self) -> dict[str, Any]:
        """Compile-time arguments that every attention kernel takes."""
        return {
            "GROUP": self.shape.group,
            "HEAD_DIM": self.shape.head_dim,
            "SEL_BLOCK": self.sel_block_size,
            "VARLEN": self.cu_seqlens is not None,
        }

    @property
    def block_n(self) -> int:
        """Keys of a portable kernel's tile: one block, padded."""
        return max(16, 1 << (self.sel_block_size - 1).bit_length())

    @property
    def portable_rules(self) -> dict[str, Any]:
        """Compile-time arguments that every portable attention kernel takes."""
        return {
            **self.rules,
            "BLOCK_G": self.shape.padded_group,
            "BLOCK_N": self.block_n,
            "BLOCK_D": self.shape.padded_dim,
            "PRECISION": self.config.precision,
        }
