"""Whether an engine can be served, decided once while it is configured, before a worker starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend

from sparsek_backend.config import DEFAULTS, ConfigError, ResolvedConfig
from sparsek_backend.config_effects import check_dense_layers, describe_idle_settings
from sparsek_backend.infllm import MODEL_CONFIG
from sparsek_backend.models import verify_model
from sparsek_kernels.paged.policy import CELL
from sparsek_kernels.paged.sample import CELL_BITS

from . import compat
from .gates import open_gates
from .names import NSA_ARCHITECTURE
from .settings import (
    check_page_size,
    engine_config,
    model_section,
    prefill_pattern,
    require_backend,
    served_model,
)
from .sparsek.backend import LEAVE, REMEDIES, SparseKBackend
from .sparsek.pages import FP8_KV_CACHE
from .sparsek.shards import check_interleave
from .unserved import unserved_attention

logger = init_logger(f"vllm.{__name__}")  # under vLLM's handlers and level

KV_CONNECTORS = (
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "ExampleConnector",
    "NixlConnector",
)
"""Connectors that were shown to move whole pages, summaries included."""


def check_engine(vllm_config: Any) -> None:
    """Stop the start, with one message, if the settings or the model cannot be served.

    Raises:
        ConfigError: invalid settings.
        IncompleteFolderError: the model's folder is half-downloaded or damaged.
        ValueError: the model, its dtype, its KV cache or an option of the engine is not served.
    """
    model = vllm_config.model_config
    if model is not None and NSA_ARCHITECTURE in model.architectures:
        require_backend(vllm_config)
        own, served = (model_section(x, "nsa") for x in (model, served_model(vllm_config)))
        if own != served:
            raise ValueError(
                f"draft model: expected the nsa section of the served model, {served}, got {own}; "
                "remedy: another draft model"
            )
    resolved = engine_config(vllm_config)
    for line in describe_idle_settings(resolved):
        logger.warning_once(line)
    if model is None:
        return
    if model.is_encoder_decoder:
        raise ValueError(
            _refusal([f"cross-attention of encoder-decoder models not supported (remedy: {LEAVE})"])
        )
    if resolved.nsa is not None:
        _check_nsa(served_model(vllm_config), vllm_config)
    reasons = _reasons(_selection(vllm_config, resolved)) if not model.is_attention_free else []
    reasons += unserved_attention(model) + _unserved_options(vllm_config, resolved)
    if reasons:
        raise ValueError(_refusal(reasons))
    _check_context(model.max_model_len, resolved)
    _check_dense_layers(vllm_config, resolved)
    _check_pattern(served_model(vllm_config), resolved)
    _check_gates(vllm_config, resolved)
    if model.attn_type != "encoder_only":
        check_page_size(resolved, _page_size(vllm_config))
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        check_interleave(parallel.cp_kv_cache_interleave_size, _page_size(vllm_config))
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
    reasons = _reasons(selection)
    if reasons:
        raise ValueError(_refusal(reasons))


def _refusal(reasons: list[str]) -> str:
    return f"SPARSEK cannot serve this model: {'; '.join(reasons)}"


def _reasons(selection: Mapping[str, Any]) -> list[str]:
    """Every reason, with its remedy, why the backend refuses a layer's requirements.

    The installed vLLM checks the requirements that it knows.  The others are checked here.
    """
    known = inspect.signature(AttentionBackend.validate_configuration).parameters
    reasons = SparseKBackend.validate_configuration(
        device_capability=current_platform.get_device_capability(),
        **{name: value for name, value in selection.items() if name in known},
    )
    return reasons + [
        f"{name} not supported (remedy: {REMEDIES[name][1]})"
        for name, value in selection.items()
        if name not in known and name in REMEDIES and value and not _supports(name)
    ]


def _supports(requirement: str) -> bool:
    supports = getattr(SparseKBackend, f"supports_{requirement.removeprefix('use_')}", None)
    return supports is not None and supports()


def _selection(vllm_config: Any, resolved: ResolvedConfig) -> dict[str, Any]:
    """Requirements of the engine's decoder layers, for ``validate_configuration``.

    They are the fields of ``AttentionSelectorConfig``, which vLLM fills in the worker.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    cache_scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None) or {}
    return {
        "head_size": model.get_head_size(),
        "dtype": model.dtype,
        "kv_cache_dtype": _cache_dtype(vllm_config),
        "block_size": cache.block_size if cache.user_specified_block_size else None,
        "use_mla": model.use_mla,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": model.is_mm_prefix_lm,
        "use_per_head_quant_scales": cache_scheme.get("strategy") == "attn_head",
        "attn_type": "encoder_only" if model.attn_type == "encoder_only" else "decoder",
        "use_non_causal": vllm_config.attention_config.use_non_causal,
        "use_batch_invariant": resolved.batch_invariant,
        "use_kv_connector": _connector(vllm_config) is not None,
        "use_pcp": parallel.prefill_context_parallel_size > 1,
        "use_adaptive_verification": getattr(
            vllm_config.speculative_config, "enable_adaptive_verification", False
        ),
        "use_dcp": parallel.decode_context_parallel_size > 1,
        "use_rswa": model.rswa_window is not None,
    }


