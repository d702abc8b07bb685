"""vLLM's load format `random`: random weights with which attention decides the next token.

vLLM's own `dummy` weights are so small that every layer adds less than rounding: a wrong attention
would give the same answers.  Here each matrix keeps the size of what it multiplies.

An engine takes `load_format="random"` with `worker_extension_cls=EXTENSION`: its workers import
this module for the extension, before they load.  `model_loader_extra_config` may have a
`sharpness`: the standard deviation of attention's logits.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

EXTENSION = "benchmarks.random_weights.Extension"
SHARPNESS = 3.0
"""Standard deviation of attention's logits if none is given: a few keys of 128k take most of the
mass."""
LOGIT_GAIN = 2.0
"""Standard deviation of the logits of the next token."""


class Extension:
    """Nothing is added to vLLM's worker; naming this class has the module imported."""


@register_model_loader("random")
class RandomWeights(BaseModelLoader):
    """Draws the same weights for every backend."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill `model` in place."""
        config = model_config.hf_text_config
        sharpness = self.load_config.model_loader_extra_config.get("sharpness", SHARPNESS)
        torch.manual_seed(0)
        for name, weight in model.named_parameters():
            draw(name, weight.data)
        for name, layer in model.named_modules():
            if name.endswith("qkv_proj"):
                scale = getattr(config, "attention_multiplier", layer.head_size**-0.5)
                queries = layer.weight.data[: layer.num_heads * layer.head_size]
                queries.mul_(sharpness / (scale * math.sqrt(layer.head_size)))
            elif name.endswith("embed_tokens"):
                layer.weight.data.div_(getattr(config, "embedding_multiplier", 1.0))
            elif name.endswith("lm_head"):
                layer.weight.data.mul_(LOGIT_GAIN * getattr(config, "logits_scaling", 1.0))


def draw(name: str, weight: torch.Tensor) -> None:
    """Fill one parameter of a decoder, or of a Mamba-2 mixer, in place."""
    last = name.rsplit(".", 1)[-1]
    if last == "A":  # the state's decay: from slow to fast
        weight.copy_(-torch.linspace(1, 16, weight.numel()).view_as(weight))
    elif last == "dt_bias":  # steps of softplus(-3), about 0.05
        weight.fill_(-3.0)
    elif last == "D" or (weight.ndim == 1 and "norm" in name):
        weight.fill_(1.0)
    elif weight.ndim == 1:
        weight.zero_()
    elif "embed_tokens" in name:
        weight.normal_()
    else:
        weight.normal_(std=1 / math.sqrt(weight[0].numel()))
