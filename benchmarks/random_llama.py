"""A small Llama with random weights as a Hugging Face folder, and answers to compare.

Unlike ``load_format="dummy"``, the weights are one checkpoint whatever the number of GPUs, and
large enough that attention and the next token are decided, not ties.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 1 << 18,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
QUERY_GAIN = 2.0
LOGIT_GAIN = 2.0


def write_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write config and weights; returns ``folder``.

    Args:
        seed: of the weights.
        changes: fields of the config besides :data:`SHAPE`; ``num_local_experts`` makes it a
            Mixtral, each of whose experts has a quarter of the neurons.
    """
    from safetensors.torch import save_file

    shape = {**SHAPE, **changes}
    experts = shape.get("num_local_experts", 0)
    if experts:
        shape |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        shape |= {"num_experts_per_tok": 2, "intermediate_size": shape["intermediate_size"] // 4}
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    hidden, inner, vocab = (
        shape[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    dim = shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    weights = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(vocab, hidden, LOGIT_GAIN),
    }
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}self_attn.q_proj.weight": matrix(heads, hidden, QUERY_GAIN),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_heads, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_heads, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, heads),
        }
        if experts:
            weights[f"{prefix}block_sparse_moe.gate.weight"] = matrix(experts, hidden, QUERY_GAIN)
        for mlp, (gate, up, down) in mlps_of(shape, layer):
            weights |= {
                f"{mlp}.{gate}.weight": matrix(inner, hidden),
                f"{mlp}.{up}.weight": matrix(inner, hidden),
                f"{mlp}.{down}.weight": matrix(hidden, inner),
            }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape, indent=1), encoding="utf-8")
    return folder


def mlps_of(shape: Mapping[str, Any], layer: int) -> list[tuple[str, tuple[str, str, str]]]:
    """Names of the layer's MLPs, or experts, and of their gate, up and down projections."""
    prefix = f"model.layers.{layer}"
    if "num_local_experts" not in shape:
        return [(f"{prefix}.mlp", ("gate_proj", "up_proj", "down_proj"))]
    names = [f"{prefix}.block_sparse_moe.experts.{i}" for i in range(shape["num_local_experts"])]
    return [(name, ("w1", "w3", "w2")) for name in names]


def reorder_neurons(source: Path, folder: Path, seed: int = 1) -> Path:
    """Write the same model with the neurons of every MLP in another order; returns ``folder``.

    Both compute the same sums in different orders: their answers differ by rounding alone.
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(seed)
    for layer in range(config["num_hidden_layers"]):
        for mlp, (gate, up, down) in mlps_of(config, layer):
            order = torch.randperm(config["intermediate_size"], generator=generator)
            for name in (gate, up):
                weights[f"{mlp}.{name}.weight"] = weights[f"{mlp}.{name}.weight"][order]
            last = f"{mlp}.{down}.weight"
            weights[last] = weights[last][:, order].contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def random_prompts(lengths: Sequence[int], seed: int, texts: int = 8) -> list[list[int]]:
    """Prompts of these lengths, each the beginning of one of a few texts of random tokens."""
    draw = random.Random(seed)
    longest = max(lengths)
    bases = [draw.choices(range(10, SHAPE["vocab_size"]), k=longest) for _ in range(texts)]
    return [bases[index % texts][:length] for index, length in enumerate(lengths)]


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one request.

    Args:
        tokens: generated tokens.
        logprobs: of each of them.
        known: for each place, log-probabilities of the best tokens.
    """

    tokens: list[int]
    logprobs: list[float]
    known: list[dict[int, float]]

    @classmethod
    def of(cls, output: Any) -> Answer:
        """Read vLLM's ``RequestOutput``, which was asked for log-probabilities."""
        (one,) = output.outputs
        tokens = list(one.token_ids)
        known = [{token: entry.logprob for token, entry in place.items()} for place in one.logprobs]
        logprobs = [place[token] for place, token in zip(known, tokens, strict=True)]
        return cls(tokens, logprobs, known)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Answer:
        """Undo ``dataclasses.asdict`` and JSON, whose keys are text."""
        known = [{int(token): value for token, value in place.items()} for place in data["known"]]
        return cls(list(data["tokens"]), list(data["logprobs"]), known)


@dataclass(frozen=True)
class Difference:
    """How an answer differs from the expected one.

    Args:
        gap: how much less likely the expected run held the first token that differs than its own;
            ``None`` where all tokens are equal.
        distance: largest difference of log-probabilities of the tokens before that.
        equal: how many tokens there are before that.
    """

    gap: float | None
    distance: float
    equal: int


def compare(answer: Answer, expected: Answer) -> Difference:
    """Compare two answers to one prompt."""
    distance = 0.0
    for place, (ours, theirs) in enumerate(zip(answer.tokens, expected.tokens, strict=True)):
        if ours != theirs:
            known = expected.known[place]
            gap = known[theirs] - known[ours] if ours in known else math.inf
            return Difference(gap, distance, place)
        distance = max(distance, abs(answer.logprobs[place] - expected.logprobs[place]))
    return Difference(None, distance, len(answer.tokens))
