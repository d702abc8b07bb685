"""The mask of one call as plain numbers, shared by checks, launchers and the torch path."""

from __future__ import annotations

from typing import NamedTuple

MOST_SEQUENCES = 1 << 15
"""Batch entries of a launch: the third dimension of a grid ends at 65535."""


class AttentionSpec(NamedTuple):
    """Everything about a call that is not a tensor, in the order in which operators take it.

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
