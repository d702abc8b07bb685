"""Which kernel and which tile sizes serve a shape: pure functions of shape, dtype and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from sparsek_kernels.common import shapes
from sparsek_kernels.common.device import device_arch
from sparsek_kernels.sink_window.config import TileConfig as SinkWindowTile

BOX_GROUPS = (8, 16, 32, 64)
"""Sizes of groups whose heads one bulk copy moves: whole swizzles of 8 rows, 64 rows at most."""
_PART_BYTES = 1 << 31  # largest scratch for the partial outputs of a chunk
_PART_BYTES_HOPPER_BWD = 1 << 32  # fewer chunks give each block more queries
_MAX_CHUNKS = 8
_LARGE_SHARED_MEMORY = (80, 90, 100, 103)  # architectures with 160 KiB and more per program
_TILED = (
    *("compressed", "compressed_dq", "compressed_dkdv"),
    *("select", "selected", "combine", "selected_bwd", "tokens"),
)


@dataclass(frozen=True)
class ProblemShape(shapes.AttentionShape):
    """Sizes of one call, groups padded for tiles."""

    @classmethod
    def of(cls, q: torch.Tensor, num_k: int, num_kv_heads: int) -> ProblemShape:
        """Sizes of a call with queries ``q [B, N, Hq, D]``."""
        batch, num_q, num_heads, head_dim = q.shape
        return cls(batch, num_q, num_k, num_heads, num_kv_heads, head_dim)

    @property
    def padded_group(self) -> int:
        """``group`` rounded up to a power of two."""
        return 1 << (self.group - 1).bit_length()


@dataclass(frozen=True)
class TileConfig(shapes.TileConfig):
    """Launch parameters of one kernel.

    ``max_registers`` of a thread let more programs share a multiprocessor.
    """

    max_registers: int | None = None


@dataclass(frozen=True)
class LaunchConfig:
    """Tiles and sizes of every launch of a call; ``None`` where a Hopper kernel does not run.

    Tiles of compressed attention count queries and compressed keys, ``select`` rows (tokens times
    heads) and selection blocks, those of selected attention rows per step.

    Args:
        selected: of the block-major kernel, whose parts ``combine`` adds up.
        tokens: of the token-major kernel.
        token_major: whether the forward pass of selected attention is token-major.
        chunk_rows: tokens whose parts are held at once; backward about ``chunk_rows_bwd``, a
            multiple of ``index_rows``.
        index_rows: tokens whose queries follow one another block by block; they stay in the cache
            if they are few.
        item_entries: most queries that a block-major program serves.
        compressed_bwd_hopper: tile of the sink-window kernel, which computes that pass.
        select_hopper: its rows are those of a warpgroup.
        selected_boxes: of the block-major kernel where one bulk copy takes the heads of a group.
    """

    compressed: TileConfig
    compressed_dq: TileConfig
    compressed_dkdv: TileConfig
    select: TileConfig
    selected: TileConfig
    combine: TileConfig
    selected_bwd: TileConfig
    tokens: TileConfig
    token_major: bool
    chunk_rows: int
    chunk_rows_bwd: int
    index_rows: int
    item_entries: int
    item_entries_bwd: int
    precision: str = "tf32"
    compressed_hopper: TileConfig | None = None
    compressed_bwd_hopper: SinkWindowTile | None = None
    select_hopper: TileConfig | None = None
    selected_hopper: TileConfig | None = None
    selected_boxes: TileConfig | None = None
    combine_hopper: TileConfig | None = None
    selected_bwd_hopper: TileConfig | None = None


def row_tile(head_dim: int) -> tuple[int, int]:
    """Rows of a program that handles each row by itself, and ``head_dim`` padded."""
    padded = max(16, 1 << (head_dim - 1).bit_length())
    return max(1, 4096 // padded), padded


def _chunk_rows(shape: ProblemShape, top_n: int, itemsize: int, most_bytes: int) -> int:
    rows = shape.batch * shape.num_q
    fits = most_bytes // max(shape.num_heads * top_n * shape.head_dim * itemsize, 1)
    return max(min(rows, max(fits, -(-rows // _MAX_CHUNKS))), 1)


def _tiles(dim: int, dtype: torch.dtype, arch: int) -> dict[str, TileConfig]:
    """Tiles of every kernel for a padded head size."""
    if dtype == torch.float32:  # IEEE products run on the plain fp32 units: all state in registers
        small = TileConfig(32, 32 if dim <= 128 else 16, 4, 1)
        tiles = dict.fromkeys(_TILED, small)
        return {**tiles, "select": TileConfig(32, 16, 4, 1)}
    if dim > 128:
        return {
            "compressed": TileConfig(64, 32, 4, 1),
            "compressed_dq": TileConfig(64, 32, 8, 1),
            "compressed_dkdv": TileConfig(32, 32, 8, 1),
            "select": TileConfig(64, 16, 8, 1),
            "selected": TileConfig(32, 64, 4, 1),
            "combine": TileConfig(32, 64, 4, 2),
            "selected_bwd": TileConfig(16, 64, 8, 1),
            "tokens": TileConfig(16, 64, 8, 1),
        }
    if arch not in _LARGE_SHARED_MEMORY:
        return {
            "compressed": TileConfig(64, 32, 4, 2),
            "compressed_dq": TileConfig(64, 32, 4, 1),
            "compressed_dkdv": TileConfig(32, 64, 8, 1),
            "select": TileConfig(64, 16, 4, 1),
            "selected": TileConfig(64, 64, 4, 1),
            "combine": TileConfig(32, 64, 4, 2),
            "selected_bwd": TileConfig(32, 64, 8, 1),
            "tokens": TileConfig(32, 64, 4, 1),
        }
    hopper = arch >= 90
    return {
        "compressed": TileConfig(128, 64, 8, 3),
        "compressed_dq": TileConfig(128, 64, 8, 2) if hopper else TileConfig(64, 32, 4, 2),
        "compressed_dkdv": TileConfig(64, 128, 8, 2),
        "select": TileConfig(128, 16, 4, 3 if hopper else 2),
        "selected": TileConfig(64, 64, 4, 1),
        "combine": TileConfig(64, 64, 4, 4 if hopper else 3),
        "selected_bwd": TileConfig(32, 64, 4, 2) if hopper else TileConfig(64, 64, 8, 1),
        "tokens": TileConfig(32, 64, 4, 1),
    }


@lru_cache(maxsize=256)
def select_config(shape: ProblemShape, top_n: int, dtype: torch.dtype, arch: int) -> LaunchConfig:
    """Launch parameters for ``shape``, ``top_n`` blocks per token and the dtype of q, k and v.

    ``arch`` is ten times the compute capability; unknown ones get the portable default.
    """
    rows = shape.batch * shape.num_q
    token_major = rows * shape.num_kv_heads <= 2048
    itemsize = 4 if dtype == torch.float32 else 2
    chunk_rows = _chunk_rows(shape, top_n, itemsize, _PART_BYTES)
    item_entries = max(2048 // shape.padded_group, 32)
    hopper = (
        arch == 90
        and dtype != torch.float32
        and shape.head_dim in (64, 128)
        # Hopper kernels take queries for all tokens, not for the last ones only.
        and shape.num_q == shape.num_k
        and rows * shape.num_heads > 8192
    )
    boxes = hopper and shape.group in BOX_GROUPS
    return LaunchConfig(
        **_tiles(shape.padded_dim, dtype, arch),
        token_major=token_major,
        chunk_rows=chunk_rows,
        chunk_rows_bwd=(
            _chunk_rows(shape, top_n, itemsize, _PART_BYTES_HOPPER_BWD) if hopper else chunk_rows
        ),
        index_rows=-(-chunk_rows // 2) if boxes else chunk_rows,
        item_entries=2 * item_entries if boxes else item_entries,
        item_entries_bwd=4 * item_entries if hopper else item_entries,
        precision="ieee" if dtype == torch.float32 else "tf32",
        compressed_hopper=TileConfig(128, 128, 4, 2) if hopper else None,
        compressed_bwd_hopper=SinkWindowTile(64, 128, 8, 3) if hopper else None,
        # With one head per group nothing is summed, and a full tile needs too many registers.
        select_hopper=TileConfig(128 if shape.group > 1 else 64, 64, 4, 2) if hopper else None,
        selected_hopper=TileConfig(64, 64, 4, 4) if hopper else None,
        selected_boxes=TileConfig(64, 64, 4, 4, 80) if boxes else None,
        combine_hopper=TileConfig(64, 64, 4, 5, 128) if hopper else None,
        selected_bwd_hopper=TileConfig(128, 64, 8, 2) if hopper else None,
    )


def launch_config(q: torch.Tensor, shape: ProblemShape, top_n: int) -> LaunchConfig:
    """The table's configuration for ``q``'s dtype and device."""
    return select_config(shape, top_n, q.dtype, device_arch(q.device))
