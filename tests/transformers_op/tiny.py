"""A small random Llama and the masks that a policy stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is not installed (the eval extra)")

from transformers import LlamaConfig, LlamaForCausalLM

import sparsek_backend.transformers_op as sparsek

VOCABULARY = 97


def make_model(seed: int = 0, **fields: Any) -> Any:
    """Two layers, six query heads on two KV heads of 16, fp32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        **fields,
    )
    return LlamaForCausalLM(config).eval()


def configure(model: Any, **settings: Any) -> Any:
    """Settings of a model that attends by SparseK from now on."""
    model.set_attn_implementation("sparsek")
    return sparsek.configure(model, **settings)


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids ``[batch, length]``, none of them the padding token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def logits(model: Any, implementation: str, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Logits ``[batch, length, VOCABULARY]`` without gradients."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        found: torch.Tensor = model(ids, **arguments).logits
    return found


def visible(length: int, num_sink: int, window_size: int, dense_below: int = 0) -> torch.Tensor:
    """Sink-window visibility ``[1, 1, length, length]``, bool, written out."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i + 1):
            seen[i, j] = j < num_sink or j > i - window_size or i < dense_below
    return seen[None, None]
