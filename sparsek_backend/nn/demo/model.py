"""A small causal transformer with native sparse attention, or its twin with dense attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparsek_backend.distributed import SequenceLayout, context_parallel_sink_flash_attention
from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.nn.native_sparse_attention import NativeSparseAttention
from sparsek_backend.nn.rotary import rotate

AttentionKind = Literal["nsa", "dense"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer.

    Args:
        hidden_size: elements of a token.
        num_layers: blocks.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: elements of a head.
        nsa: settings of the sparse attention; compression starts as the mean of a block.
    """

    hidden_size: int = 256
    num_layers: int = 2
    num_heads: int = 16
    num_kv_heads: int = 1
    head_dim: int = 128
    nsa: NSAConfig = field(default_factory=lambda: NSAConfig(cmp_hidden_size=256))


def sparse_attention(config: ModelConfig, **options: Any) -> NativeSparseAttention:
    """The sparse attention of a block; ``options`` are further arguments of the layer."""
    sizes = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim)
    return NativeSparseAttention(*sizes, config=config.nsa, **options)


class DenseAttention(nn.Module):
    """Causal attention with the projections and the rotary embedding of its sparse twin."""

    def __init__(self, config: ModelConfig, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, layout: SequenceLayout | None = None) -> torch.Tensor:
        """``[B, N, hidden]`` to the same shape; see :meth:`RecallModel.forward`."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        theta = self.config.nsa.rope_theta
        if theta is not None:
            if self.mesh is None or layout is None:
                positions = torch.arange(x.shape[1], device=x.device)
            else:
                positions = layout.position_ids(self.mesh.get_local_rank(), x.device)
            q, k = rotate(q, positions, theta), rotate(k, positions, theta)
        out: Any
        if self.mesh is None or layout is None:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ).transpose(1, 2)
        else:
            out = context_parallel_sink_flash_attention(q, k, v, mesh=self.mesh, layout=layout)
        projected: torch.Tensor = self.o_proj(out.flatten(2))
        return projected


class Block(nn.Module):
    """Pre-norm attention and a gated MLP."""

    def __init__(
        self, config: ModelConfig, kind: AttentionKind, mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.attention_norm = nn.RMSNorm(size)
        self.attention: nn.Module
        if kind == "nsa":
            self.attention = sparse_attention(config, mesh=mesh)
        else:
            self.attention = DenseAttention(config, mesh)
        self.mlp_norm = nn.RMSNorm(size)
        self.up = nn.Linear(size, 4 * size, bias=False)
        self.down = nn.Linear(2 * size, size, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        compressed_only: torch.Tensor | None = None,
        layout: SequenceLayout | None = None,
    ) -> torch.Tensor:
        """``[B, N, hidden]`` to the same shape; see :meth:`RecallModel.forward`."""
        given = {"compressed_only": compressed_only, "layout": layout}
        options = {name: value for name, value in given.items() if value is not None}
        x = x + self.attention(self.attention_norm(x), **options)
        gate, value = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        mixed: torch.Tensor = x + self.down(nn.functional.silu(gate) * value)
        return mixed


class RecallModel(nn.Module):
    """Embedding, blocks, norm, and the embedding again as the head.

    Every token is embedded together with the one before it, as short convolutions do, so that a
    value knows its key from the start: what is left to learn is attention over a distance.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        kind: AttentionKind,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if kind not in ("nsa", "dense"):
            raise ValueError(f"kind: expected 'nsa' or 'dense', got {kind!r}")
        self.embedding = nn.Embedding(vocab_size, config.hidden_size)
        self.previous = nn.Embedding(vocab_size, config.hidden_size)
        for table in (self.embedding, self.previous):
            nn.init.normal_(table.weight, std=config.hidden_size**-0.5)
        self.blocks = nn.ModuleList(Block(config, kind, mesh) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)

    def forward(
        self,
        tokens: torch.Tensor,
        compressed_only: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
        layout: SequenceLayout | None = None,
    ) -> torch.Tensor:
        """Logits of the next tokens.

        Args:
            tokens: ``[B, N]``.
            compressed_only: ``[B]`` bool, sequences in which sparse attention has its compressed
                branch alone.
            before: the token before each one, -1 for none; from ``tokens`` when ``None``.
            layout: with a mesh, which rank holds which tokens.

        Returns:
            ``[B, N, vocab]``.

        Raises:
            TypeError: ``compressed_only`` for dense attention, which has no branches.
        """
        before = tokens_before(tokens) if before is None else before
        x = self.embedding(tokens) + self.previous(before.clamp(min=0)) * (before >= 0)[..., None]
        for block in self.blocks:
            x = block(x, compressed_only, layout)
        logits: torch.Tensor = nn.functional.linear(self.norm(x), self.embedding.weight)
        return logits


def tokens_before(tokens: torch.Tensor) -> torch.Tensor:
    """The token before each of ``tokens [B, N]``, -1 for the first."""
    return nn.functional.pad(tokens[:, :-1], (1, 0), value=-1)
