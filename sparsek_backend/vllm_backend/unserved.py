"""Models whose attention SPARSEK does not serve, and which ask no backend about it.

vLLM's class of such a model passes a keyword that changes what is attended, or brings layers or a
backend of its own.  ``tests/vllm_backend/vllm_models.py`` finds these classes in vLLM's sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .sparsek.backend import LEAVE

_OWN = "attention layers of the model's own, to which --attention-backend does not apply,"

ARCHITECTURES: Mapping[str, str] = {
    "DiffusionGemma": "causality that differs between the requests of a step",
    "HrmText": "attention to the whole prompt from each of its tokens",
    "Inkling": _OWN,
    "MiniMaxM3": _OWN,
    "Qwen4Exp": _OWN,
    "SarvamMLA": "MLA",
    "Step1For": "ALiBi with square-root distances",
    "Step5": _OWN,
    "VoxtralRealtime": "an audio encoder with KV pages of its own",
}
"""What is not served, by how the names of the model's classes begin."""


def unserved_attention(model: Any) -> list[str]:
    """Return why the attention of a model is not served, each reason with its remedy."""
    config = model.hf_text_config
    names = tuple(model.architectures)

    def is_one_of(beginning: str) -> bool:
        return any(name.startswith(beginning) for name in names)

    found = [what for beginning, what in ARCHITECTURES.items() if is_one_of(beginning)]
    if is_one_of("MiMoV2") and _has_other_values(config):
        found.append(
            "values of another head size than keys, for which vLLM replaces SPARSEK by a _DIFFKV "
            "backend,"
        )
    if getattr(config, "param_sink_number", 0):
        found.append("learned keys and values (param_sink_number)")
    if is_one_of("Rnj1") and "chunked_attention" in config.layer_types:
        found.append("chunks that attend the one before them (chunk_lookback)")
    reasons = [f"{what} not supported (remedy: {LEAVE})" for what in found]
    if any(
        getattr(each, "dual_chunk_attention_config", None) for each in (config, model.hf_config)
    ):
        reasons.append(
            "dual chunk attention (dual_chunk_attention_config) not supported (remedy: remove that "
            "section from the model's config.json, which then attends without chunks)"
        )
    return reasons


def _has_other_values(config: Any) -> bool:
    """Whether values of any layer have another head size than keys."""
    sizes = (("head_dim", "v_head_dim"), ("swa_head_dim", "swa_v_head_dim"))
    return any(
        getattr(config, value, None) not in (None, getattr(config, key, None))
        for key, value in sizes
    )
