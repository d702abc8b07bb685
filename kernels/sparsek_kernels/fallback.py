"""The one door to SDPA for masks that no SparseK kernel supports.

ALiBi, logit soft caps, bidirectional token ranges (image prefixes) and encoder attention are
served here in plain torch: exactly, but without SparseK's speed.  Every reason is logged once and
every call is counted, so that nobody falls back without knowing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sparsek_kernels.checks import check_heads, check_tensor
from sparsek_kernels.common.precision import without_autocast
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.cpu.gather import read_sequence

logger = logging.getLogger(__name__)

_QUERY_ROWS = 256
_calls: Counter[str] = Counter()
Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class FallbackMask:
    """Which keys a query sees, and how its logits are changed.

    Queries are aligned with the end of their sequence's keys.

    Args:
        causal: whether key ``j`` needs ``j <= i``.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        window_size: latest keys (own included) a query sees; without ``causal``, on both sides.
        alibi_slopes: ``[Hq]``; adds ``slope * (j - i)`` to the logits (arXiv 2108.12409).
        logits_soft_cap: logits become ``cap * tanh(logits / cap)`` (Gemma 2).
        sinks: ``[Hq]`` learned logits that join the denominator only.
        window_of_ranges: whether the window bounds how far back bidirectional ranges reach
            (Gemma 4).
    """

    causal: bool = True
    softmax_scale: float | None = None
    window_size: int | None = None
    alibi_slopes: torch.Tensor | None = None
    logits_soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    window_of_ranges: bool = False

    def seen(self, distance: torch.Tensor) -> torch.Tensor:
        """Which keys are seen from ``distance``, their position minus the query's."""
        seen = distance <= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window_size is not None:
            seen &= (distance > -self.window_size) & (distance < self.window_size)
        return seen


_CAUSAL = FallbackMask()


def fallback_counts() -> dict[str, int]:
    """Calls served by SDPA since the process started, by reason."""
    return dict(_calls)


def count_fallback(reason: str) -> None:
    """Count one call that no kernel supports; the first one of a reason is logged."""
    if not _calls[reason]:
        logger.warning("SPARSEK serves %s through SDPA: no kernel supports it", reason)
    _calls[reason] += 1


def sdpa_fallback(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: FallbackMask = _CAUSAL,
    *,
    reason: str,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    bidirectional_ranges: Sequence[Ranges] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention ``[Tq, Hq, Dv]`` of packed sequences under a mask that no kernel supports.

    Args:
        q: ``[Tq, Hq, D]``, packed.
        k: ``[Tk, Hkv, D]``, packed.
        v: ``[Tk, Hkv, Dv]``, packed.
        mask: the rule of every sequence.
        reason: what made the kernels unusable; logged once, and the key of the counter.
        cu_seqlens_q: offsets of the sequences' queries, on the host.
        cu_seqlens_k: offsets of their keys.
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
        if offsets[0] != 0 or offsets[-1] > total or list(offsets) != sorted(offsets):
            raise ValueError(f"{name}: expected offsets from 0 to {total}, got {list(offsets)}")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_k: expected {len(cu_seqlens_q)} offsets, got {len(cu_seqlens_k)}"
        )
    count_fallback(reason)
    if out is None:
        out = q.new_empty(*q.shape[:2], v.shape[2])
    for index in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[index], cu_seqlens_q[index + 1])
        keys = slice(cu_seqlens_k[index], cu_seqlens_k[index + 1])
        ranges = bidirectional_ranges[index] if bidirectional_ranges else ()
        part_k, part_v = k[keys].transpose(0, 1), v[keys].transpose(0, 1)
        _attend_sequence(q[rows], part_k, part_v, out[rows], mask, ranges)
    return out