def _connector(vllm_config: Any) -> str | None:
    """The KV connector's name; vLLM turns an offloading size into one only after this check."""
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    if transfer is not None and transfer.is_kv_transfer_instance:
        return str(transfer.kv_connector)
    if cache.kv_offloading_size is None:
        return None
    native = cache.kv_offloading_backend == "native"
    return "OffloadingConnector" if native else str(cache.kv_offloading_backend)


def _cache_dtype(vllm_config: Any) -> str:
    """The KV cache's format; checkpoints may bring a quantised one."""
    dtype: str = vllm_config.cache_config.cache_dtype
    scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None)
    return "fp8" if dtype == "auto" and scheme is not None else dtype


def _unserved_options(vllm_config: Any, resolved: ResolvedConfig) -> list[str]:
    """Reasons, with remedies, why options that vLLM asks no backend about are not served."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    reasons = []
    if resolved.config.selects_blocks:
        if model.is_hybrid and not compat.declares_content():
            reasons.append(
                "block selection in models with recurrent layers (Mamba, linear attention) not "
                f"supported before vLLM {compat.DECLARES_CONTENT_FROM} (remedy: a later vLLM, or "
                "mode sink_window or dense)"
            )
        if cache.kv_cache_dtype_skip_layers:
            reasons.append(
                "block selection over KV caches of several formats not supported (remedy: leave "
                "--kv-cache-dtype-skip-layers out, or mode sink_window or dense)"
            )
    if model.is_hybrid and vllm_config.speculative_config and current_platform.is_cpu():
        reasons.append(
            "speculative decoding in models with recurrent layers not supported on a CPU, where "
            "vLLM 0.32 leaves refused drafts in their states (remedy: leave "
            "--speculative-config out)"
        )
    connector = _connector(vllm_config)
    if connector is not None and connector not in KV_CONNECTORS:
        given = "transfer-config" if vllm_config.kv_transfer_config else "offloading-size"
        reasons.append(
            f"KV connector {connector} not supported (remedy: leave --kv-{given} out, or take one "
            f"of {', '.join(KV_CONNECTORS)})"
        )
    if connector == "NixlConnector" and cache.user_specified_block_size:
        reasons.append(
            "--block-size not supported with NixlConnector, whose two sides need pages of one size "
            "(remedy: leave --block-size out)"
        )
    fallback = _sdpa_fallback(model)
    if fallback is not None and _cache_dtype(vllm_config) in FP8_KV_CACHE:
        reasons.append(
            f"{fallback} not supported over an fp8 KV cache (remedy: --kv-cache-dtype auto)"
        )
    if fallback is not None and resolved.batch_invariant:
        reasons.append(
            f"{fallback} not supported with batch invariance (remedy: unset VLLM_BATCH_INVARIANT)"
        )
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        reasons += [
            f"{other} not supported with decode context parallelism (remedy: "
            "--decode-context-parallel-size 1)"
            for other in _not_sharded(vllm_config, resolved)
        ]
    return reasons


def _not_sharded(vllm_config: Any, resolved: ResolvedConfig) -> list[str]:
    """Features of the engine that need all keys of a sequence on one rank."""
    model = vllm_config.model_config
    found = {
        "mode infllm": resolved.config.mode == "infllm",
        "mode seer": resolved.config.mode == "seer",
        "an nsa section": resolved.nsa is not None,
        "bidirectional prefixes": model.is_mm_prefix_lm,
        "layers without attention": model.is_hybrid,
        "speculative decoding": vllm_config.speculative_config is not None,
        "KV connectors": _connector(vllm_config) is not None,
        "an fp8 KV cache": _cache_dtype(vllm_config) in FP8_KV_CACHE,
        "batch invariance": resolved.batch_invariant,
        str(_sdpa_fallback(model)): _sdpa_fallback(model) is not None,
    }
    return [name for name, present in found.items() if present]


def _sdpa_fallback(model: Any) -> str | None:
    """Why torch SDPA serves the model's layers, as far as its config tells."""
    config = model.hf_text_config
    if model.attn_type == "encoder_only":
        return "encoder-only attention"
    if getattr(config, "attn_logit_softcapping", None):
        return "logits soft cap"
    if config.model_type == "bloom" or getattr(config, "alibi", False):
        return "ALiBi"
    return None


