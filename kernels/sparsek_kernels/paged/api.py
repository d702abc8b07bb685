"""Attention over a paged KV cache: write, choose, attend.  Checks and dispatch only."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from sparsek_kernels.checks import FLOAT_DTYPES, check_heads, check_scale, check_tensor
from sparsek_kernels.paged.attend import attend
from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.checks import (
    check_batch,
    check_batch_layout,
    check_cache,
    check_cache_dtype,
    check_context,
    check_rotation,
    check_summary,
    check_triton_layout,
    fit_both,
    fit_pages,
)
from sparsek_kernels.paged.index.base import Indexer, Indexers
from sparsek_kernels.paged.index.cell_means import CellMeans
from sparsek_kernels.paged.index.page_records import PageRecords, write_records
from sparsek_kernels.paged.operands import Located, PagedOperands
from sparsek_kernels.paged.plan import Segment, each_segment, plan_step, plan_tokens, tokens_alone
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy
from sparsek_kernels.paged.write.cpu import write_kv_eager

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import ModuleType

    from sparsek_kernels.paged.chosen import Chosen
    from sparsek_kernels.paged.replay import ReplayableCall


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pages: Located | None = None,
) -> None:
    """Store new keys and values in their pages, and the records of segments that they complete.

    A record is made from the 64 keys and values in the page, whatever the order they came in.

    Args:
        key, value: ``[T, Hkv, D]``; the new tokens of a sequence are neighbours, in order.
        k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``, written; any strides (on a GPU the
            last dimension of every tensor is contiguous).
        k_summary: ``[num_pages, Hkv, bytes]`` uint8, where records are written; at least
            ``summary_bytes(page_size, D)``, with pages of a multiple of 64 tokens; or ``None``.
        slot_mapping: ``[T]`` int64, ``page * page_size + offset``; -1 marks padding.
        k_scale, v_scale: of an fp8 (e4m3) cache, which holds ``key / k_scale``.
        pages: where the pages are, if that is known (``paged.api.locate_pages``).

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
        NotImplementedError: an fp8 cache on a CPU.
    """
    tensors = (k_cache, v_cache, k_summary, key, value, slot_mapping)
    call = _replayable(_located(tensors, pages), ("write", k_scale, v_scale))
    if call is not None and call.replay():
        return
    heads, _, dim = check_cache(k_cache, v_cache)
    check_cache_dtype(k_cache, key.dtype, k_scale, v_scale)
    check_tensor("key", key, ("T", heads, dim), device=k_cache.device)
    shape = (key.shape[0], heads, v_cache.shape[-1])
    check_tensor("value", value, shape, (key.dtype,), k_cache.device)
    check_tensor("slot_mapping", slot_mapping, ("T",), (torch.int64,), k_cache.device)
    if slot_mapping.shape[0] > key.shape[0]:
        raise ValueError(
            f"slot_mapping: expected at most {key.shape[0]} entries, got {slot_mapping.shape[0]}"
        )
    if k_summary is not None:
        PageRecords().check_pages(k_cache, v_cache, k_summary)
    if k_cache.is_cuda:
        from sparsek_kernels.paged.write import launch

        check_triton_layout(
            key=key,
            value=value,
            k_cache=k_cache,
            v_cache=v_cache,
            k_summary=k_summary,
            slot_mapping=slot_mapping,
        )
        with nullcontext() if call is None else call.recorded():
            rows = (key, value, k_cache, v_cache, k_summary, slot_mapping)
            launch.write_kv(*rows, k_scale=k_scale, v_scale=v_scale)
        return
    tokens = slot_mapping.shape[0]
    write_kv_eager(key[:tokens], value[:tokens], k_cache, v_cache, slot_mapping)
    if k_summary is not None:
        write_records(k_cache, k_summary, slot_mapping)


def write_index(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    index: Indexer,
) -> None:
    """Keep what an indexer has in the pages that a step touches, where :func:`write_kv` does not.

    Call :func:`write_kv` without summaries, then this, then :func:`paged_attention`.

    Args:
        k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``, the batch's keys and values included.
        k_summary: ``[num_pages, Hkv, bytes]`` uint8, written; at least
            ``index.page_bytes(page_size, D)``.
        batch: the step; with ``rotation`` what is kept is of keys turned back by it.
        policy: of the indexer's phase.
        index: the indexer.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it; or ``write_kv``
            writes what the indexer reads.
        NotImplementedError: on a GPU, a last dimension that is not contiguous.
    """
    tensors = (k_cache, v_cache, k_summary, *index.tensors)
    replays: dict[Hashable, Any] = batch.derived("replays of writes", dict)
    located = _located(tensors) if index.replayable else None
    call = _replayable(located, (policy, index.key), replays)
    if call is not None and call.replay():
        return
    _, page_size, dim = check_cache(k_cache, v_cache)
    if index.written_with_keys:
        raise ValueError(
            f"index: expected one that write_kv does not serve, got {type(index).__name__}; give "
            "write_kv the k_summary"
        )
    check_summary(k_summary, k_cache, index.page_bytes(page_size, dim))
    index.check(policy, k_cache)
    check_rotation(batch, k_cache)
    if k_cache.is_cuda:
        check_triton_layout(k_cache=k_cache, v_cache=v_cache, k_summary=k_summary)
        check_batch_layout(batch)
    with nullcontext() if call is None else call.recorded():
        index.write(k_cache, v_cache, k_summary, batch, policy)


def default_indexers(policy: StepPolicy) -> Indexers:
    """The indexers of ordinary models: two steps for tiles, records for single tokens."""

    def of(one: SelectionPolicy) -> Indexer | None:
        if not one.selects_blocks:
            return None
        return PageRecords() if one.query_tile == 1 else CellMeans()

    prefill, decode = of(policy.prefill), of(policy.decode)
    return Indexers(prefill, decode or (prefill if policy.prefill.alignment else None))


def select_blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy | StepPolicy,
    *,
    k_summary: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    k_scale: float = 1.0,
    indexers: Indexers | None = None,
) -> list[torch.Tensor]:
    """Blocks that indexers choose, for inspection, metrics and tests.

    Args:
        q: ``[T, Hq, D]``, fp16/bf16/fp32; requests packed in the order of ``batch``.
        k_cache: ``[num_pages, Hkv, page_size, D]``, as :func:`write_kv` fills it.
        batch: the requests.
        policy: how blocks compete (docs/selection.md), as :func:`paged_attention` takes it.
        k_summary: ``[num_pages, Hkv, bytes]`` uint8, at least the indexers' ``page_bytes``, as
            :func:`write_kv` or :func:`write_index` keeps it; needed by indexers that read it.
        softmax_scale: default ``D ** -0.5``.
        k_scale: factor of an fp8 (e4m3) cache.
        indexers: what chooses; default: :func:`default_indexers`.

    Returns:
        One ``[tiles, Hkv, scored_blocks]`` int64 tensor per request, as ``Chosen`` has them;
        rows of tiles that see everything are -1.  Decodes have blocks of the size and number of
        their own policy, and a tile per token, or one for all with an alignment.

    Raises:
        TypeError, ValueError: ``policy`` does not select blocks, or an argument does not fit.
        NotImplementedError: an fp8 cache on a CPU.
    """
    rule = StepPolicy.of(policy)
    if not rule.selects_blocks:
        raise ValueError(f"policy: expected top_k >= 1, got top_k={rule.prefill.top_k}")
    indexers = default_indexers(rule) if indexers is None else indexers
    _, _, dim = check_cache(k_cache)
    check_tensor("q", q, ("T", "Hq", dim), FLOAT_DTYPES, k_cache.device)
    check_batch(q, batch, k_cache)
    scale = check_scale(softmax_scale, dim)
    operands = PagedOperands(q, k_cache, k_cache, q, scale, k_summary, k_scale=k_scale)
    cut, total = batch.num_decodes, batch.num_requests
    parts = (((0, cut), rule.decode), ((cut, total), rule.prefill))
    found: list[torch.Tensor] = []
    lengths, counts = host_lengths(batch)
    for (first, last), one in parts:
        if first == last:
            continue
        part = batch if (first, last) == (0, total) else batch.part(first, last)
        decodes = part.num_decodes > 0
        rows = [
            counts[r] if decodes else one.num_tiles(lengths[r] - counts[r], lengths[r])
            for r in range(first, last)
        ]
        alone = one.alignment > 0 and not decodes
        segments = tokens_alone(part, one) if alone else (Segment(part, one),)
        if decodes and one.alignment:
            rows = [1] * (last - first)
        indices = torch.cat([_select(operands, each, indexers) for each in segments])
        found += indices[: sum(rows)].long().clamp(min=-1).split(rows)
    return found


def _select(operands: PagedOperands, segment: Segment, indexers: Indexers) -> torch.Tensor:
    """Indices of a segment's tiles, perhaps with more rows at the end."""
    index, operands = indexers.of(segment), operands.of_rows(segment.rows)
    if index is None:
        shape = (operands.q.shape[0], operands.heads, 0)
        return operands.q.new_full(shape, -1, dtype=torch.int32)
    check_segment(operands, segment, index)
    return index.select(operands, segment).indices


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy | StepPolicy,
    *,
    softmax_scale: float | None = None,
    k_summary: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    batch_invariant: bool = False,
    indexers: Indexers | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over their sequences' pages under a selection policy.

    The new tokens' keys and values are in the cache already (:func:`write_kv`).

    Args:
        q: ``[T, Hq, D]``, fp16/bf16/fp32; requests packed in the order of ``batch``.
        k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``, any strides (on a GPU the last
            dimension of every tensor is contiguous, and V is as wide as K).
        batch: the requests.
        policy: what prompts and decoded tokens attend (docs/selection.md); one policy alone gives
            decoded tokens as many tokens as a tile, by records (:meth:`StepPolicy.of`).  A page
            holds whole blocks that are selected, or such a block whole pages, and with records a
            multiple of 64 tokens; without a selection any multiple of 16 will do.
        softmax_scale: default ``D ** -0.5``.
        k_summary: ``[num_pages, Hkv, bytes]`` uint8, at least the indexers' ``page_bytes``, of
            :func:`write_kv` or :func:`write_index`; needed by indexers that read it.
        sinks: ``[Hq]`` learned logits that join the softmax denominator only.
        out: ``[T, Hq, Dv]``, written and returned.
        k_scale, v_scale: factors of an fp8 (e4m3) cache.
        batch_invariant: compute every row bit for bit as if its token were decoded alone: the
            result depends on the token's query, its sequence's pages up to its position, the policy
            and the width of ``block_table``.  Selection is per token, by the policy of decoded
            tokens; slower, for prefills above all.
        indexers: what chooses blocks; default: :func:`default_indexers`.

    Returns:
        ``out``, or a new tensor ``[T, Hq, Dv]`` in the dtype of ``q``; rows of no request are
        undefined.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
        NotImplementedError: an fp8 cache, or ``batch_invariant``, on a CPU; ``batch_invariant``
            with an indexer that is not.
    """
    ranks = ((q, 3), (k_cache, 4), (v_cache, 4))
    if any(not isinstance(x, torch.Tensor) or x.dim() != rank for x, rank in ranks):
        _, _, dim = check_cache(k_cache, v_cache)
        check_tensor("q", q, ("T", "Hq", dim), FLOAT_DTYPES, k_cache.device)
        check_tensor("v_cache", v_cache, ("num_pages", "Hkv", "page_size", "Dv"))
    # What else they must be is checked by segment, but for launches that are repeated.
    page_size, dim = k_cache.shape[2:]
    rule = fit_both(StepPolicy.of(policy), page_size)
    indexers = default_indexers(rule) if indexers is None else indexers
    check_batch(q, batch, k_cache)
    if rule.selects_blocks and indexers.reads_pages and k_summary is None:
        raise ValueError("k_summary: expected the page summaries when top_k >= 1, got None")
    shape = (*q.shape[:2], v_cache.shape[-1])
    if out is None:
        out = q.new_empty(shape)
    elif isinstance(out, torch.Tensor) and 0 != out.data_ptr() == q.data_ptr():
        raise ValueError("out: expected memory of its own, got that of q")
    scale = check_scale(softmax_scale, dim)
    operands = PagedOperands(
        q, k_cache, v_cache, out, scale, k_summary, sinks, k_scale=k_scale, v_scale=v_scale
    )
    if batch_invariant:
        segments = plan_tokens(batch, rule.decode, q.shape[1], q.shape[0], page_size)
    else:
        segments = plan_step(batch, rule)
    for mine, segment in each_segment(operands, segments):
        attend_segment(mine, segment, indexers.of(segment))
    return out


def attend_segment(operands: PagedOperands, segment: Segment, index: Indexer | None) -> None:
    """Choose and attend for one segment of a step.

    From a step's second layer on, the first layer's launches are repeated.

    Args:
        operands: with the segment's rows of ``q`` and ``out``.
        segment: of :func:`plan_step` or :func:`plan_tokens`.
        index: what chooses the segment's blocks; ``None`` where its policy has nothing to choose.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`paged_attention`.
    """
    chosen = None
    if index is not None and not index.replayable:  # then attention alone is repeated
        check_segment(operands, segment, index)
        if segment.decodes and index.fused_decode(operands, segment):
            return
        chosen = index.select(operands, segment)
    call = _replayable_segment(operands, segment, index, chosen)
    if call is not None and call.replay():
        return
    if chosen is None:
        check_segment(operands, segment, index)
    with nullcontext() if call is None else call.recorded():
        if index is None or chosen is not None:
            attend(operands, segment, chosen)
        elif not (segment.decodes and index.fused_decode(operands, segment)):
            attend(operands, segment, index.select(operands, segment))


def check_segment(operands: PagedOperands, segment: Segment, index: Indexer | None) -> None:
    """Check that a segment can be chosen for and attended over these tensors.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`paged_attention`.
    """
    q, k_cache, v_cache, out = operands.q, operands.k_cache, operands.v_cache, operands.out
    batch, policy = segment.batch, segment.policy
    heads, page_size, dim = check_cache(k_cache, v_cache)
    check_tensor("q", q, ("T", "Hq", dim), FLOAT_DTYPES, k_cache.device)
    check_heads(q.shape[1], heads)
    check_cache_dtype(k_cache, q.dtype, operands.k_scale, operands.v_scale)
    if operands.k_summary is not None:
        least = 0 if index is None else index.page_bytes(page_size, dim)
        check_summary(operands.k_summary, k_cache, least)
    if fit_pages(policy, page_size) is not policy:
        raise ValueError(
            f"segment: expected blocks that hold pages of {page_size} tokens whole, or pages that "
            f"hold them, got sel_block_size={policy.sel_block_size}; plan the step by fit_both()"
        )
    check_batch(q, batch, k_cache, shared=operands.lse is not None)
    check_context(batch, policy)
    if index is not None:
        index.check(policy, k_cache, q.shape[1])
        if index.reads_pages:
            operands.summary  # noqa: B018 - raises where there is none
    if operands.sinks is not None:
        check_tensor("sinks", operands.sinks, (q.shape[1],), device=q.device)
    dtypes = (q.dtype,) if operands.lse is None else (torch.float32,)
    check_tensor("out", out, (*q.shape[:2], v_cache.shape[-1]), dtypes, q.device)
    if segment.fixed_order:
        _check_invariance(q, index)
    if q.is_cuda:
        check_triton_layout(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            k_summary=operands.k_summary,
            sinks=operands.sinks,
            out=out,
        )
        check_batch_layout(batch)
        check_rotation(batch, k_cache)


def _check_invariance(q: torch.Tensor, index: Indexer | None) -> None:
    if not q.is_cuda:
        raise NotImplementedError(
            "batch_invariant: needs a GPU, since torch's matrix products on a CPU round by shape; "
            "leave it out"
        )
    if index is not None and not index.batch_invariant:
        raise NotImplementedError(
            f"batch_invariant: not served with the indexer {type(index).__name__}, whose scores "
            "round by the batch; leave one of them out"
        )


def _replayable_segment(
    operands: PagedOperands, segment: Segment, index: Indexer | None, chosen: Chosen | None = None
) -> ReplayableCall | None:
    """A segment's launches as ones that may be repeated: those of attention where it has chosen."""
    if not segment.repeats or operands.lse is not None:
        return None
    options: tuple[Hashable, ...] = (operands.softmax_scale, operands.k_scale, operands.v_scale)
    more = segment.tensors
    if index is not None:
        options = (*options, index.key)
        more += index.tensors if chosen is None else (chosen.indices,)
    known, tensors = operands.located, operands.tensors
    if known is None or not all(map(is_, known.tensors, tensors)):
        operands.located = known = _located(tensors, operands.pages)
    if more and known is not None:
        known = _located(tensors + more, known)
    return _replayable(known, options, segment.replays)


def locate_pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_summary: torch.Tensor | None
) -> Located | None:
    """Where a layer's pages are, for calls that then need not look at them; ``None`` on a CPU.

    Args:
        k_cache, v_cache, k_summary: as later calls take them, which nothing changes meanwhile.
    """
    return _located((k_cache, v_cache, k_summary))


def _located(
    tensors: tuple[torch.Tensor | None, ...], known: Located | None = None
) -> Located | None:
    """Where these tensors are, before any check; ``None`` on a CPU."""
    if not isinstance(tensors[0], torch.Tensor) or not tensors[0].is_cuda:
        return None
    found: Located | None = _find_replay().locate(tensors, known)
    return found


def _replayable(
    located: Located | None, options: Hashable, replays: dict[Hashable, Any] | None = None
) -> ReplayableCall | None:
    """The call as one whose launches may be replayed; ``None`` on a CPU."""
    if located is None:
        return None
    found: ReplayableCall | None = _find_replay().replayable(located, options, replays)
    return found


@cache
def _find_replay() -> ModuleType:
    from sparsek_kernels.paged import replay

    return replay
