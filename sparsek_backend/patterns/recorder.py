"""Counting the attention mass of every layer while a Transformers model runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch

from sparsek_backend.patterns.learn import BlockMass
from sparsek_backend.transformers_op import sparsek_mask

# Transformers is there: the import above says so, or how to install it.
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # isort: skip
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # isort: skip
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # isort: skip

_NAME = "sparsek_block_mass"
_masses: ContextVar[tuple[int, dict[int, BlockMass]]] = ContextVar("_masses")


def recorded_mass(
    model: Any, batches: Iterable[torch.Tensor], block_size: int
) -> dict[int, BlockMass]:
    """Run the model on token ids ``[B, N]`` and return the mass of each layer, by its index."""
    masses: dict[int, BlockMass] = {}
    before = model.config._attn_implementation
    token = _masses.set((block_size, masses))
    model.set_attn_implementation(_NAME)
    try:
        with torch.no_grad():
            for ids in batches:
                model(ids.to(model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
        _masses.reset(token)
    return masses


def _attend_and_record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA, after counting the mass of query ``[B, Hq, N, D]`` on key ``[B, Hkv, N, D]``."""
    if attention_mask is not None or kwargs.get("sliding_window") is not None:
        raise NotImplementedError(
            "model: patterns are learned from plain causal layers, got a sliding window or a mask; "
            "record q and k and use learn_pattern instead"
        )
    block_size, masses = _masses.get()
    layer: Any = module.layer_idx
    if layer not in masses:
        masses[layer] = BlockMass(block_size, softmax_scale=scaling)
    masses[layer].add(query.transpose(1, 2), key.transpose(1, 2))
    found: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, None, scaling=scaling, **kwargs
    )
    return found


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend_and_record)
ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, sparsek_mask)
