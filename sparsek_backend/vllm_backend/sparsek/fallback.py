"""Masks that no kernel has, attended by torch SDPA."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.fallback import FallbackMask, paged_fallback, sdpa_fallback
from sparsek_kernels.paged.operands import PagedOperands

from .metadata import SparseKMetadata


def mask_of(layer: Any, causal: bool, window_of_ranges: bool = False) -> FallbackMask:
    """Return the mask and logits of a :class:`SparseKImpl`, as the SDPA fallback takes them."""
    return FallbackMask(
        causal=causal,
        softmax_scale=layer.scale,
        window_size=layer.sliding_window,
        alibi_slopes=layer.alibi_slopes,
        logits_soft_cap=layer.logits_soft_cap,
        sinks=layer.sinks,
        window_of_ranges=window_of_ranges,
    )


def attend_pages(
    mask: FallbackMask, operands: PagedOperands, step: SparseKMetadata, reason: str
) -> None:
    """Attend a decoder's step under a mask; writes ``operands.out``.

    Args:
        reason: why SDPA serves it, for the log.
    """
    paged_fallback(
        operands.q,
        operands.k_cache,
        operands.v_cache,
        step.batch,
        mask,
        bidirectional_ranges=step.mm_prefix_range,
        reason=reason,
        out=operands.out,
    )


def attend_encoder(
    mask: FallbackMask,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: SparseKMetadata,
    out: torch.Tensor,
) -> None:
    """Attend an encoder's step, whose keys are in no page.

    Args:
        query: ``[T, Hq, D]``; key, value: ``[T, Hkv, D]``.
        out: ``[T, Hq, D]``, written.
    """
    offsets = step.query_offsets or ()
    sdpa_fallback(
        query,
        key,
        value,
        mask,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        reason="encoder-only attention",
        out=out,
    )
