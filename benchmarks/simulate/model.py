"""A decoder of Qwen2's shape in plain torch, whose attention is handed in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Layer, ``q [H, G, R, D]``, ``k`` and ``v [H, N, D]`` to ``[H, G, R, D]``."""
MLP_ROWS = 8192


@dataclass(frozen=True)
class Prompt:
    """What a model keeps of a prompt: ``(k, v)``, each ``[H, P, D]``, for every layer."""

    cache: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.cache[0][0].shape[1]


class Model:
    """The weights of a folder with ``config.json`` and ``model.safetensors``.

    Args:
        folder: the model's folder.
        device: where it runs.  On a CPU it computes in float32, on a GPU in bf16.
    """

    def __init__(self, folder: Path, device: str) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        found = load_file(folder / "model.safetensors")
        self.weights = {name: value.to(device, dtype) for name, value in found.items()}
        self.device = device
        self.layers: int = config["num_hidden_layers"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.heads: int = config["num_attention_heads"]
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps: float = config["rms_norm_eps"]
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        channels = torch.arange(0, self.head_dim, 2, device=device).float()
        self.frequencies = theta ** -(channels / self.head_dim)
        self.rotation = 1.0  # what YaRN multiplies sines and cosines by
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if scaling.get("rope_type") == "yarn":
            factor, known = scaling["factor"], scaling["original_max_position_embeddings"]
            self.rotation += 0.1 * math.log(factor)
            turns = known * self.frequencies / (2 * math.pi)  # of a channel within the known length
            step = math.log(theta) * 2 / self.head_dim
            # Channels between 32 turns and one, ends rounded outwards, go over to the longer scale.
            first = math.floor(math.log(turns[0].item() / 32) / step)
            last = math.ceil(math.log(turns[0].item()) / step)
            part = ((channels / 2 - first) / (last - first)).clamp(0.0, 1.0)
            self.frequencies = self.frequencies * (1.0 - part + part / factor)

    def prompt(self, tokens: Sequence[int], attend: Attend) -> Prompt:
        """Keys and values of a prompt whose queries attend by ``attend``."""
        x, angles = self._embed(tokens, 0)
        cache = []
        for layer in range(self.layers):
            q, k, v = self._project(layer, x, angles)
            cache.append((k, v))
            if layer + 1 < self.layers:
                x = self._finish(layer, x, attend(layer, q, k, v))
        return Prompt(cache)

    def answer(self, tokens: Sequence[int], prompt: Prompt, attend: Attend) -> torch.Tensor:
        """``[len(tokens), vocabulary]`` fp32 logits of the tokens after each of an answer's."""
        x, angles = self._embed(tokens, prompt.length)
        for layer, (keys, values) in enumerate(prompt.cache):
            q, k, v = self._project(layer, x, angles)
            k, v = torch.cat([keys, k], 1), torch.cat([values, v], 1)
            x = self._finish(layer, x, attend(layer, q, k, v))
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return F.linear(self._norm(x, "model.norm"), head).float()

    def _embed(self, tokens: Sequence[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(tokens, device=self.device)
        positions = torch.arange(start, start + len(tokens), device=self.device)
        angles = positions[:, None].float() * self.frequencies
        return self.weights["model.embed_tokens.weight"][ids], angles

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).to(x.dtype) * self.weights[f"{name}.weight"]

    def _project(
        self, layer: int, x: torch.Tensor, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        name = f"model.layers.{layer}"
        y = self._norm(x, f"{name}.input_layernorm")

        def rows(part: str, heads: int) -> torch.Tensor:
            part = f"{name}.self_attn.{part}_proj"
            made = F.linear(y, self.weights[f"{part}.weight"], self.weights.get(f"{part}.bias"))
            return made.view(len(y), heads, self.head_dim).transpose(0, 1)

        q = _rotate(rows("q", self.heads), angles, self.rotation).unflatten(0, (self.kv_heads, -1))
        return q, _rotate(rows("k", self.kv_heads), angles, self.rotation), rows("v", self.kv_heads)

    def _finish(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        name = f"model.layers.{layer}"
        rows = attended.to(x.dtype).flatten(0, 1).transpose(0, 1).flatten(1)
        x = x + F.linear(rows, self.weights[f"{name}.self_attn.o_proj.weight"])
        y = self._norm(x, f"{name}.post_attention_layernorm")
        gate, up, down = (
            self.weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        parts = [
            F.linear(F.silu(F.linear(z, gate)) * F.linear(z, up), down) for z in y.split(MLP_ROWS)
        ]
        return x + torch.cat(parts)


def _rotate(x: torch.Tensor, angles: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """RoPE of ``[heads, rows, D]``; channel ``d`` turns with channel ``d + D / 2``."""
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
