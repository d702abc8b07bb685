"""Counters of this process: what was attended, how often our forward ran, what fell back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from sparsek_kernels.fallback import fallback_counts

LOG_INTERVAL = 10.0
"""Seconds between two log lines of an engine that is busy."""


@dataclass
class EngineStats:
    """Totals over all layers and steps of this process.

    Attributes:
        attended_tokens: keys attended, summed over queries and layers (not over heads).
        context_tokens: keys that dense attention would have attended.
        steps: metadata built for real batches.
        forward_calls: per-layer calls of the backend with a batch.
    """

    attended_tokens: int = 0
    context_tokens: int = 0
    steps: int = 0
    forward_calls: int = 0
    _counters: dict[str, Any] | None = None
    _last_log: float = field(default_factory=time.monotonic)
    _logged: tuple[int, int] = (0, 0)
    _published_fallbacks: dict[str, int] = field(default_factory=dict)

    @property
    def attended_share(self) -> float:
        """Attended keys over context keys, 1.0 before the first step."""
        return self.attended_tokens / self.context_tokens if self.context_tokens else 1.0

    def record_step(
        self, attended_tokens: int, context_tokens: int, *, publish: bool = True
    ) -> str | None:
        """Add one step; return a log line when one is due.

        Args:
            attended_tokens: sum over the step's queries and layers.
            context_tokens: sum over the step's queries and layers.
            publish: whether this process logs and counts for Prometheus.  Of tensor-parallel ranks,
                which attend the same keys, one does.
        """
        self.steps += 1
        self.attended_tokens += attended_tokens
        self.context_tokens += context_tokens
        if not publish:
            return None
        self._publish(attended_tokens, context_tokens)
        now = time.monotonic()
        if now - self._last_log < LOG_INTERVAL:
            return None
        self._last_log = now
        attended = self.attended_tokens - self._logged[0]
        context = self.context_tokens - self._logged[1]
        self._logged = (self.attended_tokens, self.context_tokens)
        if context == 0:
            return None
        fallbacks = sum(fallback_counts().values())
        return (
            f"SPARSEK attended {100 * attended / context:.1f} % of the context "
            f"(since start {100 * self.attended_share:.1f} %), fallback calls: {fallbacks}"
        )

    def _publish(self, attended_tokens: int, context_tokens: int) -> None:
        """Keep the Prometheus counters current, where prometheus_client is installed."""
        if self._counters is None:
            self._counters = _make_counters()
        if not self._counters:
            return
        self._counters["attended"].inc(attended_tokens)
        self._counters["context"].inc(context_tokens)
        for reason, count in fallback_counts().items():
            new = count - self._published_fallbacks.get(reason, 0)
            if new > 0:
                self._counters["fallback"].labels(reason=reason).inc(new)
                self._published_fallbacks[reason] = count


def _make_counters() -> dict[str, Any]:
    """Create the Prometheus counters; an empty dict where the client is not installed."""
    try:
        from prometheus_client import Counter
    except ImportError:
        return {}
    return {
        "attended": Counter("sparsek_attended_tokens", "Keys attended, over queries and layers"),
        "context": Counter("sparsek_context_tokens", "Keys that dense attention would attend"),
        "fallback": Counter("sparsek_fallback", "Calls of the SDPA fallback", ["reason"]),
    }


STATS = EngineStats()
"""The counters of this process."""
