"""What every launch of one sink-window call shares: sizes, configuration, grids."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from sparsek_kernels.common.kernels.sequences import tile_map_kernel
from sparsek_kernels.sink_window.config import LaunchConfig, ProblemShape, select_config
from sparsek_kernels.sink_window.spec import AttentionSpec


@lru_cache(maxsize=64)
def device_arch(device: torch.device) -> int:
    """Ten times the compute capability; CPU tensors (the interpreter) count as 80."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def problem_shape(
    q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec, cu_seqlens_q: torch.Tensor | None
) -> ProblemShape:
    """Sizes of a call for :func:`select_config`."""
    return ProblemShape(
        batch=q.shape[0],
        num_q=q.shape[1],
        num_k=k.shape[1],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        num_sink=spec.num_sink,
        window_size=spec.window_size,
        causal=spec.causal,
        num_seqs=None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
    )


def tile_map(cu_seqlens: torch.Tensor, total: int, block: int) -> torch.Tensor:
    """``[tiles, 2]`` int32 (sequence, block), one per block of a packed sequence, -1 padded.

    The number of rows is an upper bound known on the host, so nothing waits for the device.
    """
    num_seqs = cu_seqlens.shape[0] - 1
    num_tiles = total // block + num_seqs
    tiles = torch.empty((num_tiles, 2), dtype=torch.int32, device=cu_seqlens.device)
    tile_map_kernel[(num_seqs + 1,)](tiles, cu_seqlens, num_seqs, num_tiles, block, 256)
    return tiles


class Call:
    """Sizes, scalars and configuration of one call, in the order in which kernels take them."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        spec: AttentionSpec,
        cu_seqlens_q: torch.Tensor | None,
        cu_seqlens_k: torch.Tensor | None,
        config: LaunchConfig | None,
    ) -> None:
        self.shape = problem_shape(q, k, spec, cu_seqlens_q)
        self.config = config or select_config(self.shape, q.dtype, device_arch(q.device))
        self.varlen = cu_seqlens_q is not None
        self.cu_q = cu_seqlens_q if cu_seqlens_q is not None else q
        self.cu_k = cu_seqlens_k if cu_seqlens_k is not None else q
        self.num_seqs = self.shape.num_seqs if self.varlen else self.shape.batch
        self.window = spec.window_size or 0
        self.scalars = (spec.softmax_scale, spec.num_sink, self.window)
        self.sizes = (self.shape.num_q, self.shape.num_k, self.shape.num_heads)
        self.mask = {
            "GROUP": self.shape.num_heads // self.shape.num_kv_heads,
            "HEAD_DIM": self.shape.head_dim,
            "CAUSAL": spec.causal,
            "WINDOWED": spec.window_size is not None,
        }

    def query_grid(self, block: int) -> tuple[tuple[int, int, int], torch.Tensor]:
        """Grid over query blocks and heads, and the tile map (a dummy for fixed lengths)."""
        return self._grid(block, self.cu_q, self.shape.num_q, self.shape.num_heads)

    def key_grid(self, block: int) -> tuple[tuple[int, int, int], torch.Tensor]:
        """Grid over key blocks and KV heads, and the tile map."""
        return self._grid(block, self.cu_k, self.shape.num_k, self.shape.num_kv_heads)

    def _grid(
        self, block: int, cu: torch.Tensor, total: int, heads: int
    ) -> tuple[tuple[int, int, int], torch.Tensor]:
        if self.varlen:
            tiles = tile_map(cu, total, block)
            return (tiles.shape[0], heads, 1), tiles
        return (triton.cdiv(total, block), heads, self.shape.batch), cu
