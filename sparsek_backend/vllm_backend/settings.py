"""The settings of an engine, and whether they fit its KV pages."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsek_backend.config import ConfigError, ResolvedConfig, read_section, resolve_config
from sparsek_backend.nn.config import NSAConfig
from sparsek_kernels.nsa.paged.cache import check_paged_spec
from sparsek_kernels.paged.policy import SEGMENT

from .compat import is_batch_invariant, selected_backends
from .names import BACKEND_NAME, NSA_ARCHITECTURE

if TYPE_CHECKING:
    from sparsek_backend.patterns.prefill import PrefillPattern


def engine_config(vllm_config: Any) -> ResolvedConfig:
    """Return the settings of an engine, merged from all sources.

    Raises:
        ConfigError: a setting is unknown, invalid, or contradicts another.
    """
    model = served_model(vllm_config)
    return resolve_config(
        read_section(vllm_config.additional_config),
        os.environ,
        model_section(model, "sparse_config"),
        model_section(model, "nsa"),
        is_batch_invariant(),
        getattr(model, "model", None),
    )


def served_model(vllm_config: Any) -> Any:
    """Return the model whose answers are served, also where the configuration is its draft's."""
    speculative = getattr(vllm_config, "speculative_config", None)
    target = getattr(speculative, "target_model_config", None)
    return vllm_config.model_config if target is None else target


def served_layers(vllm_config: Any) -> int:
    """Return how many layers the served model has."""
    return int(getattr(served_model(vllm_config).hf_text_config, "num_hidden_layers", 0))


def first_layer(vllm_config: Any) -> int:
    """Return the index of a model's first layer; a draft's count on from the served model's.

    The language model inside a multimodal one is built with a copy of its configuration.
    """
    is_draft = vllm_config.model_config.runner_type == "draft"
    return served_layers(vllm_config) if is_draft else 0


def lacking_tokens(vllm_config: Any, layer: int) -> int:
    """Return by how many tokens vLLM's lengths on the host may fall short, for steps of a layer.

    The lengths on the device are exact.  A draft model adds the next token to each request, and one
    that drafts in parallel adds a place for each draft; the lengths on the host have neither.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or layer < served_layers(vllm_config):
        return 0
    if getattr(speculative, "parallel_drafting", False):
        return int(speculative.num_speculative_tokens)
    return int(speculative.method == "draft_model")


def prefill_pattern(resolved: ResolvedConfig) -> PrefillPattern | None:
    """Return what prefills follow in mode ``pattern``, ``None`` in the others.

    Raises:
        ConfigError: the file cannot be read, or its blocks have another size.
    """
    config = resolved.config
    if config.pattern is None:
        return None
    from sparsek_backend.patterns.prefill import PrefillPattern

    source = f"SPARSEK setting pattern (from {resolved.sources['pattern']})"
    try:
        found = PrefillPattern.load(Path(config.pattern).expanduser())
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # or there is no such user
        raise ConfigError(
            f"{source}: {error}; remedy: make the file with `sparsek patterns learn MODEL "
            "--prefill --out FILE`"
        ) from None
    if found.block_size != config.sel_block_size:
        raise ConfigError(
            f"{source}: expected blocks of {config.sel_block_size} tokens, got "
            f"{found.block_size} in {config.pattern}; remedy: set sel_block_size to "
            f"{found.block_size}, or learn with --block-size {config.sel_block_size}"
        )
    return found


def require_backend(vllm_config: Any) -> None:
    """Refuse a natively sparse model without ``--attention-backend SPARSEK``.

    Raises:
        ConfigError: another backend was chosen, or none.
    """
    if not any(getattr(x, "name", "") == BACKEND_NAME for x in selected_backends(vllm_config)):
        raise ConfigError(
            f"SPARSEK: {NSA_ARCHITECTURE} needs --attention-backend {BACKEND_NAME}, which this "
            "engine was started without"
        )


def nsa_section(resolved: ResolvedConfig) -> NSAConfig:
    """Return the ``nsa`` section of the model's config."""
    if resolved.nsa is None:
        raise ConfigError(
            "SPARSEK: this model needs an nsa section in its config.json; docs/nsa.md shows one"
        )
    return resolved.nsa


def check_page_size(resolved: ResolvedConfig, page_size: int) -> None:
    """Check that KV pages and selected blocks nest."""
    config = resolved.config
    if resolved.nsa is not None:
        try:
            check_paged_spec(resolved.nsa.spec, page_size)
        except ValueError as error:
            raise ConfigError(
                f"SPARSEK cannot serve the nsa section of the model's config: {error}; remedy: "
                "correct the section or, where the page does not fit, --block-size with a common "
                "multiple of cmp_stride and sel_block_size"
            ) from None
    if not config.selects_blocks:
        return
    size = config.sel_block_size
    source = resolved.sources["sel_block_size"]
    segments = not config.by_records or page_size % SEGMENT == 0
    fitting = math.lcm(size, SEGMENT) if config.by_records else size
    if page_size % size and size % page_size:
        fixed = config.mode in ("infllm", "seer") or not segments
        raise ConfigError(
            f"SPARSEK setting sel_block_size (from {source}): expected a divisor or a multiple of "
            f"the KV page of {page_size} tokens, got {size}; remedy: --block-size {fitting}"
            + ("" if fixed else f", or set sel_block_size to {page_size}")
        )
    if not segments:
        raise ConfigError(
            f"SPARSEK setting decode_tokens (from {resolved.sources['decode_tokens']}): expected "
            f"KV pages of a multiple of {SEGMENT} tokens, got {page_size}; remedy: --block-size "
            f"{fitting}, or mode sink_window or dense"
        )
    if config.mode == "seer" and page_size % size:
        raise ConfigError(
            f"SPARSEK mode seer: expected KV pages of a multiple of the gates' blocks of {size} "
            f"tokens, got {page_size}; remedy: --block-size {size}"
        )


def model_section(model_config: Any, section_name: str) -> object:
    """Return a section of the model's own config, or ``None``."""
    for name in ("hf_text_config", "hf_config"):
        section = getattr(getattr(model_config, name, None), section_name, None)
        if section is not None:
            return section.to_dict() if hasattr(section, "to_dict") else section
    return None
