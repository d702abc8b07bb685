"""Checks that the layers of every kind make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_WITHOUT_EFFECT = {
    "chunk_lookback": -1,
    "dual_chunk_attention_config": None,
    "use_alibi_sqrt": False,
}
"""Keywords of vLLM's that change nothing of the attention with these values."""


def refuse_options(options: Mapping[str, Any]) -> None:
    """Refuse keywords of vLLM's that change what a layer attends."""
    for name, value in options.items():
        if name == "layer_idx" or (name in _WITHOUT_EFFECT and value == _WITHOUT_EFFECT[name]):
            continue
        raise NotImplementedError(
            f"SPARSEK: {name}={value!r} of vLLM's attention layer is not served; "
            "leave --attention-backend out"
        )


def refuse_quantised_output(
    output_scale: torch.Tensor | None, output_block_scale: torch.Tensor | None
) -> None:
    """Refuse what vLLM passes where it fuses attention with the quantisation of its output."""
    if output_scale is not None or output_block_scale is not None:
        raise NotImplementedError(
            "output_scale: fused output quantisation is not supported; disable the "
            "attention-quantisation fusion pass"
        )


def refuse_sdpa(reason: str | None, fp8_cache: bool, batch_invariant: bool) -> None:
    """Refuse an fp8 cache and batch invariance of a layer that torch SDPA serves.

    Args:
        reason: why torch SDPA serves the layer, or ``None`` where it does not.

    Raises:
        NotImplementedError: the layer has an fp8 cache, or is batch-invariant.
    """
    served = f"SPARSEK: {reason} is served by torch SDPA, which"
    if reason is not None and fp8_cache:
        raise NotImplementedError(f"{served} reads no fp8 KV cache; use --kv-cache-dtype auto")
    if reason is not None and batch_invariant:
        raise NotImplementedError(
            f"{served} rounds by the batch's shape; unset VLLM_BATCH_INVARIANT"
        )


def refuse_choosing(
    layer_index: int, head_size: int, rotation: torch.Tensor | None, owned: bool
) -> None:
    """Refuse blocks that are chosen by pages of another backend, or by heads of another size.

    Args:
        rotation: cos and sin ``[positions, D]`` by which positions are undone, if they are.
        owned: whether SPARSEK writes the layer's pages.

    Raises:
        NotImplementedError: the layer cannot choose.
    """
    if not owned:
        raise NotImplementedError(
            "SPARSEK: a layer that selects blocks shares the KV cache of another backend's "
            "layer, which writes no block summaries; select SPARSEK for every layer"
        )
    if rotation is not None and rotation.shape[1] != head_size:
        raise NotImplementedError(
            f"SPARSEK: layer {layer_index} has heads of {head_size} channels, and blocks are "
            f"ranked without the positions of heads of {rotation.shape[1]}; use dense_layers with "
            "it, or mode block_topk"
        )


def fp8_scales(layer: Any) -> tuple[float, float]:
    """Return ``(k_scale, v_scale)`` of a layer with an fp8 cache.

    Raises:
        ValueError: one of them is not positive.
    """
    k_scale, v_scale = float(layer._k_scale_float), float(layer._v_scale_float)
    if not (k_scale > 0.0 and v_scale > 0.0):
        raise ValueError(
            f"k_scale, v_scale: expected positive numbers, got {k_scale} and {v_scale}; "
            "correct the checkpoint's, or use --kv-cache-dtype auto"
        )
    return k_scale, v_scale
