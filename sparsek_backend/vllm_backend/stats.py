"""Counters of this process: what was attended, how often our forward ran, what fell back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sparsek_backend.vllm_backend.keys import NO_KEYS, Keys
from sparsek_kernels.fallback import fallback_counts

LOG_INTERVAL = 10.0
"""Seconds between two log lines of an engine that is busy."""


@dataclass
class EngineStats:
    """Totals over all layers and steps of this process."""

    attended: Keys = NO_KEYS
    context: Keys = NO_KEYS  # what dense attention would have attended
    steps: int = 0  # metadata built for real batches
    forward_calls: int = 0  # per-layer calls of the backend with a batch
    selection_seconds: float = 0.0  # of prefills timed since ``take_seconds``, to choose blocks
    attention_seconds: float = 0.0  # of the same prefills, to choose blocks and attend
    _last_log: float = field(default_factory=time.monotonic)
    _logged: tuple[Keys, Keys] = (NO_KEYS, NO_KEYS)

    @property
    def attended_share(self) -> float:
        """Attended keys over context keys, 1.0 before the first step."""
        return sum(self.attended) / sum(self.context) if any(self.context) else 1.0

    def record_step(self, attended: Keys, context: Keys, *, log: bool = True) -> str | None:
        """Add one step; return a log line when one is due.

        Args:
            log: whether this process logs.  Of tensor-parallel ranks, which attend the same keys,
                one does.
        """
        self.steps += 1
        self.attended = self.attended.plus(attended)
        self.context = self.context.plus(context)
        now = time.monotonic()
        if not log or now - self._last_log < LOG_INTERVAL:
            return None
        self._last_log = now
        before, whole = self._logged
        self._logged = (self.attended, self.context)
        shares = self.attended.plus(before, -1).shares(self.context.plus(whole, -1))
        if not shares:
            return None
        since = self.attended.shares(self.context)
        said = " and ".join(
            f"{share:.1%} of the context in {phase} (since start {since[phase]:.1%})"
            for phase, share in shares.items()
        )
        return f"SPARSEK attended {said}, fallback calls: {sum(fallback_counts().values())}"

    def take_seconds(self) -> tuple[float, float]:
        """Return the time to choose blocks and the time to choose and attend; both start anew."""
        taken = self.selection_seconds, self.attention_seconds
        self.selection_seconds = self.attention_seconds = 0.0
        return taken


STATS = EngineStats()
"""The counters of this process."""
