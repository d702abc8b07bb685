"""The one door to SDPA for masks that no SparseK kernel supports.

ALiBi, logit soft caps, bidirectional token ranges (image prefixes) and encoder attention are
served here in plain torch: exactly, but without SparseK's speed.  Every reason is logged once and
every call is counted, so that nobody falls back without knowing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sparsek_kernels.checks import check_heads, check_tensor
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.gather import read_sequence

logger = logging.getLogger(__name__)

_QUERY_ROWS = 256
_calls: Counter[str] = Counter()


def fallback_counts() -> dict[str, int]:
    """Calls served by SDPA since the process started, by reason."""
    return dict(_calls)


def sdpa_fallback(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    reason: str,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    bidirectional_ranges: Sequence[Sequence[tuple[int, int]]] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of packed sequences under a mask that no kernel supports.

    Queries are aligned with the end of their sequence's keys.

    Args:
        q: ``[Tq, Hq, D]``; k, v: ``[Tk, Hkv, D]``, packed.
        reason: what made the kernels unusable; logged once, and the key of the counter.
        cu_seqlens_q, cu_seqlens_k: offsets of the sequences, on the host.
        causal: whether key ``j`` needs ``j <= i``.
        window_size: latest keys (own included) a query sees; without ``causal``, on both sides.
        alibi_slopes: ``[Hq]``; adds ``slope * (j - i)`` to the logits (arXiv 2108.12409).
        logits_soft_cap: logits become ``cap * tanh(logits / cap)`` (Gemma 2).
        sinks: ``[Hq]`` learned logits that join the denominator only.
        bidirectional_ranges: for each sequence, inclusive position ranges whose tokens see each
            other whatever the causal order.
        out: ``[Tq, Hq, Dv]``, written and returned.

    Raises:
        ValueError: shapes or offsets do not fit.
    """
    check_tensor("q", q, ("Tq", "Hq", "D"))
    check_tensor("k", k, ("Tk", "Hkv", q.shape[2]), device=q.device)
    check_tensor("v", v, (k.shape[0], k.shape[1], "Dv"), device=q.device)
    check_heads(q.shape[1], k.shape[1])
    for name, offsets, total in (
        ("cu_seqlens_q", cu_seqlens_q, q.shape[0]),
        ("cu_seqlens_k", cu_seqlens_k, k.shape[0]),
    ):
        if offsets[0] != 0 or offsets[-1] > total:
            raise ValueError(f"{name}: expected offsets from 0 to {total}, got {list(offsets)}")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_k: expected {len(cu_seqlens_q)} offsets, got {len(cu_seqlens_k)}"
        )
    count_fallback(reason)
    if out is None:
        out = q.new_empty(*q.shape[:2], v.shape[2])
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    for index in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[index], cu_seqlens_q[index + 1])
        keys = slice(cu_seqlens_k[index], cu_seqlens_k[index + 1])
        _attend_sequence(
            q[rows],
            k[keys].transpose(0, 1),
            v[keys].transpose(0, 1),
            out[rows],
            scale,
            causal,
            window_size,
            alibi_slopes,
            logits_soft_cap,
            sinks,
            bidirectional_ranges[index] if bidirectional_ranges else (),
        )
    return out


def paged_fallback(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    reason: str,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    bidirectional_ranges: Sequence[Sequence[tuple[int, int]]] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`sdpa_fallback` over a paged cache: the pages of each sequence are gathered first.

    Reads sequence lengths on the host, so it cannot be captured in a CUDA graph.

    Args:
        q: ``[T, Hq, D]``; k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``; the rest as in
            :func:`sdpa_fallback`.
    """
    count_fallback(reason)
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    for request, length in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop:
            continue
        pages = batch.block_table[request].long()
        _attend_sequence(
            q[rows],
            read_sequence(k_cache, pages, length).to(q.dtype),
            read_sequence(v_cache, pages, length).to(q.dtype),
            out[rows],
            scale,
            causal,
            window_size,
            alibi_slopes,
            logits_soft_cap,
            sinks,
            bidirectional_ranges[request] if bidirectional_ranges else (),
        )
    return out


def count_fallback(reason: str) -> None:
    """Count one call that no kernel supports; the first one of a reason is logged."""
    if not _calls[reason]:
        logger.warning("SPARSEK serves %s through SDPA: no kernel supports it", reason)
    _calls[reason] += 1


def _attend_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    causal: bool,
    window_size: int | None,
    alibi_slopes: torch.Tensor | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    ranges: Sequence[tuple[int, int]],
) -> None:
    """One sequence, query rows in blocks.  q: ``[n, Hq, D]``; k, v: ``[Hkv, N, D]``."""
    count, num_heads, _ = q.shape
    length = k.shape[1]
    if count == 0:
        return
    if length == 0:
        out.zero_()
        return
    group = num_heads // k.shape[0]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    key = torch.arange(length, device=q.device)
    for begin in range(0, count, _QUERY_ROWS):
        end = min(begin + _QUERY_ROWS, count)
        position = torch.arange(begin, end, device=q.device) + (length - count)
        distance = key - position[:, None]  # [rows, N]
        seen = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window_size is not None:
            seen = seen & (distance > -window_size) & (distance < window_size)
        for low, high in ranges:
            inside = (position >= low) & (position <= high)
            seen = seen | (inside[:, None] & (key >= low) & (key <= high))
        bias = torch.zeros(1, *distance.shape, device=q.device)
        if alibi_slopes is not None:
            bias = alibi_slopes.float().view(-1, 1, 1) * distance
        bias = bias.masked_fill(~seen, float("-inf"))
        rows = q[begin:end].transpose(0, 1)
        if soft_cap is None and sinks is None:
            attended = F.scaled_dot_product_attention(
                rows[None], k[None], v[None], attn_mask=bias[None].to(q.dtype), scale=scale
            )[0]
        else:
            attended = _softmax_attention(rows, k, v, bias, scale, soft_cap, sinks)
        attended = attended.masked_fill(~seen.any(-1)[None, :, None], 0.0)
        out[begin:end] = attended.transpose(0, 1)


def _softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What SDPA has no argument for.  q: ``[H, n, D]``; k, v: ``[H, N, D]``."""
    logits = torch.matmul(q.float(), k.float().mT) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits + bias
    if sinks is not None:
        column = sinks.float().view(-1, 1, 1).expand(-1, logits.shape[1], 1)
        probs = torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[..., :-1]
    else:
        probs = torch.softmax(logits, dim=-1)
    return torch.matmul(probs.to(v.dtype), v)
