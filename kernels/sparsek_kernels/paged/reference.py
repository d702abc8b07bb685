"""Oracles of paged attention: the rules of docs/selection.md, in float64.

Plain torch on contiguous sequences, readable before fast.  Nothing here is imported by a kernel
or by the CPU path, and nothing of theirs is imported here but the rule itself (``policy.py``).
Each half, and each indexer, has its own; this is the whole.
"""

from __future__ import annotations

import math

import torch

from sparsek_kernels.paged.attend.reference import (
    Select,
    attend_reference,
    gather_sequence,
    list_logs,
    logs_reference,
    visible_reference,
)
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.index.cell_means.reference import (
    sampled_queries,
    select_tile_reference,
    tile_scores_reference,
)
from sparsek_kernels.paged.index.infllm.reference import (
    block_ranks_reference,
    kernel_shares_reference,
    select_infllm_reference,
)
from sparsek_kernels.paged.index.page_records.reference import choose_reference
from sparsek_kernels.paged.index.reference import best, block_logits_reference, means_reference
from sparsek_kernels.paged.index.seer.reference import gate_scores_reference, select_seer_reference
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy

__all__ = [
    "attend_by_records_reference",
    "attend_reference",
    "best",
    "block_logits_reference",
    "block_ranks_reference",
    "gate_scores_reference",
    "gather_sequence",
    "kernel_shares_reference",
    "list_logs",
    "listed_reference",
    "logs_reference",
    "means_reference",
    "paged_attention_reference",
    "sampled_queries",
    "select_blocks_reference",
    "select_infllm_reference",
    "select_seer_reference",
    "select_tile_reference",
    "tile_scores_reference",
    "visible_reference",
]


def select_blocks_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> list[list[int]] | None:
    """Blocks that compete by score and win, for the queries of one tile.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions``.
        k: ``[N, Hkv, D]``.

    Returns:
        For each KV head, the entries of its list; ``None`` where the tile sees everything.
    """
    if policy.alignment:
        found = choose_reference(q, k[: positions[-1] + 1], positions[0], policy, softmax_scale)
        return None if found is None else found.entries
    if policy.sees_all(positions[0]):
        return None
    return select_tile_reference(q, k, positions, policy, softmax_scale).entries


def listed_reference(entries: list[list[int]]) -> Select:
    """A function that chooses prefill tiles' blocks by ranked lists, and single tokens' by score.

    Args:
        entries: for each KV head; ``e >= 0`` is block ``e``, ``e < 0`` the block ``-e`` before the
            one in which the tile begins.
    """

    def select(
        q: torch.Tensor,
        k: torch.Tensor,
        positions: list[int],
        policy: SelectionPolicy,
        softmax_scale: float,
    ) -> list[list[int]] | None:
        if policy.query_tile == 1:
            return select_blocks_reference(q, k, positions, policy, softmax_scale)
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


def attend_by_records_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    policy: SelectionPolicy,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    select: Select = select_blocks_reference,
) -> torch.Tensor:
    """Attention ``[n, Hq, Dv]`` float64 of neighbouring tokens that choose together by records.

    Args:
        q: ``[n, Hq, D]``, the queries from position ``start`` on.
        k, v: ``[N, Hkv, D]``.
        sinks: ``[Hq]`` logits that join the denominator only.
        select: what chooses the tokens' lists.
    """
    positions = list(range(start, start + len(q)))
    causal = torch.arange(len(k)) <= torch.tensor(positions)[:, None]
    visible = causal.unsqueeze(1).expand(-1, k.shape[1], -1)
    entries = select(q, k, positions, policy, softmax_scale)
    logs = None if entries is None else list_logs(entries, len(k), start, policy)
    return attend_reference(q, k, v, visible, softmax_scale, sinks, logs)


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy | StepPolicy,
    *,
    softmax_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    select: Select = select_blocks_reference,
) -> torch.Tensor:
    """What :func:`sparsek_kernels.paged.paged_attention` must return, in float64.

    Records are computed from K and V, so that this also checks the ones kept in the cache.

    Args:
        select: what chooses the blocks of a tile, or the lists of tokens, called for them in the
            order of their queries.
    """
    step = StepPolicy.of(policy)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(*q.shape[:2], v_cache.shape[-1], dtype=torch.float64)
    starts = batch.cu_seqlens_q.tolist()
    for request, length in enumerate(batch.seq_lens.tolist()):
        begin, end = starts[request], starts[request + 1]
        if begin == end:
            continue
        rule = step.decode if request < batch.num_decodes else step.prefill
        pages = batch.block_table[request]
        k = gather_sequence(k_cache, pages, length)
        v = gather_sequence(v_cache, pages, length)
        positions = list(range(length - (end - begin), length))
        left, exempt = batch.prompt_left_host, range(0)  # rows at the end of the prompt
        if not step.prefill.alignment and (left is not None or request >= batch.num_decodes):
            of_prompts = step.of_ends if request < batch.num_decodes else step.prefill
            after = None if left is None else left[request]
            exempt = range(*of_prompts.last_rows(end - begin, length, after))
        whole = torch.arange(length) <= torch.tensor(positions)[:, None]
        if rule.alignment:  # a prompt's tokens choose alone
            together = end - begin if request < batch.num_decodes else 1
            for row in range(begin, end, together):
                start = positions[row - begin]
                rows = (q[row : row + together], k, v, start, rule, scale, sinks, select)
                out[row : row + together] = attend_by_records_reference(*rows)
            for row in exempt:
                one = slice(begin + row, begin + row + 1)
                seen = whole[row].expand(1, k.shape[1], -1)
                out[one] = attend_reference(q[one], k, v, seen, scale, sinks)
            continue
        logs = logs_reference(q[begin:end], k, positions, rule, scale, select)
        visible = logs > -math.inf
        for row in exempt:
            visible[row], logs[row] = whole[row], 0.0
        out[begin:end] = attend_reference(q[begin:end], k, v, visible, scale, sinks, logs)
    return out
