"""Counts of keys, of prompts and of decoded tokens apart."""

from __future__ import annotations

from typing import NamedTuple


class Keys(NamedTuple):
    """Keys of all queries, summed over layers and not over heads."""

    prefill: int = 0  # of the queries of prompts
    decode: int = 0  # of decoded tokens, and of the ends of prompts that are computed with them

    def plus(self, other: Keys, times: int = 1) -> Keys:
        """The sum of each, with those of ``other`` so many times."""
        return Keys(self.prefill + times * other.prefill, self.decode + times * other.decode)

    def shares(self, context: Keys) -> dict[str, float]:
        """Shares of the keys of some context, of the phases that have any."""
        every = context._asdict().items()
        return {phase: getattr(self, phase) / keys for phase, keys in every if keys}


NO_KEYS = Keys()
