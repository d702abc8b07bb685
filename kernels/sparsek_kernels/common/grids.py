"""Grids of kernels that own tiles of tokens, of fixed-length and of packed sequences."""

from __future__ import annotations

import torch

from sparsek_kernels.common.kernels.sequences import tile_map_kernel
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import AttentionShape, cdiv

Grid = tuple[int, int, int]


def tile_map(cu_seqlens: torch.Tensor, total: int, block: int) -> torch.Tensor:
    """``[tiles, 2]`` int32 (sequence, block), one per block of a packed sequence, -1 padded.

    The number of rows is an upper bound known on the host, so nothing waits for the device.
    """
    num_seqs = cu_seqlens.shape[0] - 1
    num_tiles = total // block + num_seqs
    tiles = torch.empty((num_tiles, 2), dtype=torch.int32, device=cu_seqlens.device)
    run(tile_map_kernel, (num_seqs + 1,), tiles, cu_seqlens, num_seqs, num_tiles, block, 256)
    return tiles


def tile_grid(
    cu_seqlens: torch.Tensor | None, total: int, block: int, heads: int, batch: int
) -> tuple[Grid, torch.Tensor | None]:
    """Grid over blocks of tokens and heads, and the :func:`tile_map` of packed sequences."""
    if cu_seqlens is None:
        return (cdiv(total, block), heads, batch), None
    tiles = tile_map(cu_seqlens, total, block)
    return (tiles.shape[0], heads, 1), tiles


def query_grid(
    shape: AttentionShape, cu_seqlens: torch.Tensor | None, block: int
) -> tuple[Grid, torch.Tensor | None]:
    """:func:`tile_grid` over blocks of queries and query heads."""
    return tile_grid(cu_seqlens, shape.num_q, block, shape.num_heads, shape.batch)
