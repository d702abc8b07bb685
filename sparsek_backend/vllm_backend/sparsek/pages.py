"""What a KV page holds: K and V of every head, and behind them the summaries of their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparsek_kernels.paged.policy import summary_vectors

FP8_KV_CACHE = ("fp8", "fp8_e4m3")
"""The names after ``--kv-cache-dtype`` of a cache of e4m3 values with a scale per layer."""


def summary_dtype(cache_dtype: torch.dtype, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of summaries: the cache's own, or the model's behind an fp8 cache.

    Args:
        cache_dtype: as vLLM allocates the cache, which is bytes for fp8.
    """
    return model_dtype if cache_dtype in (torch.uint8, torch.float8_e4m3fn) else cache_dtype


def summary_bytes(spec: Any, model_dtype: torch.dtype) -> int:
    """Bytes that the summaries of one page take: one D-vector per 16 tokens and KV head."""
    vectors: int = spec.num_kv_heads * summary_vectors(spec.block_size)
    return int(vectors * spec.head_size * summary_dtype(spec.dtype, model_dtype).itemsize)


@dataclass(frozen=True)
class PageViews:
    """One layer's cache: K, V and, where its pages have room for them, summaries.

    Args:
        keys, values: ``[pages, Hkv, page_size, D]`` views of the cache.
        summary: ``[pages, Hkv, page_size // 16, D]`` view of the pages' tails, or ``None``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    summary: torch.Tensor | None


def view_pages(kv_cache: torch.Tensor, summaries: torch.dtype | None) -> PageViews:
    """Split a layer's cache ``[pages, Hkv, page_size, 2 * D]`` into K, V and summaries.

    Args:
        kv_cache: as vLLM allocates it; bytes are read as fp8 (e4m3).
        summaries: dtype of the summaries behind K and V, or ``None`` where there are none.

    Raises:
        ValueError: summaries are asked for and the pages have no room for them.
    """
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    pages, heads, page_size, width = kv_cache.shape
    dim = width // 2
    keys, values = kv_cache[..., :dim], kv_cache[..., dim:]
    if summaries is None:
        return PageViews(keys, values, None)
    vectors = summary_vectors(page_size)
    used = heads * page_size * width
    tail = heads * vectors * dim * summaries.itemsize // kv_cache.itemsize
    stride = kv_cache.stride(0)
    if stride < used + tail:
        raise ValueError(
            f"kv_cache: expected pages of at least {used + tail} elements, so "
            f"that block summaries fit behind K and V, got a page stride of {stride}"
        )
    behind = kv_cache.as_strided((pages, tail), (stride, 1), kv_cache.storage_offset() + used)
    summary = behind.view(summaries).unflatten(1, (heads, vectors, dim))
    return PageViews(keys, values, summary)
