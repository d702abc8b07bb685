"""The mask of one call as plain numbers, shared by checks, launchers and the torch path."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """Everything about a call that is not a tensor.

    Args:
        num_sink: leading keys of each sequence that every query sees.
        window_size: latest keys that a query sees, or ``None`` for all earlier keys.
        causal: whether query ``i`` is limited to keys ``j <= i`` (bottom-right aligned).
        softmax_scale: positive factor of ``q . k``.
    """

    num_sink: int
    window_size: int | None
    causal: bool
    softmax_scale: float

    def key_spans(
        self, first: int, last: int, offset: int, num_k: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Half-open key ranges that query rows ``[first, last)`` touch.

        Args:
            first: first query row.
            last: row past the last one.
            offset: ``num_k - num_q``; row ``i`` sits at position ``i + offset``.
            num_k: keys of the sequence.

        Returns:
            ``(sink_span, window_span)``, disjoint and ascending; either may be empty.
        """
        if not self.causal:
            return (0, 0), (0, num_k)
        stop = min(max(last + offset, 0), num_k)
        if self.window_size is None:
            return (0, 0), (0, stop)
        start = min(max(first + offset - self.window_size + 1, 0), stop)
        return (0, min(self.num_sink, start)), (start, stop)
