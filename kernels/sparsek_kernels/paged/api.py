"""Attention over a paged KV cache: write, select, attend.  Checks and dispatch only."""

from __future__ import annotations

import torch

from sparsek_kernels.checks import FLOAT_DTYPES, check_heads, check_tensor
from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.eager import (
    PagedOperands,
    paged_attention_eager,
    plan_decodes,
    plan_prefill,
)
from sparsek_kernels.paged.eager_select import select_tiles, select_tokens
from sparsek_kernels.paged.eager_write import write_kv_eager
from sparsek_kernels.paged.plan import segments
from sparsek_kernels.paged.policy import CELL_SIZE, ScoreKind, SelectionPolicy


def summary_vectors(page_size: int) -> int:
    """Summary vectors per page and KV head.

    Raises:
        ValueError: the page does not hold whole cells.
    """
    if page_size < CELL_SIZE or page_size % CELL_SIZE:
        raise ValueError(f"page_size: expected a multiple of {CELL_SIZE}, got {page_size}")
    return page_size // CELL_SIZE


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    score_kind: ScoreKind = "cell_mean",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store new keys and values in their pages and keep the pages' summaries current.

    Summaries of every touched cell are recomputed from the keys in the page, so they carry no
    accumulated rounding, and a cell that is still filling has the summary of what it holds.

    Args:
        key, value: ``[T, Hkv, D]``; the new tokens of a sequence are neighbours, in order.
        k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``, written; any strides (on a GPU the
            last dimension of every tensor is contiguous).
        k_summary: ``[num_pages, Hkv, page_size // 16, D]``, written likewise; or ``None``.
        slot_mapping: ``[T]`` int64, ``page * page_size + offset``; -1 marks padding.
        score_kind: what the summaries are (see :class:`SelectionPolicy`).
        k_scale, v_scale: of an fp8 (e4m3) cache, which holds ``key / k_scale``.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
        NotImplementedError: an fp8 cache on a CPU.
    """
    heads, page_size, dim = _check_cache(k_cache, v_cache)
    _check_cache_dtype(k_cache, key.dtype, k_scale, v_scale)
    check_tensor("key", key, ("T", heads, dim), device=k_cache.device)
    check_tensor("value", value, (key.shape[0], heads, v_cache.shape[-1]), device=k_cache.device)
    check_tensor("slot_mapping", slot_mapping, ("T",), (torch.int64,), k_cache.device)
    if slot_mapping.shape[0] > key.shape[0]:
        raise ValueError(
            f"slot_mapping: expected at most {key.shape[0]} entries, got {slot_mapping.shape[0]}"
        )
    _check_summary(k_summary, k_cache, page_size, score_kind)
    tokens = slot_mapping.shape[0]
    if k_cache.is_cuda:
        from sparsek_kernels.paged import launch

        _check_triton_layout(
            key=key,
            value=value,
            k_cache=k_cache,
            v_cache=v_cache,
            k_summary=k_summary,
            slot_mapping=slot_mapping,
        )
        launch.write_kv(
            key,
            value,
            k_cache,
            v_cache,
            k_summary,
            slot_mapping,
            score_kind=score_kind,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return
    write_kv_eager(
        key[:tokens], value[:tokens], k_cache, v_cache, k_summary, slot_mapping, score_kind
    )


def select_blocks(
    q: torch.Tensor,
    k_summary: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    page_size: int,
    softmax_scale: float | None = None,
) -> list[torch.Tensor]:
    """Blocks that win by score, for inspection, metrics and tests.

    Args:
        q: ``[T, Hq, D]``, fp16/bf16/fp32; requests packed in the order of ``batch``.
        k_summary: ``[num_pages, Hkv, page_size // 16, D]``, as :func:`write_kv` keeps them.
        batch: the requests.
        policy: how blocks compete (docs/selection.md).
        page_size: tokens in a page.
        softmax_scale: default ``D ** -0.5``; of an fp8 cache, times its ``k_scale``.

    Returns:
        One ``[tiles, Hkv, scored_blocks]`` int64 tensor per request, ascending block indices;
        rows of tiles that see everything are -1.  Decodes have a tile per token.

    Raises:
        TypeError, ValueError: ``policy`` does not select blocks, or an argument does not fit.
    """
    if not policy.selects_blocks:
        raise ValueError(f"policy: expected top_k >= 1, got top_k={policy.top_k}")
    vectors = _page_vectors(page_size, policy.score_kind)
    check_tensor("k_summary", k_summary, ("num_pages", "Hkv", vectors, "D"))
    heads = k_summary.shape[1]
    check_tensor("q", q, ("T", "Hq", k_summary.shape[-1]), FLOAT_DTYPES, k_summary.device)
    check_heads(q.shape[1], heads)
    _check_pages(policy, page_size)
    _check_batch(q, batch, page_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    grouped = q.unflatten(1, (heads, -1))
    lengths, counts = host_lengths(batch)
    if q.is_cuda:
        _check_triton_layout(q=q, k_summary=k_summary)
        _check_batch_layout(batch)
        return _select_on_gpu(q, k_summary, batch, policy, scale, page_size)
    per_token = policy.per_token()
    plan = plan_decodes(batch, per_token, page_size)
    decoded = grouped.new_full(
        (batch.num_decode_tokens, heads, policy.scored_blocks), -1, dtype=torch.int64
    )
    if plan.scoring is not None:
        rows = grouped.index_select(0, plan.rows)
        picked = select_tokens(rows, k_summary, plan.scoring, per_token, scale)
        decoded[plan.rows] = picked.sort(dim=-1).values
    chosen = []
    token = batch.first_row
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        end = token + count
        if request < batch.num_decodes:
            chosen.append(decoded[token:end])
            token = end
            continue
        tile = policy.query_tile
        position = length - count
        tiles = (length - 1) // tile - position // tile + 1 if count else 0
        rows = grouped.new_full((tiles, heads, policy.scored_blocks), -1, dtype=torch.int64)
        prefill = plan_prefill(batch, request, policy, max(tiles, 1), page_size)
        begin = prefill.dense_end
        if begin < length:
            picked = select_tiles(
                grouped[token + begin - position : end],
                begin,
                k_summary,
                prefill.summaries,
                policy,
                scale,
            )
            rows[begin // tile - position // tile :] = picked.sort(dim=-1).values
        chosen.append(rows)
        token = end
    return chosen


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
) -> torch.Tensor:
    """Causal attention of new tokens over their sequences' pages under a selection policy.

    The new tokens' keys and values are in the cache already (:func:`write_kv`).

    Args:
        q: ``[T, Hq, D]``, fp16/bf16/fp32; requests packed in the order of ``batch``.
        k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``, any strides (on a GPU the last
            dimension of every tensor is contiguous, and V is as wide as K).
        batch: the requests.
        policy: what a query attends (docs/selection.md).
        softmax_scale: default ``D ** -0.5``.
        k_summary: ``[num_pages, Hkv, page_size // 16, D]``; needed when blocks are selected.
        sinks: ``[Hq]`` learned logits that join the softmax denominator only.
        out: ``[T, Hq, Dv]``, written and returned.
        k_scale, v_scale: factors of an fp8 (e4m3) cache and its summaries.
        batch_invariant: compute every row bit for bit as if its token were decoded alone: the
            result depends on the token's query, its sequence's pages up to its position, the policy
            and the width of ``block_table``.  Selection is per token (``query_tile`` 1, no
            ``dense_last``); slower, for prefills above all.

    Returns:
        ``out``, or a new tensor ``[T, Hq, Dv]`` in the dtype of ``q``; rows of no request are
        undefined.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
        NotImplementedError: an fp8 cache, or ``batch_invariant``, on a CPU.
    """
    heads, page_size, dim = _check_cache(k_cache, v_cache)
    check_tensor("q", q, ("T", "Hq", dim), FLOAT_DTYPES, k_cache.device)
    check_heads(q.shape[1], heads)
    _check_cache_dtype(k_cache, q.dtype, k_scale, v_scale)
    if policy.selects_blocks and k_summary is None:
        raise ValueError("k_summary: expected the page summaries when top_k >= 1, got None")
    _check_summary(k_summary, k_cache, page_size, policy.score_kind)
    _check_pages(policy, page_size)
    _check_batch(q, batch, page_size)
    if sinks is not None:
        check_tensor("sinks", sinks, (q.shape[1],), device=q.device)
    shape = (*q.shape[:2], v_cache.shape[-1])
    if out is None:
        out = q.new_empty(shape)
    check_tensor("out", out, shape, (q.dtype,), q.device)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    if q.is_cuda:
        _check_triton_layout(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            k_summary=k_summary,
            sinks=sinks,
            out=out,
        )
        _check_batch_layout(batch)
    elif batch_invariant:
        raise NotImplementedError(
            "batch_invariant: needs a GPU, since torch's matrix products on a CPU round by shape; "
            "leave it out"
        )
    operands = PagedOperands(k_cache, v_cache, k_summary, sinks, scale, k_scale, v_scale)
    if batch_invariant:
        _attend(q, operands, batch, policy, out, batch_invariant=True)
        return out
    if not policy.dense_last or not batch.num_prefills or policy.sees_all(batch.max_seq_len - 1):
        _attend(q, operands, batch, policy, out)
        return out
    for segment in segments(batch, policy):
        _attend(q[segment.rows], operands, segment.batch, segment.policy, out[segment.rows])
    return out


def _attend(
    q: torch.Tensor,
    operands: PagedOperands,
    batch: PagedBatch,
    policy: SelectionPolicy,
    out: torch.Tensor,
    *,
    batch_invariant: bool = False,
) -> None:
    if not q.is_cuda:
        paged_attention_eager(q, operands, batch, policy, out)
        return
    from sparsek_kernels.paged import launch

    launch.paged_attention(
        q,
        operands.k_cache,
        operands.v_cache,
        batch,
        policy,
        softmax_scale=operands.softmax_scale,
        k_summary=operands.k_summary,
        sinks=operands.sinks,
        out=out,
        k_scale=operands.k_scale,
        v_scale=operands.v_scale,
        batch_invariant=batch_invariant,
    )


def _select_on_gpu(
    q: torch.Tensor,
    k_summary: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    scale: float,
    page_size: int,
) -> list[torch.Tensor]:
    from sparsek_kernels.paged import launch

    rows = launch.select_blocks(
        q, k_summary, batch, policy, softmax_scale=scale, page_size=page_size
    ).long()
    chosen = []
    begin = 0
    for request, (length, count) in enumerate(zip(*host_lengths(batch), strict=True)):
        tile = 1 if request < batch.num_decodes else policy.query_tile
        tiles = (length - 1) // tile - (length - count) // tile + 1 if count else 0
        chosen.append(rows[begin : begin + tiles])
        begin += tiles
    return chosen


def _check_cache_dtype(
    k_cache: torch.Tensor, dtype: torch.dtype, k_scale: float, v_scale: float
) -> None:
    if k_cache.dtype == dtype:
        if k_scale != 1.0 or v_scale != 1.0:
            raise ValueError(
                f"k_scale, v_scale: expected 1.0 for a {dtype} cache, got {k_scale} and {v_scale}"
            )
        return
    if k_cache.dtype != torch.float8_e4m3fn:
        raise TypeError(
            f"k_cache: expected the dtype of q, {dtype}, or float8_e4m3fn, got {k_cache.dtype}"
        )
    if not k_cache.is_cuda:
        raise NotImplementedError(f"k_cache: fp8 caches need a GPU; on a CPU use {dtype}")
    if torch.cuda.get_device_capability(k_cache.device) < (8, 9):
        raise NotImplementedError(f"k_cache: fp8 caches need sm_89 or later; use {dtype}")


def _check_triton_layout(**tensors: torch.Tensor | None) -> None:
    """The Triton kernels read rows as whole runs of memory, K and V of one width."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise NotImplementedError(
                f"{name}: on a GPU the last dimension must be contiguous, got strides "
                f"{tuple(tensor.stride())}; pass {name}.contiguous()"
            )
    k_cache, v_cache = tensors.get("k_cache"), tensors.get("v_cache")
    if k_cache is not None and v_cache is not None and v_cache.shape[-1] != k_cache.shape[-1]:
        raise NotImplementedError(
            f"v_cache: on a GPU V must be as wide as K, {k_cache.shape[-1]}, got "
            f"{v_cache.shape[-1]}; pad V with zeros"
        )


def _check_batch_layout(batch: PagedBatch) -> None:
    """:func:`_check_triton_layout` of a batch's own tensors, once for all layers."""
    batch.derived(
        "layout",
        lambda: _check_triton_layout(
            block_table=batch.block_table,
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
        ),
    )


def _check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, int, int]:
    check_tensor("k_cache", k_cache, ("num_pages", "Hkv", "page_size", "D"))
    pages, heads, page_size, dim = k_cache.shape
    check_tensor(
        "v_cache", v_cache, (pages, heads, page_size, "Dv"), (k_cache.dtype,), k_cache.device
    )
    return heads, page_size, dim


def _check_summary(
    k_summary: torch.Tensor | None, k_cache: torch.Tensor, page_size: int, score_kind: ScoreKind
) -> None:
    if k_summary is None:
        return
    pages, heads, _, dim = k_cache.shape
    shape = (pages, heads, _page_vectors(page_size, score_kind), dim)
    check_tensor("k_summary", k_summary, shape, device=k_cache.device)


def _page_vectors(page_size: int, score_kind: ScoreKind) -> int:
    vectors = summary_vectors(page_size)
    if score_kind == "min_max" and vectors % 2:
        raise ValueError(
            f"page_size: min_max summaries need a multiple of {2 * CELL_SIZE}, got {page_size}"
        )
    return vectors


def _check_pages(policy: SelectionPolicy, page_size: int) -> None:
    size = policy.sel_block_size
    if page_size % size and size % page_size:
        raise ValueError(
            f"page_size: expected a divisor or a multiple of sel_block_size={size}, got {page_size}"
        )


def _check_batch(q: torch.Tensor, batch: PagedBatch, page_size: int) -> None:
    """Check once per batch what the host knows of it; no device is waited for."""
    if batch.query_lens_host is None and batch.cu_seqlens_q.device.type != "cpu":
        return
    rows = batch.derived(("rows", page_size), lambda: _checked_rows(batch, page_size))
    if q.shape[0] < rows:
        raise ValueError(
            f"q: expected at least {rows} rows, as many as batch has query tokens, got {q.shape[0]}"
        )


def _checked_rows(batch: PagedBatch, page_size: int) -> int:
    """Rows of queries up to the batch's last one."""
    lengths = batch.seq_lens_host
    if lengths is None and batch.seq_lens.device.type == "cpu":
        lengths, _ = host_lengths(batch)
    if lengths is not None:
        room = batch.block_table.shape[1] * page_size
        for request, (length, count) in enumerate(zip(lengths, batch.query_lens, strict=True)):
            if not count <= length <= room:
                raise ValueError(
                    f"seq_lens: expected {count} (the new tokens) to {room} (the tokens of "
                    f"{batch.block_table.shape[1]} pages) for request {request}, got {length}"
                )
    return batch.first_row + sum(batch.query_lens)
