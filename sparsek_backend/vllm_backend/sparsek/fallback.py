"""Layers whose masks no kernel has, attended by torch SDPA."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.fallback import FallbackMask, paged_fallback, sdpa_fallback
from sparsek_kernels.paged.operands import PagedOperands

from .metadata import SparseKMetadata


def attend_pages(
    impl: Any, operands: PagedOperands, step: SparseKMetadata, window_of_ranges: bool
) -> None:
    """Attend a decoder's step; writes ``operands.out``.

    Of a layer whose mask kernels have, those requests alone that have bidirectional ranges.

    Args:
        window_of_ranges: whether these heed the window.
    """
    ranges = step.mm_prefix_range or ()
    own = impl.fallback_reason
    paged_fallback(
        operands.q,
        operands.k_cache,
        operands.v_cache,
        step.batch,
        _mask(impl, causal=True, window_of_ranges=window_of_ranges),
        bidirectional_ranges=ranges or None,
        requests=None if own else [request for request, found in enumerate(ranges) if found],
        reason=own or "bidirectional prefix",
        out=operands.out,
    )


def attend_encoder(
    impl: Any,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    step: SparseKMetadata,
    out: torch.Tensor,
) -> None:
    """Attend an encoder's step, whose keys are in no page; writes ``out [T, Hq, D]``."""
    offsets = step.query_offsets or ()
    sdpa_fallback(
        *qkv,
        _mask(impl, causal=False),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        reason="encoder-only attention",
        out=out,
    )


def _mask(impl: Any, causal: bool, window_of_ranges: bool = False) -> FallbackMask:
    return FallbackMask(
        causal=causal,
        softmax_scale=impl.scale,
        window_size=impl.sliding_window,
        alibi_slopes=impl.alibi_slopes,
        logits_soft_cap=impl.logits_soft_cap,
        sinks=impl.sinks,
        window_of_ranges=window_of_ranges,
    )
