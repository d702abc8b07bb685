"""Sections of a model's own config that decide how it is attended."""

from __future__ import annotations

from collections.abc import Mapping

from sparsek_backend.infllm import MODEL_CONFIG, ConfigError, shown
from sparsek_backend.nn.config import NSAConfig


def read_nsa(mode: object, source: str, section: object) -> NSAConfig | None:
    """Read the model's ``nsa`` section, with which mode ``nsa`` goes and no other.

    Raises:
        ConfigError: the mode and the model do not go together, or the section is invalid.
    """
    if section in (None, False):
        if mode == "nsa":
            raise ConfigError(
                f"SPARSEK setting mode (from {source}): 'nsa' needs a model trained with native "
                f"sparse attention, and {MODEL_CONFIG} has no nsa section; remedy: leave mode out, "
                "which selects blocks (block_topk) for other models"
            )
        return None
    if mode not in ("auto", "nsa"):
        raise ConfigError(
            f"SPARSEK setting mode (from {source}): expected 'nsa' or 'auto' for a model with an "
            f"nsa section, whose weights no other mode can use, got {shown(mode)}; remedy: leave "
            "mode out"
        )
    try:
        if not isinstance(section, Mapping):
            raise TypeError(f"expected an object, got {shown(section)}")
        return NSAConfig.from_dict(section)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"SPARSEK: the nsa section of {MODEL_CONFIG} is invalid: {error}; remedy: correct the "
            "model's config.json (docs/nsa.md lists the fields)"
        ) from None
