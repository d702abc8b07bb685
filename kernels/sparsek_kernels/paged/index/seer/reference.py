"""Oracle of SeerAttention-R's gates (arXiv 2506.08889, section 3), query by query, in float64.

As it was trained: keys before RoPE are pooled over each block (largest, smallest, mean), projected,
normalised and turned by the position of the block's first token.  The queries before RoPE of the
heads that share a KV head are projected to one, normalised and turned by their position.  A block's
score is the softmax of their scaled products over all complete blocks before the query's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparsek_kernels.paged.policy import SelectionPolicy

if TYPE_CHECKING:
    from sparsek_kernels.paged.index.seer.gates import Gates

NORM_EPS = 1e-6
"""Of the norms of gate queries and keys."""


def turned_reference(
    x: torch.Tensor, rotation: torch.Tensor | None, at: int | slice, back: bool = False
) -> torch.Tensor:
    """``[..., D]`` turned by positions of the table ``[positions, D]``, or back; float64."""
    if rotation is None:
        return x.double()
    turn = torch.complex(*rotation[at].double().chunk(2, -1))
    pairs = torch.complex(*x.double().chunk(2, -1))
    pairs = pairs / turn if back else pairs * turn
    return torch.cat([pairs.real, pairs.imag], -1)


def _projected(x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    out = x @ weight.double()
    if norm is None:
        return out
    return out / (out.square().mean() + NORM_EPS).sqrt() * norm.double()


def gate_scores_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    position: int,
    sel_block_size: int,
    gates: Gates,
    rotation: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of the complete blocks before the query's own: ``[Hkv, blocks]`` float64.

    Args:
        q: ``[Hq, D]``, the query at ``position``.
        k: ``[N, Hkv, D]``.
        rotation: ``[positions, D]``, cosines then sines, that has turned both; ``None``: neither
            has a position, and the gates none either.
    """
    heads, group, dim, _ = gates.query.shape
    blocks = position // sel_block_size
    logits = torch.empty(heads, blocks, dtype=torch.float64)
    plain = turned_reference(q, rotation, position, back=True).view(heads, group * dim)
    for head in range(heads):
        query = _projected(plain[head], gates.query[head].flatten(0, 1), gates.query_norm)
        query = turned_reference(query, rotation, position)
        for block in range(blocks):
            span = slice(block * sel_block_size, (block + 1) * sel_block_size)
            keys = turned_reference(k[span, head], rotation, span, back=True)
            pooled = torch.cat([keys.amax(0), keys.amin(0), keys.mean(0)])
            key = _projected(pooled, gates.key[head], gates.key_norm)
            logits[head, block] = query @ turned_reference(key, rotation, span.start) / dim**0.5
    return logits.softmax(-1)


def select_seer_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    gates: Gates,
    rotation: torch.Tensor | None = None,
) -> list[list[int]] | None:
    """Blocks that a single token selects by its gates, beyond sinks and window.

    Args:
        q: ``[1, Hq, D]``, the query at ``positions``.
        k: ``[N, Hkv, D]``.
        rotation: as :func:`gate_scores_reference` takes it.

    Returns:
        For each KV head, ascending block indices; ``None`` where the query sees everything.
    """
    (position,) = positions
    if policy.sees_all(position):
        return None
    scores = gate_scores_reference(q[0], k, position, policy.sel_block_size, gates, rotation)
    candidates = range(*policy.candidate_range(position))
    return [
        sorted(sorted(candidates, key=lambda block: (-row[block], block))[: policy.scored_blocks])
        for row in scores.tolist()
    ]
