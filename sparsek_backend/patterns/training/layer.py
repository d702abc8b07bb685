"""An attention layer that learns its pattern."""

from __future__ import annotations

import torch

from sparsek_backend.nn.rotary import rotate
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_backend.patterns.training.learned import Heads, ImportanceOptions, LearnedPattern
from sparsek_kernels.checks import check_heads, check_int


class SparseAttentionLayer(torch.nn.Module):
    """Self-attention with projections, over a pattern that :class:`PatternScheduler` prunes.

    The state dict has the pattern, so a saved layer goes on where it was.

    Args:
        hidden_size: features of a token.
        num_heads: query heads.
        num_tokens: tokens of the longest input.
        block_size: tokens along a side of a block.
        num_kv_heads: key/value heads, ``num_heads`` by default.
        head_dim: features of a head, ``hidden_size / num_heads`` by default.
        heads: who shares a pattern: the query heads of a ``kv`` head, ``all``, or each ``query``
            head on its own.
        causal: whether queries see earlier keys only.
        rope_theta: base of the rotary position embedding; none when ``None``.
        bias: whether the projections have biases.
        importance: how the importance of blocks is measured.
        gates: train a gate for every block, by whose probability the pattern is pruned.

    Raises:
        ValueError: sizes that do not fit together; the message names the argument.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_tokens: int,
        block_size: int = 64,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        heads: Heads = "kv",
        causal: bool = True,
        rope_theta: float | None = None,
        bias: bool = False,
        importance: ImportanceOptions | None = None,
        gates: bool = False,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size, 1)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(num_heads, num_kv_heads)
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_heads={num_heads} without head_dim, "
                f"got {hidden_size}"
            )
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        if rope_theta is not None and self.head_dim % 2:
            raise ValueError(
                f"head_dim: expected an even size with a rotary embedding, got {self.head_dim}"
            )
        self.rope_theta = rope_theta
        wide, narrow = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = torch.nn.Linear(hidden_size, wide, bias=bias)
        self.k_proj = torch.nn.Linear(hidden_size, narrow, bias=bias)
        self.v_proj = torch.nn.Linear(hidden_size, narrow, bias=bias)
        self.o_proj = torch.nn.Linear(wide, hidden_size, bias=bias)
        self.attention = LearnedPattern(
            num_heads, num_kv_heads, num_tokens, block_size,
            heads=heads, causal=causal, importance=importance, gates=gates,
        )  # fmt: skip

    @property
    def pattern(self) -> BlockSparsePattern:
        """The blocks that are attended now."""
        return self.attention.pattern

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, N, hidden_size]`` from ``x [B, N, hidden_size]``."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in projections)
        if self.rope_theta is not None:
            positions = torch.arange(x.shape[1], device=x.device)
            q, k = (rotate(y, positions, self.rope_theta) for y in (q, k))
        attended: torch.Tensor = self.attention(q, k, v)
        out: torch.Tensor = self.o_proj(attended.flatten(2))
        return out
