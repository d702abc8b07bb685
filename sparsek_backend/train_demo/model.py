"""The demo's models: a natively sparse Llama, and the same with dense attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparsek_backend.distributed import SequenceLayout, context_parallel_sink_flash_attention
from sparsek_backend.nn import NSAConfig, NSALlamaConfig, NSALlamaForCausalLM
from sparsek_backend.train_demo.task import KEYS, VALUES
from sparsek_kernels import sink_flash_attention

SIZES = NSALlamaConfig(
    vocab_size=VALUES + 1,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    nsa=NSAConfig(
        cmp_block_size=8, cmp_stride=4, sel_block_size=8, top_n=4, num_init_blocks=0,
        num_local_blocks=1, window_size=16, cmp_hidden_size=64, rope_theta=None,
    ),
)  # fmt: skip
"""A query attends 4 blocks of 8 tokens, 16 tokens before it, and compressed blocks."""


class DenseAttention(nn.Module):
    """Causal attention without positions, in the place of native sparse attention."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh, hidden = mesh, SIZES.hidden_size
        wide = SIZES.num_attention_heads * SIZES.head_dim
        narrow = SIZES.num_key_value_heads * SIZES.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(hidden, size, bias=False) for size in (wide, narrow, narrow)
        )
        self.o_proj = nn.Linear(wide, hidden, bias=False)

    def forward(
        self, x: torch.Tensor, *, layout: SequenceLayout | None = None, **_: Any
    ) -> torch.Tensor:
        """``[B, N, hidden]`` to the same shape."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, SIZES.head_dim)) for project in projections)
        out: Any
        if self.mesh is None or layout is None:
            out = sink_flash_attention(q, k, v)
        else:
            out = context_parallel_sink_flash_attention(q, k, v, mesh=self.mesh, layout=layout)
        projected: torch.Tensor = self.o_proj(out.flatten(2))
        return projected


class PairEmbedding(nn.Module):
    """Tokens of the task as the sum of their key's and their value's vector."""

    def __init__(self, values: nn.Embedding) -> None:
        super().__init__()
        self.values, self.keys = values, nn.Embedding(KEYS + 1, values.embedding_dim)
        nn.init.normal_(self.keys.weight, std=values.embedding_dim**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[B, N]`` to ``[B, N, hidden]``."""
        pair: torch.Tensor = self.keys(tokens // (VALUES + 1)) + self.values(tokens % (VALUES + 1))
        return pair


def make_model(kind: str, mesh: DeviceMesh | None = None) -> NSALlamaForCausalLM:
    """A model of fresh weights, whose logits ``[B, N, VALUES + 1]`` are of values."""
    model = NSALlamaForCausalLM(SIZES, mesh)
    model.model.add_module("embed_tokens", PairEmbedding(model.model.embed_tokens))
    if kind == "dense":
        for layer in model.model.layers:
            layer.self_attn = DenseAttention(mesh)
    return model
