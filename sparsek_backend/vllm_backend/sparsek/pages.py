"""What a KV page holds: K and V of every head, and behind them the summaries of their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparsek_kernels.paged.sketch import summary_bytes

FP8_KV_CACHE = ("fp8", "fp8_e4m3")
"""The names after ``--kv-cache-dtype`` of a cache of e4m3 values with a scale per layer."""


def tail_bytes(spec: Any) -> int:
    """Bytes that the summaries of one page take, of all KV heads of a layer."""
    return int(spec.num_kv_heads * summary_bytes(spec.block_size, spec.head_size))


@dataclass(frozen=True)
class PageViews:
    """One layer's cache: K, V and, where its pages have room for them, summaries.

    Args:
        keys, values: ``[pages, Hkv, page_size, D]`` views of the cache.
        summary: ``[pages, Hkv, summary_bytes(page_size, D)]`` uint8 view of the pages' tails, or
            ``None``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    summary: torch.Tensor | None


def view_pages(kv_cache: torch.Tensor, summaries: bool) -> PageViews:
    """Split a layer's cache ``[pages, Hkv, page_size, 2 * D]`` into K, V and summaries.

    Args:
        kv_cache: as vLLM allocates it; bytes are read as fp8 (e4m3).
        summaries: whether there are summaries behind K and V.

    Raises:
        ValueError: summaries are asked for and the pages have no room for them.
    """
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    pages, heads, page_size, width = kv_cache.shape
    dim = width // 2
    keys, values = kv_cache[..., :dim], kv_cache[..., dim:]
    if not summaries:
        return PageViews(keys, values, None)
    each = summary_bytes(page_size, dim)
    used = heads * page_size * width
    tail = heads * each // kv_cache.itemsize
    stride = kv_cache.stride(0)
    if stride < used + tail:
        raise ValueError(
            f"kv_cache: expected pages of at least {used + tail} elements, so "
            f"that block summaries fit behind K and V, got a page stride of {stride}"
        )
    behind = kv_cache.as_strided((pages, tail), (stride, 1), kv_cache.storage_offset() + used)
    return PageViews(keys, values, behind.view(torch.uint8).unflatten(1, (heads, each)))
