"""What ``/metrics`` says of an engine, under the labels of vLLM's own metrics."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from sparsek_backend.config import FIELD_NAMES, SparsityConfig
from sparsek_backend.vllm_backend.keys import Keys
from sparsek_kernels.fallback import fallback_counts

LABELS = ("model_name", "engine")
FALLBACK_REASONS = ("ALiBi", "bidirectional prefix", "encoder-only attention", "logits soft cap")
"""Published from 0, so that a rate sees the first call."""


_published_fallbacks: dict[str, int] = {}


class EngineMetrics:
    """The Prometheus metrics of one engine; nothing where prometheus_client is not installed.

    Args:
        labels: values of :data:`LABELS`.
        config: the engine's settings, published as labels of ``sparsek_settings_info``.
    """

    def __init__(self, labels: Mapping[str, str], config: SparsityConfig) -> None:
        self._labels = dict(labels)
        self._families = _families()
        self._children: dict[tuple[str, ...], Any] = {}
        if self._families:
            settings = {name: str(getattr(config, name)) for name in FIELD_NAMES}
            self._families["settings"].labels(**self._labels, **settings).set(1)
            for reason in FALLBACK_REASONS:
                self._add("fallback", 0, reason=reason)

    def record_step(
        self,
        attended: Keys,
        context: Keys,
        selection_seconds: float = 0.0,
        attention_seconds: float = 0.0,
    ) -> None:
        """Count one step."""
        if not self._families:
            return
        for phase in Keys._fields:
            self._add("attended", getattr(attended, phase), phase=phase)
            self._add("context", getattr(context, phase), phase=phase)
        self._add("selection_seconds", selection_seconds)
        self._add("attention_seconds", attention_seconds)
        for reason, count in fallback_counts().items():
            self._add("fallback", count - _published_fallbacks.get(reason, 0), reason=reason)
            _published_fallbacks[reason] = count

    def _add(self, family: str, amount: float, **more: str) -> None:
        key = (family, *more.values())
        child = self._children.get(key)
        if child is None:  # a look-up by labels, which is slow
            child = self._children[key] = self._families[family].labels(**self._labels, **more)
        child.inc(amount)


@functools.cache
def _families() -> dict[str, Any]:
    """The metrics of this process, made once; an empty dict where the client is not installed."""
    try:
        from prometheus_client import Counter, Gauge
    except ImportError:
        return {}
    return {
        "attended": Counter(
            "sparsek_attended_tokens", "Keys attended, over queries and layers", (*LABELS, "phase")
        ),
        "context": Counter(
            "sparsek_context_tokens", "Keys that dense attention would attend", (*LABELS, "phase")
        ),
        "selection_seconds": Counter(
            "sparsek_selection_seconds", "Time of sampled prefills to choose blocks", LABELS
        ),
        "attention_seconds": Counter(
            "sparsek_attention_seconds", "Time of sampled prefills to choose and attend", LABELS
        ),
        "fallback": Counter("sparsek_fallback", "Calls of the SDPA fallback", (*LABELS, "reason")),
        "settings": Gauge(
            "sparsek_settings_info",
            "The engine's settings, as labels",
            (*LABELS, *FIELD_NAMES),
            multiprocess_mode="mostrecent",
        ),
    }
