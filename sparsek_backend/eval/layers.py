"""Queries, keys and values of every layer of a model, as it reads a prompt through Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

Record: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""Gets a layer's index, q ``[1, N, Hq, D]``, k and v ``[1, N, Hkv, D]``, and the softmax scale."""

_IMPLEMENTATION = "sparsek_layers"


class LayerReader:
    """A model that shows what its causal layers of full attention attend with.

    Args:
        model: folder or name; it is loaded onto a GPU if there is one.

    Raises:
        ImportError: Transformers is not installed.
    """

    def __init__(self, model: str) -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise ImportError(
                "this needs Transformers: pip install 'sparsek-backend[eval]'"
            ) from error
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        with _implementation(lambda *_: None):
            loaded = AutoModelForCausalLM.from_pretrained(
                model, dtype="auto", attn_implementation=_IMPLEMENTATION
            )
        self._model: Any = loaded.to(self.device).eval()

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and KV heads."""
        config = self._model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return config.num_hidden_layers, heads

    def read(self, ids: Sequence[int], record: Record) -> None:
        """Run the model over token ids, densely.

        Raises:
            ValueError: no layer was shown: the model has none of full attention.
        """
        seen = []

        def count(layer: int, *states: Any) -> None:
            seen.append(layer)
            record(layer, *states)

        with _implementation(count), torch.inference_mode():
            tokens = torch.tensor([list(ids)], device=self.device)
            self._model(tokens, use_cache=False, logits_to_keep=1)
        if not seen:
            raise ValueError("model: expected causal layers of full attention, it has none")


@contextmanager
def _implementation(record: Record) -> Iterator[None]:
    """Let SDPA serve the models loaded here, and show every layer's queries and keys."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if getattr(module, "is_causal", True) and kwargs.get("sliding_window") is None:
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            record(int(getattr(module, "layer_idx", 0)), q, k, v, scale)
        found: tuple[torch.Tensor, None] = sdpa(module, query, key, value, attention_mask, **kwargs)
        return found

    ALL_ATTENTION_FUNCTIONS[_IMPLEMENTATION] = attention
    ALL_MASK_ATTENTION_FUNCTIONS[_IMPLEMENTATION] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[_IMPLEMENTATION]
        del ALL_MASK_ATTENTION_FUNCTIONS[_IMPLEMENTATION]
