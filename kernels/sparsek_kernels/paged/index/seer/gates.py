"""The gates of SeerAttention-R (arXiv 2506.08889, section 3), and what pages keep for them.

A gate makes one query of all query heads that share a KV head, and one key of all keys of a block.
Both are made without positions, and then turned by RoPE: the query by its own position, the key by
the one of its block's first token.

Pages keep the key of every complete block in place of records: ``D`` numbers of float32 for each
block and KV head.  It is written when the last of the block's tokens is there, from the keys in the
page, so that the order of writes leaves no trace.  Blocks lie inside a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.checks import check_tensor

POOLS = 3
"""Poolings of a block's keys, side by side: largest, smallest and mean of each channel."""

SMALLEST_GATED = 32
"""Tokens of the smallest block whose gate key has room in a page."""

NORM_EPS = 1e-6
"""Of the gates' RMS norms."""


@dataclass(frozen=True, eq=False)
class Gates:
    """The gates of one layer's KV heads.

    Args:
        query: ``[Hkv, G, D, D]`` float32: the gate query is the sum over a group's heads of
            ``q @ query``.
        key: ``[Hkv, 3 D, D]`` float32: the gate key is ``pooled @ key``, of a block's largest,
            smallest and mean values.
        query_norm, key_norm: ``[D]`` float32, weights of the RMS norms of both; or ``None``.
    """

    query: torch.Tensor
    key: torch.Tensor
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All of them, in the order above."""
        return self.query, self.key, self.query_norm, self.key_norm


def view_gate_keys(
    k_summary: torch.Tensor, page_size: int, sel_block_size: int, head_dim: int
) -> torch.Tensor:
    """View of the gate keys, ``[..., page_size / sel_block_size, D]`` float32."""
    blocks = page_size // sel_block_size
    used = k_summary[..., : 4 * blocks * head_dim]
    keys: torch.Tensor = used.view(torch.float32).unflatten(-1, (blocks, head_dim))
    return keys


def check_gates(gates: Gates, k_cache: torch.Tensor, num_heads: int | None = None) -> None:
    """Check that gates fit a cache and its queries, where queries come."""
    _, heads, _, dim = k_cache.shape
    group = "G" if num_heads is None else num_heads // heads
    shapes: tuple[tuple[int | str, ...], ...] = (
        (heads, group, dim, dim),
        (heads, POOLS * dim, dim),
        (dim,),
        (dim,),
    )
    names = ("query", "key", "query_norm", "key_norm")
    for name, tensor, shape in zip(names, gates.tensors, shapes, strict=True):
        if tensor is None:
            continue
        check_tensor(f"gates.{name}", tensor, shape, (torch.float32,), k_cache.device)
        if not tensor.is_contiguous():
            raise ValueError(
                f"gates.{name}: expected a contiguous tensor, got strides {tensor.stride()}"
            )
