"""Attention over a paged KV cache: write, select, attend.  Checks and dispatch only."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from sparsek_kernels.checks import FLOAT_DTYPES, check_heads, check_scale, check_tensor
from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.checks import (
    check_batch,
    check_batch_layout,
    check_cache,
    check_cache_dtype,
    check_gated,
    check_invariance,
    check_lists,
    check_rotation,
    check_summary,
    check_triton_layout,
    fit_pages,
    given_summary,
)
from sparsek_kernels.paged.cpu.attend import paged_attention_eager
from sparsek_kernels.paged.cpu.seer import write_gate_keys_eager
from sparsek_kernels.paged.cpu.select import select_blocks_eager
from sparsek_kernels.paged.cpu.write import write_kv_eager
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import segments
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.seer.gates import Gates, given_gates

if TYPE_CHECKING:
    from collections.abc import Hashable

    from sparsek_kernels.paged.launch.replay import ReplayableCall


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
) -> None:
    """Store new keys and values in their pages and keep the pages' summaries current.

    Every touched vector of the sketch is made anew from the keys in the page, so it carries no
    accumulated rounding, and one that is still filling is the mean of what it holds.

    Args:
        key, value: ``[T, Hkv, D]``; the new tokens of a sequence are neighbours, in order.
        k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``, written; any strides (on a GPU the
            last dimension of every tensor is contiguous).
        k_summary: ``[num_pages, Hkv, summary_bytes(page_size, D)]`` uint8, written as well; or
            ``None``.
        slot_mapping: ``[T]`` int64, ``page * page_size + offset``; -1 marks padding.
        k_scale, v_scale: of an fp8 (e4m3) cache, which holds ``key / k_scale``.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
        NotImplementedError: an fp8 cache on a CPU.
    """
    tensors = (key, value, k_cache, v_cache, k_summary, slot_mapping)
    call = _replayable(tensors, ("write", k_scale, v_scale))
    if call is not None and call.replay():
        return
    heads, _, dim = check_cache(k_cache, v_cache)
    check_cache_dtype(k_cache, key.dtype, k_scale, v_scale)
    check_tensor("key", key, ("T", heads, dim), device=k_cache.device)
    check_tensor("value", value, (key.shape[0], heads, v_cache.shape[-1]), device=k_cache.device)
    check_tensor("slot_mapping", slot_mapping, ("T",), (torch.int64,), k_cache.device)
    if slot_mapping.shape[0] > key.shape[0]:
        raise ValueError(
            f"slot_mapping: expected at most {key.shape[0]} entries, got {slot_mapping.shape[0]}"
        )
    check_summary(k_summary, k_cache)
    tokens = slot_mapping.shape[0]
    if k_cache.is_cuda:
        from sparsek_kernels.paged.launch import attend as launch

        check_triton_layout(
            key=key,
            value=value,
            k_cache=k_cache,
            v_cache=v_cache,
            k_summary=k_summary,
            slot_mapping=slot_mapping,
        )
        with nullcontext() if call is None else call.recorded():
            launch.write_kv(*tensors, k_scale=k_scale, v_scale=v_scale)
        return
    write_kv_eager(key[:tokens], value[:tokens], k_cache, v_cache, k_summary, slot_mapping)


def write_means(k_cache: torch.Tensor, k_summary: torch.Tensor, batch: PagedBatch) -> None:
    """Store the means of the cells that a batch's new tokens complete, for InfLLM-v2's scores.

    A policy with the ranking ``infllm`` reads them on a GPU in place of the sketch: call
    :func:`write_kv` without summaries, then this, then :func:`paged_attention`.

    Args:
        k_cache: ``[num_pages, Hkv, page_size, D]``, the batch's keys included.
        k_summary: ``[num_pages, Hkv, summary_bytes(page_size, D)]`` uint8, written.
        batch: the requests; with ``rotation`` the means are of keys turned back by it.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
        NotImplementedError: a CPU.
    """
    call = _replayable((k_cache, k_summary), ("means",), batch)
    if call is not None and call.replay():
        return
    check_cache(k_cache)
    if not k_cache.is_cuda:
        raise NotImplementedError(
            "k_cache: on a CPU blocks are ranked by the keys themselves; call write_kv alone"
        )
    check_summary(k_summary, k_cache)
    check_triton_layout(k_cache=k_cache, k_summary=k_summary)
    check_batch_layout(batch)
    check_rotation(batch, k_cache)
    from sparsek_kernels.paged.launch import infllm as launch

    with nullcontext() if call is None else call.recorded():
        launch.write_means(k_cache, k_summary, batch)


def write_gate_keys(
    k_cache: torch.Tensor,
    k_summary: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    gates: Gates,
) -> None:
    """Store the gate keys of the blocks that a batch's new tokens complete.

    A policy with the ranking ``seer`` (SeerAttention-R, arXiv 2506.08889, section 3) reads them in
    place of the sketch: call :func:`write_kv` without summaries, then this, then
    :func:`paged_attention`.

    Args:
        k_cache: ``[num_pages, Hkv, page_size, D]``, the batch's keys included.
        k_summary: ``[num_pages, Hkv, summary_bytes(page_size, D)]`` uint8, written.
        batch: the requests; with ``rotation`` gate keys are of keys turned back by it, and turned
            by their block's first position.
        policy: whose blocks, with the ranking ``seer``.
        gates: the layer's.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
        NotImplementedError: on a GPU, a last dimension that is not contiguous.
    """
    call = _replayable(
        (k_cache, k_summary, *given_gates(gates).tensors), ("gate keys", policy), batch
    )
    if call is not None and call.replay():
        return
    if policy.ranking != "seer":
        raise ValueError(f"policy: expected ranking='seer', got {policy.ranking!r}")
    check_cache(k_cache)
    check_summary(k_summary, k_cache)
    check_gated(policy, gates, k_cache)
    check_rotation(batch, k_cache)
    if not k_cache.is_cuda:
        write_gate_keys_eager(k_cache, k_summary, batch, policy.sel_block_size, gates)
        return
    check_triton_layout(k_cache=k_cache, k_summary=k_summary)
    check_batch_layout(batch)
    from sparsek_kernels.paged.launch import seer as launch

    with nullcontext() if call is None else call.recorded():
        launch.write_gate_keys(k_cache, k_summary, batch, policy.sel_block_size, gates)


def select_blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    k_summary: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    k_scale: float = 1.0,
    lists: torch.Tensor | None = None,
    gates: Gates | None = None,
) -> list[torch.Tensor]:
    """Blocks that win by score, for inspection, metrics and tests.

    Args:
        q: ``[T, Hq, D]``, fp16/bf16/fp32; requests packed in the order of ``batch``.
        k_cache: ``[num_pages, Hkv, page_size, D]``, as :func:`write_kv` fills it.
        batch: the requests.
        policy: how blocks compete (docs/selection.md).
        k_summary: ``[num_pages, Hkv, summary_bytes(page_size, D)]``, as :func:`write_kv` keeps
            it, or :func:`write_means` for InfLLM-v2's scores on a GPU, or :func:`write_gate_keys`
            for gates; needed where single tokens select: decodes, and prefills with ``query_tile``
            1.
        softmax_scale: default ``D ** -0.5``.
        k_scale: factor of an fp8 (e4m3) cache and of its sketch.
        lists: of :func:`block_lists`: prefills follow them, not scores.
        gates: the layer's, for ``policy.ranking`` ``seer``.

    Returns:
        One ``[tiles, Hkv, scored_blocks]`` int64 tensor per request, ascending block indices;
        rows of tiles that see everything are -1.  Decodes have a tile per token, and blocks of the
        size and number that ``policy.per_token()`` has.

    Raises:
        TypeError, ValueError: ``policy`` does not select blocks, or an argument does not fit.
        NotImplementedError: an fp8 cache on a CPU.
    """
    if not policy.selects_blocks:
        raise ValueError(f"policy: expected top_k >= 1, got top_k={policy.top_k}")
    if policy.query_tile == 1:
        policy = policy.per_token()
    heads, page_size, dim = check_cache(k_cache)
    check_tensor("q", q, ("T", "Hq", dim), FLOAT_DTYPES, k_cache.device)
    check_heads(q.shape[1], heads)
    check_gated(policy, gates, k_cache, q.shape[1])
    check_cache_dtype(k_cache, q.dtype, k_scale)
    check_summary(k_summary, k_cache)
    if batch.num_decodes or policy.query_tile == 1:
        given_summary(k_summary)
    policy = fit_pages(policy, page_size)
    check_batch(q, batch, k_cache)
    check_lists(lists, policy, heads, q.device)
    scale = check_scale(softmax_scale, dim)
    if q.is_cuda:
        from sparsek_kernels.paged.launch import attend as launch

        check_triton_layout(q=q, k_cache=k_cache, k_summary=k_summary)
        check_batch_layout(batch)
        check_rotation(batch, k_cache)
        found = launch.select_blocks(
            q,
            k_cache,
            batch,
            policy,
            k_summary=k_summary,
            softmax_scale=scale,
            k_scale=k_scale,
            lists=lists,
            gates=gates,
        )
    else:
        found = select_blocks_eager(
            q,
            k_cache,
            batch,
            policy,
            k_summary=k_summary,
            softmax_scale=scale,
            lists=lists,
            gates=gates,
        )
    tokens: list[int] = []
    tiles: list[int] = []
    for request, (length, count) in enumerate(zip(*host_lengths(batch), strict=True)):
        if request < batch.num_decodes:
            tokens.append(count)
        else:
            tiles.append(policy.num_tiles(length - count, length))
    rows = zip(found, (tokens, tiles), strict=True)
    return [
        part
        for some, counts in rows
        for part in some[: sum(counts)].long().clamp(min=-1).split(counts)
    ]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    softmax_scale: float | None = None,
    k_summary: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    batch_invariant: bool = False,
    lists: torch.Tensor | None = None,
    gates: Gates | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over their sequences' pages under a selection policy.

    The new tokens' keys and values are in the cache already (:func:`write_kv`).

    Args:
        q: ``[T, Hq, D]``, fp16/bf16/fp32; requests packed in the order of ``batch``.
        k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``, any strides (on a GPU the last
            dimension of every tensor is contiguous, and V is as wide as K).
        batch: the requests.
        policy: what a query attends (docs/selection.md).  A page holds whole blocks that are
            selected, or such a block whole pages; without a selection any multiple of 16 will do.
        softmax_scale: default ``D ** -0.5``.
        k_summary: ``[num_pages, Hkv, summary_bytes(page_size, D)]`` uint8 of :func:`write_kv`, or
            of :func:`write_means` for InfLLM-v2's scores on a GPU, or of :func:`write_gate_keys`
            for gates; needed when blocks are selected.
        sinks: ``[Hq]`` learned logits that join the softmax denominator only.
        out: ``[T, Hq, Dv]``, written and returned.
        k_scale, v_scale: factors of an fp8 (e4m3) cache; ``k_scale`` also of its sketch.
        batch_invariant: compute every row bit for bit as if its token were decoded alone: the
            result depends on the token's query, its sequence's pages up to its position, the policy
            and the width of ``block_table``.  Selection is per token (``query_tile`` 1, no
            ``dense_last``); slower, for prefills above all.
        lists: of :func:`block_lists` for ``policy``: prefills attend what they list in place of the
            best-scoring blocks, decodes select as ever.
        gates: the layer's, for ``policy.ranking`` ``seer``.

    Returns:
        ``out``, or a new tensor ``[T, Hq, Dv]`` in the dtype of ``q``; rows of no request are
        undefined.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
        NotImplementedError: an fp8 cache, or ``batch_invariant``, on a CPU; ``batch_invariant``
            with learned scores.
    """
    call = None
    by_token = batch_invariant or (policy.query_tile == 1 and batch.num_prefills > 0)
    if out is not None and lists is None and not by_token:
        learned = () if gates is None else gates.tensors
        tensors = (q, k_cache, v_cache, out, k_summary, sinks, *learned)
        call = _replayable(tensors, (policy, softmax_scale, k_scale, v_scale), batch)
        if call is not None and call.replay():
            return out
    heads, page_size, dim = check_cache(k_cache, v_cache)
    check_tensor("q", q, ("T", "Hq", dim), FLOAT_DTYPES, k_cache.device)
    check_heads(q.shape[1], heads)
    check_gated(policy, gates, k_cache, q.shape[1])
    check_cache_dtype(k_cache, q.dtype, k_scale, v_scale)
    if policy.selects_blocks and k_summary is None:
        raise ValueError("k_summary: expected the page summaries when top_k >= 1, got None")
    check_summary(k_summary, k_cache)
    policy = fit_pages(policy, page_size)
    check_batch(q, batch, k_cache)
    check_lists(lists, policy, heads, q.device)
    if sinks is not None:
        check_tensor("sinks", sinks, (q.shape[1],), device=q.device)
    shape = (*q.shape[:2], v_cache.shape[-1])
    if out is None:
        out = q.new_empty(shape)
    check_tensor("out", out, shape, (q.dtype,), q.device)
    scale = check_scale(softmax_scale, dim)
    if q.is_cuda:
        if batch_invariant:
            check_invariance(policy)
        check_triton_layout(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            k_summary=k_summary,
            sinks=sinks,
            out=out,
        )
        check_batch_layout(batch)
        check_rotation(batch, k_cache)
    elif batch_invariant:
        raise NotImplementedError(
            "batch_invariant: needs a GPU, since torch's matrix products on a CPU round by shape; "
            "leave it out"
        )
    if policy.query_tile == 1:
        policy = policy.per_token()
    operands = PagedOperands(
        q,
        k_cache,
        v_cache,
        out,
        scale,
        k_summary,
        sinks,
        k_scale,
        v_scale,
        lists,
        gates=gates,
    )
    with nullcontext() if call is None else call.recorded():
        _attend_step(operands, batch, policy, batch_invariant=batch_invariant)
    return out


