"""Counters of this process: what was attended, how often our forward ran, what fell back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sparsek_kernels.fallback import fallback_counts

LOG_INTERVAL = 10.0
"""Seconds between two log lines of an engine that is busy."""


@dataclass
class EngineStats:
    """Totals over all layers and steps of this process."""

    attended_tokens: int = 0  # keys attended, summed over queries and layers, not over heads
    context_tokens: int = 0  # keys that dense attention would have attended
    steps: int = 0  # metadata built for real batches
    forward_calls: int = 0  # per-layer calls of the backend with a batch
    selection_seconds: float = 0.0  # of prefills timed since ``take_seconds``, to choose blocks
    attention_seconds: float = 0.0  # of the same prefills, to choose blocks and attend
    _last_log: float = field(default_factory=time.monotonic)
    _logged: tuple[int, int] = (0, 0)

    @property
    def attended_share(self) -> float:
        """Attended keys over context keys, 1.0 before the first step."""
        return self.attended_tokens / self.context_tokens if self.context_tokens else 1.0

    def record_step(
        self, attended_tokens: int, context_tokens: int, *, log: bool = True
    ) -> str | None:
        """Add one step; return a log line when one is due.

        Args:
            log: whether this process logs.  Of tensor-parallel ranks, which attend the same keys,
                one does.
        """
        self.steps += 1
        self.attended_tokens += attended_tokens
        self.context_tokens += context_tokens
        now = time.monotonic()
        if not log or now - self._last_log < LOG_INTERVAL:
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

    def take_seconds(self) -> tuple[float, float]:
        """Return the time to choose blocks and the time to choose and attend; both start anew."""
        taken = self.selection_seconds, self.attention_seconds
        self.selection_seconds = self.attention_seconds = 0.0
        return taken


STATS = EngineStats()
"""The counters of this process."""
