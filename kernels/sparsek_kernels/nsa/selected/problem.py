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
ALIGNED = 64
"""Elements between the beginnings of tensors that share an allocation: a multiple of this."""
MAX_CHUNKS = 32
"""Most chunks of ``index_rows`` that an index has room for: twice what the table asks for."""


def key_dtype(num_keys: int) -> torch.dtype:
    """The dtype of sort keys up to ``2 * num_keys``: half as wide takes half the passes to sort."""
    return torch.int16 if 2 * num_keys < 1 << 15 else torch.int32


@dataclass(frozen=True, eq=False)
class SelectedProblem:
    """Checked inputs of one call, as ``selected_attention`` names them.

    ``block_indices`` and ``cu_seqlens`` are made contiguous; ``index`` is a :meth:`new_index` that
    forward fills for many tokens and backward reads; ``tuned`` are launch parameters instead of the
    table's.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_indices: torch.Tensor
    cu_seqlens: torch.Tensor | None
    sel_block_size: int
    softmax_scale: float
    index: torch.Tensor | None = None
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

    @property
    def num_seqs(self) -> int:
        """Packed sequences; 0 where they have one length."""
        return 0 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def num_blocks(self) -> int:
        """Blocks of all sequences: an upper bound when packed."""
        if self.cu_seqlens is not None:
            return self.k.shape[1] // self.sel_block_size + self.num_seqs
        return -(-self.k.shape[1] // self.sel_block_size) * self.k.shape[0]

    def new_index(self) -> torch.Tensor:
        """Room for the sorted selection, int32: its size follows from shapes alone."""
        places = -(-self.block_indices.numel() // ALIGNED) * ALIGNED
        keys = 2 * MAX_CHUNKS * self.k.shape[2] * self.num_blocks
        return torch.empty(places + keys + 1, dtype=torch.int32, device=self.q.device)

    def split_index(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two parts of a :meth:`new_index`: entries ``[B * N * Hkv * S]``, offsets of keys."""
        places = -(-self.block_indices.numel() // ALIGNED) * ALIGNED
        return index[: self.block_indices.numel()], index[places:]

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
    def sequence_rules(self) -> dict[str, Any]:
        """Compile-time arguments of kernels that look sequences up."""
        return {"VARLEN": self.cu_seqlens is not None, "SEQ_STEPS": self.num_seqs.bit_length()}

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
