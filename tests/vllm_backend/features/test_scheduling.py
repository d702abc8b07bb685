"""What changes the order of the work changes no token, while queries select blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_backend.engines import (
    counted_forwards,
    engine,
    generate,
    requires_cpu_vllm,
    tokens,
)
from tests.vllm_backend.tiny_models import COMMON, DECODER, VOCABULARY, make_tiny_model

pytestmark = [pytest.mark.engine, requires_cpu_vllm, pytest.mark.usefixtures("registered")]

SPARSE = {
    "dense_below": 0,
    "num_sink": 16,
    "window_size": 64,
    "sel_block_size": 32,
    "top_k": 3,
    "query_tile": 1,
}
COVERING = {"dense_below": 0, "top_k": 32, "window_size": 32, "sel_block_size": 32}
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
    draft = target if method == "draft_model" else make_draft(method, folder)
    asked = {"method": method, "model": str(draft), "num_speculative_tokens": 2}
    return {"speculative_config": asked}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (1, 33, 150, 390)
    ]


def answers(
    model: Path,
    prompts: list[list[int]],
    settings: dict[str, Any] = SPARSE,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Greedy tokens, and what the engine counted; SPARSEK's forward ran."""
    with (
        counted_forwards() as calls,
        engine(
            model,
            "SPARSEK",
            settings,
            max_model_len=500,
            max_num_batched_tokens=128,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **options,
        ) as llm,
    ):
        found = tokens(generate(llm, prompts, together=True, max_tokens=24))
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    assert calls["SPARSEK"] > 0
    return found, counts


@pytest.fixture(scope="module")
def plain(registered: None, llama: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens without asynchronous scheduling and without speculation."""
    return answers(llama, prompts, async_scheduling=False)[0]


def test_async_scheduling(llama: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    assert answers(llama, prompts, async_scheduling=True)[0] == plain


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_speculation(
    method: str, llama: Path, prompts: list[list[int]], plain: list[list[int]], tmp_path: Path
) -> None:
    found, counts = answers(llama, prompts, **speculation(method, llama, tmp_path))
    assert found == plain
    assert counts["vllm:spec_decode_num_draft_tokens"] > 0
    if method == "draft_model":
        assert counts["vllm:spec_decode_num_accepted_tokens"] > 0


def test_mtp(prompts: list[list[int]], tmp_path: Path) -> None:
    model = make_tiny_model("mtp", tmp_path)
    asked = {"method": "mtp", "num_speculative_tokens": 1}
    found, counts = answers(model, prompts, speculative_config=asked)
    assert counts["vllm:spec_decode_num_draft_tokens"] > 0
    assert found == answers(model, prompts)[0]


def test_fast_prefill_of_shared_caches(prompts: list[list[int]], tmp_path: Path) -> None:
    """Layers that share another layer's KV attend the last tokens of prompts alone."""
    model = make_tiny_model("shared_kv", tmp_path)
    expected, _ = answers(model, prompts, COVERING)
    assert answers(model, prompts, COVERING, kv_sharing_fast_prefill=True)[0] == expected
