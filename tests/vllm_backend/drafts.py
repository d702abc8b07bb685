"""Random draft models of the tiny Llama, as vLLM loads them to speculate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.vllm_backend.tiny_models import COMMON, DECODER, VOCABULARY

HIDDEN, KV = DECODER["hidden_size"], 64


def _weights(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [0.1 * torch.randn(*shape, generator=generator) for shape in shapes]


def make_draft(method: str, folder: Path) -> Path:
    """Random weights of an EAGLE or EAGLE-3 head for the tiny Llama."""
    from safetensors.torch import save_file

    third = method == "eagle3"
    inputs = 2 * HIDDEN if third else HIDDEN
    layer = "midlayer" if third else "layers.0"
    shapes = {
        "fc.weight": (HIDDEN, (3 if third else 2) * HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (HIDDEN, inputs),
        f"{layer}.self_attn.k_proj.weight": (KV, inputs),
        f"{layer}.self_attn.v_proj.weight": (KV, inputs),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}.mlp.gate_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, HIDDEN),
    }
    if third:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    weights = dict(zip(shapes, _weights(*shapes.values()), strict=True))
    norms = ["post_attention_layernorm"]
    norms += ["hidden_norm", "input_layernorm"] if third else []
    weights |= {f"{layer}.{name}.weight": torch.ones(HIDDEN) for name in norms}
    if third:
        weights["norm.weight"] = torch.ones(HIDDEN)
    save_file(weights, folder / "model.safetensors")
    config = {
        **COMMON,
        **DECODER,
        "num_hidden_layers": 1,
        "model_type": "llama",
        "architectures": ["Eagle3LlamaForCausalLM" if third else "EagleLlamaForCausalLM"],
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "draft_vocab_size": VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    folder.joinpath("config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def speculation(method: str, target: Path, folder: Path) -> dict[str, Any]:
    """Options of an engine that speculates; a draft model is the target itself."""
    if method == "ngram":  # any token that the text had before
        asked = {"method": method, "num_speculative_tokens": 2, "prompt_lookup_min": 1}
        return {"speculative_config": {**asked, "prompt_lookup_max": 3}}
    draft = target if method == "draft_model" else make_draft(method, folder)
    return {
        "speculative_config": {"method": method, "model": str(draft), "num_speculative_tokens": 2}
    }
