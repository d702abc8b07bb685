"""What is decided before an engine starts: its settings, and whether they fit model and machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsek_backend.config import FLAG, SECTION, ConfigError, ResolvedConfig, resolve_config
from sparsek_backend.models import verify_model
from sparsek_kernels.paged.policy import CELL_SIZE


def engine_config(vllm_config: Any) -> ResolvedConfig:
    """Return the settings of an engine, merged from all sources.

    Raises:
        ConfigError: a setting is unknown, invalid, or contradicts another.
    """
    additional = vllm_config.additional_config
    if additional is not None and not isinstance(additional, Mapping):
        raise ConfigError(
            f"SPARSEK setting {FLAG}: expected a JSON object, got {type(additional).__name__}"
        )
    return resolve_config(
        (additional or {}).get(SECTION), os.environ, _model_sparse_config(vllm_config.model_config)
    )


def check_engine(vllm_config: Any) -> None:
    """Stop the start, with one message, if the settings or the model cannot be served.

    Raises:
        ConfigError: invalid settings.
        IncompleteFolderError: the model's folder is half-downloaded or damaged.
        ValueError: the model, its dtype or its KV cache cannot be served.
    """
    resolved = engine_config(vllm_config)
    model = vllm_config.model_config
    if model is None:
        return
    if model.is_encoder_decoder:
        raise ValueError(_refusal(["attention type encoder_decoder not supported"]))
    cache = vllm_config.cache_config
    page_size = cache.block_size if cache.user_specified_block_size else None
    if not getattr(model, "is_attention_free", False):
        refuse_if_invalid(
            {
                "head_size": model.get_head_size(),
                "dtype": model.dtype,
                "kv_cache_dtype": cache.cache_dtype,
                "block_size": page_size,
                "use_mla": model.use_mla,
                "has_sink": False,
                "use_sparse": False,
                "use_mm_prefix": False,
                "use_per_head_quant_scales": False,
                "attn_type": "decoder",
            }
        )
    if page_size is not None:
        check_page_size(resolved, page_size)
    folder = Path(model.model)
    if vllm_config.load_config.load_format in ("auto", "safetensors") and folder.is_dir():
        verify_model(folder)


def refuse_if_invalid(selection: Mapping[str, Any]) -> None:
    """Run the backend's ordinary validation, as CUDA platforms do themselves.

    Args:
        selection: the fields of vLLM's ``AttentionSelectorConfig``.

    Raises:
        ValueError: every reason with its remedy.
    """
    from vllm.platforms import current_platform

    from .backend import SparseKBackend

    capability = current_platform.get_device_capability()
    reasons = SparseKBackend.validate_configuration(device_capability=capability, **selection)
    if reasons:
        raise ValueError(_refusal(reasons))


def check_page_size(resolved: ResolvedConfig, page_size: int) -> None:
    """Check that KV pages and selected blocks nest.

    Raises:
        ConfigError: they do not, or a page cannot hold the summaries that the settings need.
    """
    config = resolved.config
    if config.mode != "block_topk":
        return
    size = config.sel_block_size
    source = resolved.sources["sel_block_size"]
    if page_size % size and size % page_size:
        raise ConfigError(
            f"SPARSEK setting sel_block_size (from {source}): expected a divisor or a multiple of "
            f"the KV page of {page_size} tokens, got {size}; remedy: --block-size {size}, or set "
            f"sel_block_size to {page_size}"
        )
    if config.score_kind == "min_max" and page_size % (2 * CELL_SIZE):
        raise ConfigError(
            f"SPARSEK setting score_kind (from {resolved.sources['score_kind']}): min_max needs "
            f"KV pages of a multiple of {2 * CELL_SIZE} tokens, got {page_size}; remedy: "
            "--block-size 64, or score_kind cell_mean"
        )


_REMEDIES = {
    "head_size": "use a model whose head size is a multiple of 8 from 32 to 256",
    "kv_cache_dtype": "--kv-cache-dtype auto",
    "dtype": "--dtype bfloat16, float16 or float32",
    "block_size": "--block-size 64, or another multiple of 16",
    "MLA": "leave --attention-backend out: vLLM's MLA backends serve this model",
    "sparse": "leave --attention-backend out: the model brings its own sparse attention",
    "encoder_decoder": "leave --attention-backend out: cross-attention is not served",
    "attention type": "leave --attention-backend out",
    "per-head quant scales": "use a checkpoint without per-head KV scales",
    "non-causal": "leave --attention-backend out",
    "R-SWA": "leave --attention-backend out",
    "KV connector": "remove --kv-transfer-config: block summaries do not travel with K and V",
    "PCP": "--prefill-context-parallel-size 1",
    "DCP": "--decode-context-parallel-size 1",
    "batch invariance": "unset VLLM_BATCH_INVARIANT",
    "compute capability": "use a GPU of compute capability 8.0 or later, or the CPU build of vLLM",
}


def with_remedy(reason: str) -> str:
    """Append to one of vLLM's reasons what the user can do about it."""
    for part, remedy in _REMEDIES.items():
        if part in reason:
            return f"{reason} (remedy: {remedy})"
    return f"{reason} (remedy: leave --attention-backend out)"


def _refusal(reasons: list[str]) -> str:
    worded = [reason if "remedy:" in reason else with_remedy(reason) for reason in reasons]
    return f"SPARSEK cannot serve this model: {'; '.join(worded)}"


def _model_sparse_config(model_config: Any) -> Mapping[str, Any] | None:
    """Return the ``sparse_config`` section of the model's own config, if it has one."""
    for name in ("hf_text_config", "hf_config"):
        section = getattr(getattr(model_config, name, None), "sparse_config", None)
        if isinstance(section, Mapping):
            return section
    return None
