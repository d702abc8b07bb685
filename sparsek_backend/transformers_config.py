"""Transformers' config of the checkpoints that ``sparsek_backend.nn.NSALlamaForCausalLM`` saves.

vLLM reads a model's config through Transformers, and its workers unpickle it from here.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from sparsek_backend.transformers_hook import MODEL_TYPE


class NSALlamaHFConfig(LlamaConfig):  # type: ignore[misc]
    """Llama's fields with ``NSALlamaConfig``'s defaults, and the ``nsa`` section as a dict."""

    model_type = MODEL_TYPE
    # Llama's plans would cut the stacked projections in wrong places.
    base_model_tp_plan = None
    base_model_pp_plan = None

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, **values})
