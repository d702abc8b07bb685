"""What settings do to a model: those without effect are named, and layers that it lacks refused."""

from __future__ import annotations

from sparsek_backend.config import DEFAULTS, ConfigError, ResolvedConfig
from sparsek_backend.infllm import MODEL_CONFIG


def check_dense_layers(resolved: ResolvedConfig, count: int) -> None:
    """Check that the layers which ``dense_layers`` names are among so many.

    Raises:
        ConfigError: they are not.
    """
    layers = resolved.config.dense_layers
    needed = layers if isinstance(layers, int) else max(layers, default=-1) + 1
    if needed > count:
        raise ConfigError(
            f"SPARSEK setting dense_layers (from {resolved.sources['dense_layers']}): expected "
            f"layers of the model, which has {count}, counted from 0, got "
            f"{layers if isinstance(layers, int) else list(layers)}; remedy: correct or remove it"
        )


def describe_idle_settings(resolved: ResolvedConfig) -> list[str]:
    """Return a log line for each setting that was given and that nothing heeds."""
    config, sources = resolved.config, resolved.sources
    idle, only, cause = "top_k", "decode_tokens", "query_tile"
    if config.sparse_phase == "decode":
        cause = "sparse_phase"
    elif config.query_tile > 1:
        idle, only, cause = only, idle, "sparse_phase"
        if config.sparse_phase == "both":
            return []
    said = {
        idle: f", which leaves one budget: {only}, {getattr(config, only)} (from {sources[only]}); "
        f"remedy: set {only} instead"
    }
    if idle == "top_k":
        others = {"dense_last": config.dense_last, "top_k_deep": config.top_k_deep}
        said |= {name: "; remedy: remove it" for name, value in others.items() if value}
    return [
        f"SPARSEK setting {name} (from {sources[name]}) has no effect with {cause} "
        f"{getattr(config, cause)} (from {sources[cause]}){rest}"
        for name, rest in said.items()
        if sources[name] not in (DEFAULTS, MODEL_CONFIG)
    ]
