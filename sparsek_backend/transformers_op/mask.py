"""The mask that Transformers builds for SparseK: none, padding alone, or everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask


def sparsek_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    cache_position: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Describe the visible keys as little as possible; kernels know causality and windows.

    Args:
        batch_size: sequences.
        q_length: new tokens.
        kv_length: keys, cached ones included.
        q_offset: position of the first new token.
        kv_offset: position of the first key.
        mask_function: Transformers' rule for one query and key.
        attention_mask: ``[batch_size, tokens]`` bool, False marks padding.
        allow_is_causal_skip: False where more than causality, a window and padding is asked for.
        local_size: the window of a sliding layer.
        cache_position: positions of the new tokens, from Transformers that pass these instead of
            ``q_length`` and ``q_offset`` (before 5.5).
        kwargs: the rest of what Transformers passes to mask functions.

    Returns:
        ``None`` where nothing is masked beyond causality and the window;
        ``[batch_size, kv_length]`` bool where padding is; else the full
        ``[batch_size, 1, q_length, kv_length]`` bool mask.

    Raises:
        NotImplementedError: padding, or a custom mask, over a cache that dropped keys.
    """
    queries = {"q_length": q_length, "q_offset": q_offset}
    if cache_position is not None:
        queries = {"cache_position": cache_position}
        q_length, q_offset = cache_position.shape[0], int(cache_position[0])
    elif q_length is None:
        raise TypeError("q_length: expected an integer where cache_position is not given")
    plain = allow_is_causal_skip and (
        mask_function is causal_mask_function or local_size is not None
    )
    padding = attention_mask
    if padding is not None and padding.dim() == 2 and bool(padding.all()):
        padding = None
    dropped = attention_mask is not None and attention_mask.shape[-1] > kv_offset + kv_length
    if dropped and (padding is not None or not plain):
        raise NotImplementedError(
            "attention_mask: a SinkWindowCache that has dropped keys serves batches without "
            "padding and plain causal masks only; use equally long sequences or a DynamicCache"
        )
    # A static cache has room for keys to come, so its last key is not the last query's.
    aligned = isinstance(q_offset, int) and q_offset + q_length >= kv_offset + kv_length
    if plain and aligned:
        if padding is None:
            return None
        return padding[:, kv_offset : kv_offset + kv_length]
    # Without its own skip: SDPA reads "no mask" over a longer static cache as aligned to the left.
    full: torch.Tensor | None = sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        **queries,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        local_size=local_size,
        **kwargs,
    )
    return full
