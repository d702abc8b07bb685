"""Blocks that neighbouring tokens share: attended once for all of them, without parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import next_power_of_2
from sparsek_kernels.nsa.config import TileConfig
from sparsek_kernels.nsa.selected.kernels.share import nsa_share_blocks_kernel
from sparsek_kernels.nsa.selected.problem import SelectedProblem, key_dtype

_MOST_ENTRIES = 128


@dataclass(frozen=True)
class Shared:
    """What the tiles of the combining kernel share.

    Tiles are numbered launch by launch, as many for each.  Tensors are int32, keys of
    ``key_dtype``.
    """

    keys: torch.Tensor  # [B * N * Hkv * S], of the inverse index, which leaves shared blocks out
    far: torch.Tensor  # [B * N, Hkv], a bit for each place in ``block_indices`` that has a key
    lists: torch.Tensor  # [tiles, Hkv, most], the shared blocks of each tile
    counts: torch.Tensor  # [tiles, Hkv, 2], how many these are; the bits of its tokens together
    launch_rows: int
    launch_tiles: int

    def first_tile(self, first_row: int) -> int:
        """The first tile of the launch that begins with a row."""
        return first_row // self.launch_rows * self.launch_tiles


def share_blocks(problem: SelectedProblem, tile: TileConfig, together: int) -> Shared | None:
    """The blocks that half of a tile's tokens or more chose.

    ``None`` of several sequences, and of small groups, whose tiles have many tokens: their lists
    take long to compare (groups of 4 lost up to 10 %).  A block costs a tile its keys and values,
    which lie in the cache.  A part costs a token its queries and two passes over its output,
    through memory.

    Args:
        tile: of the combining kernel.
        together: chunks of the inverse index in a launch.
    """
    shape, config, device = problem.shape, problem.config, problem.q.device
    rows, heads, top_n = shape.num_q, shape.num_kv_heads, problem.top_n
    block_t, block_s = tile.block_m // shape.padded_group, next_power_of_2(top_n)
    if problem.cu_seqlens is not None or shape.batch > 1 or block_t * block_s > _MOST_ENTRIES:
        return None
    least = max(block_t // 2, 2)
    most = max(block_t * top_n // least, 1)
    launch_rows = min(together * config.index_rows, rows)
    launch_tiles = -(-launch_rows // block_t)
    tiles = -(-rows // launch_rows) * launch_tiles
    num_blocks = problem.num_blocks
    num_keys = -(-rows // config.index_rows) * heads * num_blocks

    def new(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    keys = new(rows * heads * top_n, dtype=key_dtype(num_keys))
    found = Shared(
        keys, new(rows, heads), new(tiles, heads, most), new(tiles, heads, 2),
        launch_rows, launch_tiles,
    )  # fmt: skip
    run(
        nsa_share_blocks_kernel, (tiles, heads),
        found.keys, found.far, found.lists, found.counts, problem.block_indices,
        rows, launch_rows, launch_tiles, config.index_rows, num_keys, num_blocks, problem.offset,
        heads,
        TOP_N=top_n, SEL_BLOCK=problem.sel_block_size, BLOCK_T=block_t, BLOCK_S=block_s,
        LEAST=least, MOST=most, num_warps=max(block_t * block_s // 32, 1),
    )  # fmt: skip
    return found
