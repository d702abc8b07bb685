"""Sizes that calls and kernels of several families have."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up; called from the host ``triton.cdiv`` takes 2 us."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is ``n`` or more."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one call; for packed sequences ``batch`` is 1 and the token counts are totals."""

    batch: int
    num_q: int
    num_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """``head_dim`` rounded up to a power of two that tensor cores can use."""
        return max(16, 1 << (self.head_dim - 1).bit_length())


@dataclass(frozen=True)
class TileConfig:
    """Launch parameters of one kernel: rows and columns of a tile, warps, pipeline depth."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def pipeline(self) -> dict[str, int]:
        """Warps and stages, as a portable kernel and its compiler take them."""
        stages = self.num_stages
        return {"NUM_STAGES": stages, "num_warps": self.num_warps, "num_stages": stages}


def strides(*tensors: torch.Tensor, dims: int = 4) -> tuple[int, ...]:
    """Strides of the first ``dims`` dimensions of each tensor, one tensor after another."""
    return tuple(stride for x in tensors for stride in x.stride()[:dims])


def octet_strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Strides of each ``[B, N, H, D]`` tensor but the last, in groups of eight elements."""
    return tuple(stride // 8 for stride in strides(*tensors, dims=3))
