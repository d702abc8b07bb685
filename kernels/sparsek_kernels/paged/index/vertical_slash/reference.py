"""Oracle of attention by a learned list: the blocks that a tile takes, one after another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparsek_kernels.paged.policy import SelectionPolicy

_Select = Callable[
    [torch.Tensor, torch.Tensor, list[int], SelectionPolicy, float], list[list[int]] | None
]


def listed_reference(entries: list[list[int]], tokens: _Select | None = None) -> _Select:
    """A function that chooses prefill tiles' blocks by ranked lists.

    Args:
        entries: for each KV head; ``e >= 0`` is block ``e``, ``e < 0`` the block ``-e`` before the
            one in which the tile begins.
        tokens: what chooses for single tokens, which lists do not serve.
    """

    def select(
        q: torch.Tensor,
        k: torch.Tensor,
        positions: list[int],
        policy: SelectionPolicy,
        softmax_scale: float,
    ) -> list[list[int]] | None:
        if tokens is not None and policy.query_tile == 1:
            return tokens(q, k, positions, policy, softmax_scale)
        if policy.sees_all(positions[0]):
            return None
        first, last = policy.candidate_range(positions[0])
        own = positions[0] // policy.query_tile * policy.query_tile // policy.sel_block_size
        chosen = []
        for ranked in entries:
            blocks = [e if e >= 0 else own + e for e in ranked]
            blocks += range(last - 1, first - 1, -1)  # the nearest, where the list ends early
            competing = [b for b in dict.fromkeys(blocks) if first <= b < last]
            chosen.append(sorted(competing[: policy.scored_blocks]))
        return chosen

    return select
