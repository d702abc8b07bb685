"""Transformers' config of the checkpoints that ``sparsek_backend.nn.NSALlamaForCausalLM`` saves.

vLLM reads a model's config through Transformers.  Importing this module registers the class there,
in spawned processes too, which unpickle it.  The model that belongs to it is in
:mod:`sparsek_backend.transformers_model`.
"""

from __future__ import annotations

from transformers import AutoConfig, LlamaConfig


class NSALlamaHFConfig(LlamaConfig):  # type: ignore[misc]
    """Llama's fields, and the ``nsa`` section as a dict."""

    model_type = "nsa_llama"
    # Llama's plans would cut the stacked projections in wrong places.
    base_model_tp_plan = None
    base_model_pp_plan = None


AutoConfig.register(NSALlamaHFConfig.model_type, NSALlamaHFConfig, exist_ok=True)
