"""Folders of made-up gates, as SeerAttention-R's checkpoints are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sparsek_kernels.paged import Gates
from tests.vllm_backend.tiny_models import DECODER, HEAD_DIM

BLOCK = 32
SECTION = {
    "base_model": "tiny",
    "seerattn_gate_block_size": BLOCK,
    "seerattn_gate_hidden_size": HEAD_DIM,
    "seerattn_token_budget": 4 * BLOCK,
    "seerattn_k_seq_pooling_type": "Kmaxminavg",
    "seerattn_q_head_pooling_type": "Qproj",
    "seerattn_use_qk_norm": True,
    "seerattn_use_rope": True,
}
"""Four blocks: the first one, the token's own and the two that score best."""

HEADS = DECODER["num_key_value_heads"]
GROUP = DECODER["num_attention_heads"] // HEADS


def gates_of(layer: int) -> Gates:
    """The gates that the file has for a layer, in bf16 as published."""
    generator = torch.Generator().manual_seed(layer)

    def draw(*shape: int, shift: float = 0.0) -> torch.Tensor:
        return (shift + 0.2 * torch.randn(shape, generator=generator)).bfloat16().float()

    return Gates(
        draw(HEADS, GROUP, HEAD_DIM, HEAD_DIM),
        draw(HEADS, 3 * HEAD_DIM, HEAD_DIM),
        draw(HEAD_DIM, shift=2.0),
        draw(HEAD_DIM, shift=2.0),
    )


def tensors(layers: int = 2) -> dict[str, torch.Tensor]:
    found = {}
    for layer in range(layers):
        gates, prefix = gates_of(layer), f"model.layers.{layer}.self_attn.attn_gate.attngate_"
        parts = {"linear_q": gates.query, "linear_k": gates.key}
        parts |= {"qnorm": gates.query_norm, "knorm": gates.key_norm}
        found |= {f"{prefix}{part}.weight": x.bfloat16() for part, x in parts.items()}
    return found


def make_gates_folder(
    folder: Path, weights: dict[str, torch.Tensor] | None = None, **changes: Any
) -> Path:
    """Write gates into a folder, beside what it has; a field that is ``None`` is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    written = {**old, **SECTION, **changes}
    written = {name: value for name, value in written.items() if value is not None}
    path.write_text(json.dumps(written), encoding="utf-8")
    torch.save(tensors() if weights is None else weights, folder / "attn_gate_weights.pth")
    return folder
