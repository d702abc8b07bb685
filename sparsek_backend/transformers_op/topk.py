"""Block top-k over contiguous keys: as pages for the paged kernels, as lists for gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch

from sparsek_backend.transformers_op.tiles import attend_tiles
from sparsek_kernels.nsa.api import selected_attention
from sparsek_kernels.paged import (
    Indexer,
    Indexers,
    PagedBatch,
    SelectionPolicy,
    StepPolicy,
    paged_attention,
    select_blocks,
    write_index,
)
from sparsek_kernels.paged.api import default_indexers
from sparsek_kernels.paged.lengths import batch_of_lengths, pages_of
from sparsek_kernels.paged.sample import CELL_MASK


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """How queries attend."""

    policy: StepPolicy  # what prompts and decoded tokens attend
    softmax_scale: float  # factor of ``q . k``.
    sinks: torch.Tensor | None  # ``[Hq]`` learned logits of the denominator, or ``None``
    indexers: Indexers | None = None  # what chooses blocks; ``None``: :func:`default_indexers`
    as_prompts: bool = False  # whether a single query attends as a prompt's does

    def decodes(self, num_q: int) -> bool:
        """Whether ``num_q`` queries are a decoded token's: several are a prompt's."""
        return num_q == 1 and not self.as_prompts

    def of(self, num_q: int) -> SelectionPolicy:
        """What ``num_q`` queries attend."""
        return self.policy.decode if self.decodes(num_q) else self.policy.prefill

    def with_gradient(self) -> AttentionRule:
        """The rule where gradients are asked for, which choosing by records has none of.

        Raises:
            NotImplementedError: prompts choose by records too.
        """
        if self.policy.prefill.alignment:
            raise NotImplementedError(
                "query_tile: gradients are not served where single tokens choose by records; set "
                "it above 1"
            )
        return replace(self, as_prompts=True) if self.policy.decode.alignment else self

    def dense(self) -> AttentionRule:
        """The same with everything attended."""
        return replace(self, policy=StepPolicy.of(SelectionPolicy()))


def _paged(
    k: torch.Tensor,
    v: torch.Tensor,
    num_q: int,
    policy: StepPolicy,
    indexers: Indexers,
    decodes: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]:
    """Keys ``[B, M, Hkv, D]`` and values as pages of whole blocks, with what indexers read."""
    batch, num_k = k.shape[:2]
    sizes = policy.prefill.sel_block_size, policy.decode.sel_block_size, policy.decode.alignment
    page_size = math.lcm(*(size for size in sizes if size))
    index = indexers.decode if decodes else indexers.prefill
    by_records = index is not None and index.written_with_keys
    k_cache, v_cache, summary, table = pages_of(k, v, page_size, write_summary=by_records)
    lengths = (num_k,) * batch
    described = batch_of_lengths(table, (num_q,) * batch, lengths, decodes=batch if decodes else 0)
    if not decodes:  # as where gradients are asked for (split_queries)
        described = replace(described, prompt_left_host=(0,) * batch)
    if indexers.written_once is not None:
        every = batch_of_lengths(table, lengths, lengths)
        write_index(k_cache, v_cache, summary, every, policy.decode, indexers.written_once)
    return k_cache, v_cache, summary, described


def attend_selected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Attention ``[B, N, Hq, D]`` of the last N tokens to the blocks that they select."""
    indexers = rule.indexers or default_indexers(rule.policy)
    with torch.no_grad(), torch.cuda.device_of(q):
        decodes = rule.decodes(q.shape[1])
        paged = _paged(k, v, q.shape[1], rule.policy, indexers, decodes)
        k_cache, v_cache, summary, batch = paged
        out = paged_attention(
            q.flatten(0, 1),
            k_cache,
            v_cache,
            batch,
            rule.policy,
            softmax_scale=rule.softmax_scale,
            k_summary=summary,
            sinks=rule.sinks,
            indexers=indexers,
        )
    return out.view(*q.shape[:2], *out.shape[1:])


