"""What the launches of native sparse attention share: shapes, configuration, grids."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from sparsek_kernels.common.kernels.sequences import tile_map_kernel
from sparsek_kernels.nsa.config import LaunchConfig, ProblemShape, select_config


@lru_cache(maxsize=64)
def device_arch(device: torch.device) -> int:
    """Ten times the compute capability; CPU tensors (the interpreter) count as 80."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def problem_shape(q: torch.Tensor, num_kv_heads: int, num_k: int) -> ProblemShape:
    """Sizes of a call with queries ``q [B, N, Hq, D]``."""
    return ProblemShape(q.shape[0], q.shape[1], num_k, q.shape[2], num_kv_heads, q.shape[3])


def launch_config(q: torch.Tensor, shape: ProblemShape, slots: int) -> LaunchConfig:
    """The table's configuration for ``q``'s dtype and device."""
    return select_config(shape, slots, q.dtype, device_arch(q.device))


def tile_grid(
    cu_seqlens: torch.Tensor | None, total: int, block: int, heads: int, batch: int
) -> tuple[tuple[int, int, int], torch.Tensor | None]:
    """Grid over tiles of tokens and heads, and the map of packed tiles.

    The map ``[tiles, 2]`` holds (sequence, tile within it) and is -1 padded; its length is an
    upper bound that the host knows.
    """
    if cu_seqlens is None:
        return (triton.cdiv(total, block), heads, batch), None
    num_seqs = cu_seqlens.shape[0] - 1
    num_tiles = total // block + num_seqs
    tiles = torch.empty((num_tiles, 2), dtype=torch.int32, device=cu_seqlens.device)
    tile_map_kernel[(num_seqs + 1,)](tiles, cu_seqlens, num_seqs, num_tiles, block, 256)
    return (num_tiles, heads, 1), tiles
