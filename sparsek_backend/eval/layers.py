"""Queries, keys and values of every layer of a model, as it reads a prompt through Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from sparsek_backend.extras import needing

Record: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""Gets a layer's index, q ``[1, N, Hq, D]``, k and v ``[1, N, Hkv, D]``, and the softmax scale."""


def read_layers(model: str, ids: Sequence[int], record: Record) -> None:
    """Let a model read token ids densely, and show what its layers of full attention attend with.

    Args:
        model: folder or name; it is loaded onto a GPU if there is one.

    Raises:
        ImportError: Transformers is not installed.
        ValueError: no layer was shown: the model has none that is causal, of full attention.
    """
    with needing("this needs Transformers", extra="eval"):
        from transformers import AutoModelForCausalLM
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype="auto", attn_implementation="sdpa"
    )
    seen = []

    def count(layer: int, *states: Any) -> None:
        seen.append(layer)
        record(layer, *states)

    with _showing(count), torch.inference_mode():
        tokens = torch.tensor([list(ids)], device=device)
        loaded.to(device).eval()(tokens, use_cache=False, logits_to_keep=1)
    if not seen:
        raise ValueError("model: expected causal layers of full attention, it has none")


@contextmanager
def _showing(record: Record) -> Iterator[None]:
    """Show the queries, keys and values of every layer that SDPA serves here."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        if getattr(module, "is_causal", True) and kwargs.get("sliding_window") is None:
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            record(int(getattr(module, "layer_idx", 0)), q, k, v, scale)
        found: tuple[torch.Tensor, None] = sdpa(module, query, key, value, attention_mask, **kwargs)
        return found

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