def select_entries(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
    index: Indexer | None = None,
) -> torch.Tensor:
    """What tiles choose, ``[B, tiles, Hkv, S]`` int64: blocks with weights, or -1.

    The queries are the last N tokens, and none of them sees everything.

    Args:
        q: ``[B, N, Hq, D]``; k, v: ``[B, M, Hkv, D]``.
        policy: what the queries attend.
        softmax_scale: factor of ``q . k``.
        index: what chooses; default: that of :func:`default_indexers`.
    """
    alone = policy.query_tile == 1
    decode = policy if alone else SelectionPolicy(sel_block_size=policy.sel_block_size)
    step = StepPolicy(policy, decode)
    indexers = default_indexers(step) if index is None else Indexers(index, index)
    with torch.no_grad(), torch.cuda.device_of(q):
        k_cache, _, summary, described = _paged(k, v, q.shape[1], step, indexers, decodes=False)
        per_request = select_blocks(
            q.flatten(0, 1).to(k_cache.dtype),
            k_cache,
            described,
            step,
            k_summary=summary,
            softmax_scale=softmax_scale,
            indexers=indexers,
        )
        return torch.stack(per_request)


def block_indices(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
    index: Indexer | None = None,
) -> torch.Tensor:
    """Every block that each query attends, ``[B, N, Hkv, S]`` int32, -1 for none: no weights.

    The queries are the last N tokens, and none of them sees everything.

    Args:
        policy: what they attend.
        index: what chooses; default: that of :func:`default_indexers`.
    """
    batch, num_q = q.shape[:2]
    num_k, heads = k.shape[1], k.shape[2]
    entries = select_entries(q, k, v, policy, softmax_scale, index)
    position = torch.arange(num_k - num_q, num_k, device=q.device)
    tile_of_row = position // policy.query_tile
    chosen = entries[:, tile_of_row - tile_of_row[0]]  # [B, N, Hkv, top]
    chosen = torch.where(chosen < 0, -1, chosen & CELL_MASK)  # without weights
    first, end = (block[:, None] for block in policy.local_range(position))
    sink = torch.arange(policy.sink_blocks, device=q.device)
    sink = torch.where(sink < first, sink, -1)
    local = first + torch.arange(policy.local_blocks, device=q.device)
    local = torch.where(local < end, local, -1)
    fixed = torch.cat([sink, local], dim=1)[None, :, None].expand(batch, -1, heads, -1)
    return torch.cat([fixed, chosen], dim=3).to(torch.int32)


def attend_selected_with_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule, leave_out: int = 0
) -> torch.Tensor:
    """:func:`attend_selected` with gradients of q, k, v and sinks; the selection has none.

    The last ``leave_out`` queries take part in the selection of their tile and get no output.
    """
    policy = rule.of(q.shape[1])
    indexers = rule.indexers or default_indexers(rule.policy)
    index = indexers.decode if rule.decodes(q.shape[1]) else indexers.prefill
    if policy.query_tile > 1:
        entries = select_entries(q, k, v, policy, rule.softmax_scale, index)
        begin, end = k.shape[1] - q.shape[1], k.shape[1] - leave_out
        entries = entries[:, : policy.num_tiles(begin, end)]
        q, k, v = q[:, : end - begin], k[:, :end], v[:, :end]
        return attend_tiles(q, k, v, entries, policy, rule.softmax_scale, rule.sinks)
    indices = block_indices(q, k, v, policy, rule.softmax_scale, index)
    size = policy.sel_block_size
    if leave_out:
        q, k, v, indices = (x[:, :-leave_out] for x in (q, k, v, indices))
    found = selected_attention(
        q, k, v, indices, sel_block_size=size, softmax_scale=rule.softmax_scale, return_lse=True
    )
    out, lse = cast(tuple[torch.Tensor, torch.Tensor], found)
    if rule.sinks is None:
        return out
    # exp(lse) / (exp(lse) + exp(sink)): what a sink leaves of each softmax weight
    share = torch.sigmoid(lse - rule.sinks.float()[None, :, None]).transpose(1, 2)
    return (out * share[..., None]).to(q.dtype)