def _replayable(
    tensors: tuple[torch.Tensor | None, ...], options: Hashable, batch: PagedBatch | None = None
) -> ReplayableCall | None:
    """The call as one whose launches may be replayed, before any check; ``None`` on a CPU."""
    if not isinstance(tensors[0], torch.Tensor) or not tensors[0].is_cuda:
        return None
    from sparsek_kernels.paged.launch.replay import replayable

    return replayable(tensors, options, batch)


def _attend_step(
    operands: PagedOperands, batch: PagedBatch, policy: SelectionPolicy, *, batch_invariant: bool
) -> None:
    if batch_invariant:
        _attend(operands, batch, policy, batch_invariant=True)
        return
    if not policy.dense_last or not batch.num_prefills or policy.sees_all(batch.max_seq_len - 1):
        _attend(operands, batch, policy)
        return
    for segment in segments(batch, policy):
        _attend(operands.of_rows(segment.rows), segment.batch, segment.policy)


def _attend(
    operands: PagedOperands,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    batch_invariant: bool = False,
) -> None:
    if not operands.q.is_cuda:
        paged_attention_eager(operands, batch, policy)
        return
    from sparsek_kernels.paged.launch import attend as launch

    launch.paged_attention(operands, batch, policy, batch_invariant=batch_invariant)