def paged_fallback(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    mask: FallbackMask = _CAUSAL,
    *,
    reason: str,
    bidirectional_ranges: Sequence[Ranges] | None = None,
    requests: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`sdpa_fallback` over a paged cache: the pages of each sequence are gathered first.

    Reads sequence lengths on the host, so it cannot be captured in a CUDA graph.

    Args:
        q: ``[T, Hq, D]``.
        k_cache: ``[num_pages, Hkv, page_size, D]``.
        v_cache: ``[num_pages, Hkv, page_size, Dv]``.
        batch: the step's sequences and their pages; the rest as in :func:`sdpa_fallback`.
        requests: which of them to attend; default: all.
    """
    count_fallback(reason)
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    for request in range(len(lengths)) if requests is None else requests:
        rows, length = slice(starts[request], starts[request + 1]), lengths[request]
        if rows.start == rows.stop:
            continue
        pages = batch.block_table[request].long()
        k, v = (read_sequence(x, pages, length).to(q.dtype) for x in (k_cache, v_cache))
        ranges = bidirectional_ranges[request] if bidirectional_ranges else ()
        _attend_sequence(q[rows], k, v, out[rows], mask, ranges)
    return out


@without_autocast
def _attend_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    mask: FallbackMask,
    ranges: Ranges,
) -> None:
    """One sequence, query rows in blocks.  q: ``[n, Hq, D]``; k, v: ``[Hkv, N, D]``."""
    count, num_heads, dim = q.shape
    num_kv_heads, length, _ = k.shape
    if length == 0:
        out.zero_()
        return
    scale = dim**-0.5 if mask.softmax_scale is None else mask.softmax_scale
    k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (k, v))
    key = torch.arange(length, device=q.device)
    for begin in range(0, count, _QUERY_ROWS):
        end = min(begin + _QUERY_ROWS, count)
        position = torch.arange(begin, end, device=q.device) + (length - count)
        distance = key - position[:, None]  # [rows, N]
        seen = mask.seen(distance)
        reach = mask.window_size if mask.window_of_ranges else None
        for low, high in ranges:
            inside = (position >= low) & (position <= high)
            both = inside[:, None] & (key >= low) & (key <= high)
            seen |= both if reach is None else both & (distance > -reach)
        bias = torch.zeros(1, *distance.shape, device=q.device)
        if mask.alibi_slopes is not None:
            bias = mask.alibi_slopes.float().view(-1, 1, 1) * distance
        bias = bias.masked_fill(~seen, float("-inf"))
        rows = q[begin:end].transpose(0, 1)
        if mask.logits_soft_cap is None and mask.sinks is None:
            attended = F.scaled_dot_product_attention(
                rows[None], k[None], v[None], attn_mask=bias[None].to(q.dtype), scale=scale
            )[0]
        else:
            attended = softmax_attention(
                rows, k, v, bias, scale, softcap=mask.logits_soft_cap, sinks=mask.sinks
            )
        attended = attended.masked_fill(~seen.any(-1)[None, :, None], 0.0)
        out[begin:end] = attended.transpose(0, 1)


def under_mask(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits under a mask: bool, where True is seen, or additive."""
    if mask.dtype == torch.bool:
        return torch.where(mask, logits, float("-inf"))
    return logits + mask


@without_autocast
def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention with a soft cap or sinks, which SDPA has no arguments for; differentiable.

    Args:
        q: ``[..., H, n, D]``.
        k: ``[..., H, N, D]``.
        v: ``[..., H, N, Dv]``.
        mask: as :func:`under_mask` takes it, broadcastable to ``[..., H, n, N]``.
        scale: factor of ``q . k``.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before the mask.
        sinks: ``[H]`` learned logits that join the denominator only.
        dropout: probability of dropping a weight.
    """
    logits = torch.matmul(q.float(), k.float().mT) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = under_mask(logits, mask)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], dim=-1)
    # A row without keys would be NaN, in its gradient too.
    empty = (logits == float("-inf")).all(dim=-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(empty, 0.0), dim=-1)[..., : k.shape[-2]]
    return torch.matmul(F.dropout(weights, dropout).to(v.dtype), v)
