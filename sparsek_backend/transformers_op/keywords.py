"""Keywords that Transformers' models pass to attention functions: harmless, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_CONTINUOUS = (
    "Transformers' continuous batching is not supported; serve with vLLM, or use model.generate "
    "with attn_implementation='sparsek'"
)
_SELECTION = "a model that chooses its own keys is not supported by SparseK; use 'sdpa' or 'eager'"
OWN_RULES = {
    "block_indices": _SELECTION,
    "indices": _SELECTION,
    "sinks": "sinks of each query are not supported by attn_implementation='sparsek'; use 'eager'",
}
"""Why a keyword by which a model says what its queries attend is refused."""

_REFUSED = OWN_RULES | dict.fromkeys(
    ("block_table", "cache", "read_index", "write_index"), _CONTINUOUS
)
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "input_ids",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "token_type_ids",
        "use_cache",
        "user_cache",  # a slip of Nemotron-H
    }
)
"""Keywords that say nothing about what is attended."""


def check_keywords(given: Mapping[str, Any]) -> None:
    """Refuse keywords that change what is attended, or may do so.

    Raises:
        NotImplementedError: a keyword that is refused, or not known; the message names it.
    """
    for name, value in given.items():
        if value is None or name in _HARMLESS:
            continue
        reason = _REFUSED.get(
            name,
            "attn_implementation='sparsek' does not know whether this changes what is attended; "
            "leave it out, or use 'sdpa' or 'eager'",
        )
        raise NotImplementedError(f"{name}: {reason}")


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's dtype, which rotary embeddings leave queries and keys out of."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
