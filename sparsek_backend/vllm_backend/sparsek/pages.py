"""What a KV page holds: K and V of every head, and behind them the summaries of their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparsek_backend.vllm_backend import compat
from sparsek_backend.vllm_backend.layout import PREFERRED_PAGE_SIZE, SMALLEST_PAGE_SIZE
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


def with_summaries(spec: Any, model_dtype: torch.dtype) -> Any:
    """Return ``spec`` with room for the summaries of its pages.

    Where specs state their content, a head's summaries follow that head's K and V, so that whatever
    moves a page or one head of it moves them too.  vLLM then also asks about a page of one token,
    to size the pages of recurrent layers.  Earlier versions get pages with padding at their end.
    """
    if not compat.declares_content():
        return compat.pad_page(spec, summary_bytes(spec, model_dtype))
    page = spec
    if page.block_size % SMALLEST_PAGE_SIZE:
        page = compat.with_page_size(spec, PREFERRED_PAGE_SIZE)
    room = -(-summary_bytes(page, model_dtype) // (page.num_kv_heads * page.block_size))
    itemsize = spec.dtype.itemsize
    whole = -(-room // itemsize) * itemsize  # the cache is a tensor of the spec's dtype
    return compat.with_content(spec, 2 * spec.head_size * itemsize + whole)


@dataclass(frozen=True)
class PageViews:
    """One layer's cache: K, V and, where its pages have room for them, summaries.

    Args:
        keys, values: ``[pages, Hkv, page_size, D]`` views of the cache.
        summary: ``[pages, Hkv, page_size // 16, D]`` view of what follows them, or ``None``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    summary: torch.Tensor | None


def view_pages(kv_cache: torch.Tensor, head_size: int, summaries: torch.dtype | None) -> PageViews:
    """Split a layer's cache into K, V and summaries.

    Args:
        kv_cache: ``[pages, Hkv, page_size, C]`` as vLLM allocates it, head by head, with ``C >= 2 *
            D`` elements for each token; bytes are read as fp8 (e4m3).
        head_size: ``D``.
        summaries: dtype of the summaries behind K and V, or ``None`` where there are none.

    Raises:
        ValueError: summaries are asked for and the pages have no room for them.
    """
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    pages, heads, page_size, content = kv_cache.shape
    page_stride, head_stride = kv_cache.stride()[:2]
    used = page_size * 2 * head_size  # elements of one head's K and V
    both = kv_cache
    if content > 2 * head_size:
        strides = (page_stride, head_stride, 2 * head_size, 1)
        both = kv_cache.as_strided((pages, heads, page_size, 2 * head_size), strides)
    keys, values = both[..., :head_size], both[..., head_size:]
    if summaries is None:
        return PageViews(keys, values, None)
    vectors = summary_vectors(page_size)
    tail = vectors * head_size * summaries.itemsize // kv_cache.itemsize
    if content > 2 * head_size:
        room, first, stride = page_size * content - used, used, head_stride
    else:  # the page ends in padding, which holds the summaries of every head
        room, first, stride = page_stride // heads - used, heads * used, tail
    if room < tail:
        raise ValueError(
            f"kv_cache: expected room for {tail} elements of block summaries behind the K and V of "
            f"each head and page, got room for {room}"
        )
    offset = kv_cache.storage_offset() + first
    behind = kv_cache.as_strided((pages, heads, tail), (page_stride, stride, 1), offset)
    return PageViews(keys, values, behind.view(summaries).unflatten(2, (vectors, head_size)))
