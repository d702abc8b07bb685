"""What is decided before an engine starts: its settings, and whether they fit model and machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsek_backend.config import FLAG, SECTION, ConfigError, ResolvedConfig, resolve_config
from sparsek_backend.models import verify_model
from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.plugin import BACKEND_NAME, NSA_ARCHITECTURE
from sparsek_kernels.nsa.paged.cache import check_paged_spec
from sparsek_kernels.paged.policy import CELL_SIZE

from .compat import is_batch_invariant, selected_backends


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
        (additional or {}).get(SECTION),
        os.environ,
        _model_section(vllm_config.model_config, "sparse_config"),
        _model_section(vllm_config.model_config, "nsa"),
        is_batch_invariant(),
    )


def nsa_of_served_model(vllm_config: Any) -> NSAConfig:
    """Return the settings of a natively sparse model that is being built.

    Raises:
        ConfigError: its config has no ``nsa`` section, or SPARSEK was not chosen.
    """
    resolved = engine_config(vllm_config)
    if resolved.nsa is None:
        raise ConfigError(
            f"SPARSEK: {NSA_ARCHITECTURE} needs an nsa section in the model's config.json; "
            "docs/nsa.md shows one"
        )
    if not any(getattr(x, "name", "") == BACKEND_NAME for x in selected_backends(vllm_config)):
        raise ConfigError(
            f"SPARSEK: {NSA_ARCHITECTURE} needs --attention-backend {BACKEND_NAME}, which this "
            "engine was started without"
        )
    return resolved.nsa


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
        raise ValueError(_refusal([with_remedy("attention type encoder_decoder not supported")]))
    cache = vllm_config.cache_config
    page_size = cache.block_size if cache.user_specified_block_size else None
    if resolved.nsa is not None:
        _check_nsa(model, vllm_config)
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
                "use_batch_invariant": resolved.batch_invariant,
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
    if resolved.nsa is not None:
        try:
            check_paged_spec(resolved.nsa.spec, page_size)
        except ValueError as error:
            raise ConfigError(
                f"SPARSEK cannot serve the nsa section of the model's config: {error}; remedy: "
                "--block-size with a common multiple of cmp_stride and sel_block_size, where the "
                "page is what does not fit"
            ) from None
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
    "bidirectional prefixes": "leave --attention-backend out",
    "batch invariance": "unset VLLM_BATCH_INVARIANT, which needs a GPU",
    "compute capability": "use a GPU of compute capability 8.0 or later, or the CPU build of vLLM",
}


def with_remedy(reason: str) -> str:
    """Append to one of vLLM's reasons what the user can do about it."""
    for part, remedy in _REMEDIES.items():
        if part in reason:
            return f"{reason} (remedy: {remedy})"
    return f"{reason} (remedy: leave --attention-backend out)"


def _refusal(reasons: list[str]) -> str:
    return f"SPARSEK cannot serve this model: {'; '.join(reasons)}"


def _check_nsa(model: Any, vllm_config: Any) -> None:
    """Check what goes with a model's ``nsa`` section.

    Raises:
        ValueError: another architecture, or a KV cache or weights that cannot be served.
    """
    if NSA_ARCHITECTURE not in model.architectures:
        raise ValueError(
            f"architectures: expected {NSA_ARCHITECTURE} in a config with an nsa section, got "
            f"{model.architectures}; remedy: correct the model's config.json"
        )
    dtype = vllm_config.cache_config.cache_dtype
    if dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise ValueError(
            f"kv_cache_dtype: expected auto for a model with an nsa section, got {dtype}; remedy: "
            "--kv-cache-dtype auto"
        )
    if model.quantization is not None:
        raise ValueError(
            f"quantization: expected none for a model with an nsa section, got "
            f"{model.quantization}; remedy: serve the checkpoint in 16 bits"
        )


def _model_section(model_config: Any, section_name: str) -> Mapping[str, Any] | None:
    """Return a section of the model's own config, if it has one."""
    for name in ("hf_text_config", "hf_config"):
        section = getattr(getattr(model_config, name, None), section_name, None)
        if isinstance(section, Mapping):
            return section
    return None
