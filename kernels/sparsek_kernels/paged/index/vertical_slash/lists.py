"""Blocks that prefills attend by a learned list: no query is looked at, no key is read for it.

A list ranks blocks for one KV head.  An entry ``e >= 0`` is block ``e`` of the sequence, an entry
``e < 0`` the block ``-e`` before the one in which the tile begins.  A tile takes the first
``scored_blocks`` of them that compete for it (:meth:`SelectionPolicy.candidate_range`), each once;
where the list ends early, the nearest other candidates.  So as many blocks are attended as by
score, at any length.
"""

from __future__ import annotations

import torch

from sparsek_kernels.checks import check_tensor
from sparsek_kernels.paged.policy import SelectionPolicy


def block_lists(entries: torch.Tensor, policy: SelectionPolicy) -> torch.Tensor:
    """Blocks that tiles attend beyond sinks and window: ``[rows, Hkv, scored_blocks]`` int32.

    Row ``r`` is of tiles that begin in block ``r``.  A block is written as itself, or as minus its
    distance to block ``r``; the last row so serves all later ones, because from there on neither
    kind of entry meets the other.

    Args:
        entries: ``[Hkv, E]`` integers, ranked, as above.
        policy: how many blocks are attended; it selects blocks.

    Raises:
        TypeError: ``entries`` are no integers.
        ValueError: another shape, or a policy that selects no blocks.
    """
    check_tensor("entries", entries, ("Hkv", "E"), (torch.int32, torch.int64))
    if not policy.selects_blocks:
        raise ValueError(f"policy: expected top_k >= 1, got top_k={policy.top_k}")
    entries = entries.long()
    heads, length = entries.shape
    count, nearest = policy.scored_blocks, policy.reach_blocks + 1
    fixed = int(entries.clamp(min=-1).max()) + 1 if length else 0
    distance = int(entries.neg().max()) if length else 0
    rows = max(fixed, policy.sink_blocks) + max(distance, nearest + count + length) + 1
    own = torch.arange(rows)[:, None]
    block = torch.arange(rows)
    # From the best rank on: the entries, then what is nearest.
    rank = (length + own - block)[:, None].expand(-1, heads, -1).clone()  # [rows, Hkv, blocks]
    place = torch.where(entries < 0, own[..., None] + entries, entries)  # [rows, Hkv, E]
    exists = (place >= 0) & (place < rows)
    order = torch.arange(length).expand_as(place)
    worst = 2 * rows + length
    order = order.masked_fill(~exists, worst)
    rank.scatter_reduce_(2, place.clamp(0, rows - 1), order, "amin")
    outside = (block < policy.sink_blocks) | (block > own - nearest)
    rank.masked_fill_(outside[:, None], worst)
    ranked, chosen = rank.topk(min(count, rows), dim=2, largest=False)
    fixed_entry = torch.zeros_like(ranked, dtype=torch.bool)
    if length:
        kind = (entries >= 0).expand(rows, -1, -1)
        fixed_entry = (ranked < length) & kind.gather(2, ranked.clamp(max=length - 1))
    chosen = chosen.masked_fill(ranked >= worst, 0)  # of tiles that see everything
    order = chosen.argsort(dim=2)
    chosen, fixed_entry = chosen.gather(2, order), fixed_entry.gather(2, order)
    return torch.where(fixed_entry, chosen, chosen - own[..., None]).to(torch.int32)


def listed_blocks(
    lists: torch.Tensor, first_position: torch.Tensor, policy: SelectionPolicy
) -> torch.Tensor:
    """Blocks ``[T, Hkv, scored_blocks]`` int32, ascending, of tiles from ``first_position`` on.

    They are -1 where all is seen.  ``lists`` are of :func:`block_lists` for this policy.
    """
    own = first_position // policy.sel_block_size
    found = lists[own.clamp(0, lists.shape[0] - 1).long()]
    found = torch.where(found < 0, found + own[:, None, None].int(), found)
    everything = policy.sees_all(first_position)
    return found.masked_fill(everything[:, None, None], -1)
