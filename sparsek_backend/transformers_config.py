"""Transformers' config of the checkpoints that ``sparsek_backend.nn.NSALlamaForCausalLM`` saves.

vLLM reads a model's config through Transformers.  Importing this module registers the class there,
in spawned processes too, which unpickle it.  No model class belongs to it: ``AutoModel`` refuses.
"""

from __future__ import annotations

from transformers import AutoConfig, LlamaConfig


class NSALlamaHFConfig(LlamaConfig):  # type: ignore[misc]
    """Llama's fields, and the ``nsa`` section as a dict."""

    model_type = "nsa_llama"


AutoConfig.register(NSALlamaHFConfig.model_type, NSALlamaHFConfig, exist_ok=True)
