"""Small random natively sparse models: a folder for vLLM, and the module it was saved from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from sparsek_backend.nn import NSAConfig, NSALlamaConfig, NSALlamaForCausalLM

NSA = NSAConfig(
    cmp_block_size=16,
    cmp_stride=8,
    sel_block_size=32,
    top_n=5,
    window_size=48,
    rope_theta=1000.0,
)
"""Of some hundred tokens' blocks, two are chosen by score."""
CONFIG = NSALlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    nsa=NSA,
)
VARIANTS: dict[str, NSALlamaConfig] = {
    "independent": CONFIG,
    "shared": replace(
        CONFIG,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        attention_bias=True,
        nsa=replace(NSA, shared_kv=True, compression="mean"),
    ),
}


def make_model(config: NSALlamaConfig, folder: Path) -> NSALlamaForCausalLM:
    """A model, saved to ``folder``, whose weights are large: a wrong mask changes its tokens."""
    state = torch.random.get_rng_state()
    torch.manual_seed(11)
    model = NSALlamaForCausalLM(config).requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "phi" not in name:
            torch.nn.init.normal_(weight, std=0.15)
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    return model


def complete(model: NSALlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """Greedy completion by the torch module itself, one token at a time over its own cache."""
    device = model.lm_head.weight.device
    caches = model.new_caches(1, len(prompt) + count)
    tokens = torch.tensor([prompt], device=device)
    found: list[int] = []
    for _ in range(count):
        best = int(model(tokens, caches)[0, -1].argmax())
        found.append(best)
        tokens = torch.tensor([[best]], device=device)
    return found