def _page_size(vllm_config: Any) -> int:
    """Tokens of a KV page: the user's choice, or the one that vLLM will make for this backend."""
    cache = vllm_config.cache_config
    size: int = cache.block_size
    if cache.user_specified_block_size:
        return size
    return SparseKBackend.get_preferred_block_size(size)


def _check_context(longest: int, resolved: ResolvedConfig) -> None:
    """Check that lists can number the cells of the longest context, where cells are chosen."""
    most = CELL << CELL_BITS
    if resolved.config.by_records and longest > most:
        raise ConfigError(
            f"SPARSEK setting mode (from {resolved.sources['mode']}): expected a max_model_len of "
            f"at most {most} tokens in mode {resolved.config.mode!r}, got {longest}; remedy: "
            f"--max-model-len {most}, or mode sink_window or dense"
        )


def _check_dense_layers(vllm_config: Any, resolved: ResolvedConfig) -> None:
    """Check that the layers which ``dense_layers`` names exist."""
    speculative = vllm_config.speculative_config
    models = [vllm_config.model_config]
    if speculative is not None:
        models = [speculative.target_model_config, speculative.draft_model_config]
    # Drafts without a model of their own, such as n-grams, have the served one's again.
    configs = list({id(x.hf_text_config): x.hf_text_config for x in models if x}.values())
    if not all(hasattr(config, "num_hidden_layers") for config in configs):
        return
    check_dense_layers(resolved, sum(config.num_hidden_layers for config in configs))


def _check_pattern(model: Any, resolved: ResolvedConfig) -> None:
    """Check that a pattern was learned from a model of this shape, and that its lists stay small.

    Lists of blocks take memory with the square of the budget.

    Raises:
        ConfigError: the file cannot be read, has other blocks, layers or KV heads, or the budget is
            larger than every context.
    """
    pattern = prefill_pattern(resolved)
    if pattern is None:
        return
    heads, layers = model.get_total_num_kv_heads(), model.hf_text_config.num_hidden_layers
    last = max(pattern.entries)
    if pattern.num_kv_heads != heads or last >= layers:
        raise ConfigError(
            f"SPARSEK setting pattern (from {resolved.sources['pattern']}): expected up to "
            f"{layers} layers of {heads} KV heads, as the model has, got {last + 1} of "
            f"{pattern.num_kv_heads}, learned from {pattern.model!r}; remedy: learn it from this "
            "model"
        )
    config, length = resolved.config, model.max_model_len
    most = {"top_k": -(-length // config.sel_block_size), "num_sink": length, "window_size": length}
    for name, limit in most.items():
        value, source = getattr(config, name), resolved.sources[name]
        if value > limit and source not in (DEFAULTS, MODEL_CONFIG):
            raise ConfigError(
                f"SPARSEK setting {name} (from {source}): expected at most {limit} in mode "
                f"'pattern', which the longest context of {length} tokens has, got {value}; "
                "remedy: a smaller one, or mode dense, which attends everything"
            )


def _check_gates(vllm_config: Any, resolved: ResolvedConfig) -> None:
    """Check that every layer that selects blocks has gates, and every rank whole KV heads.

    Raises:
        ConfigError: gates are missing or of another model, or ranks have parts of a KV head's
            query heads, which one gate query needs together.
    """
    model = served_model(vllm_config)
    gates = open_gates(resolved, model)
    if gates is None:
        return
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks > gates.num_kv_heads:
        raise ConfigError(
            f"SPARSEK mode seer: expected a tensor_parallel_size of at most {gates.num_kv_heads}, "
            f"the model's KV heads, got {ranks}; remedy: fewer ranks, or mode block_topk"
        )
    for index in range(model.hf_text_config.num_hidden_layers):
        if not resolved.config.is_dense_layer(index):
            gates.check(index)


def _check_nsa(model: Any, vllm_config: Any) -> None:
    """Check what goes with a model's ``nsa`` section.

    Raises:
        ValueError: another architecture, or a KV cache, weights or ranks that cannot be served.
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
    if _connector(vllm_config) is not None:
        raise ValueError(
            f"KV connector: expected none for a model with an nsa section, got "
            f"{_connector(vllm_config)}; remedy: leave it out"
        )
    if model.quantization is not None:
        raise ValueError(
            f"quantization: expected none for a model with an nsa section, got "
            f"{model.quantization}; remedy: serve the checkpoint in 16 bits"
        )
    heads = model.get_total_num_kv_heads()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if heads % ranks:
        raise ValueError(
            f"tensor_parallel_size: expected a divisor of the {heads} KV heads of a model with an "
            f"nsa section, got {ranks}; remedy: --tensor-parallel-size with such a divisor"
        )
