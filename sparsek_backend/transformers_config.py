"""Transformers' config of the checkpoints that ``sparsek_backend.nn.NSALlamaForCausalLM`` saves.

vLLM reads a model's config through Transformers, and its workers unpickle it from here.
"""

from __future__ import annotations

from transformers import LlamaConfig

from sparsek_backend.transformers_hook import MODEL_TYPE


class NSALlamaHFConfig(LlamaConfig):  # type: ignore[misc]
    """Llama's fields, and the ``nsa`` section as a dict."""

    model_type = MODEL_TYPE
    # Llama's plans would cut the stacked projections in wrong places.
    base_model_tp_plan = None
    base_model_pp_plan = None
