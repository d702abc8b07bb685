"""What a KV page holds: K and V of every head, and behind them the summaries of their blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sparsek_backend.vllm_backend import compat
from sparsek_backend.vllm_backend.layout import PREFERRED_PAGE_SIZE
from sparsek_kernels.paged.api import locate_pages
from sparsek_kernels.paged.operands import Located
from sparsek_kernels.paged.pages import summary_bytes

FP8_KV_CACHE = ("fp8", "fp8_e4m3")
"""The names after ``--kv-cache-dtype`` of a cache of e4m3 values with a scale per layer."""


def bytes_behind(head_size: int, itemsize: int) -> int:
    """Bytes per token and KV head that pages have behind K and V, for summaries of any kind.

    For every 64 tokens there are whole rows of K and V.  So pages of 64 tokens begin at multiples
    of a row, and the kernels for Hopper address all of them as one matrix.  With 128 channels they
    add 3/64 to the bytes of K and V, and 3/32 with fp8.
    """
    rows = math.lcm(2 * head_size * itemsize, PREFERRED_PAGE_SIZE * itemsize)
    used = summary_bytes(PREFERRED_PAGE_SIZE, head_size)
    return -(-used // rows) * rows // PREFERRED_PAGE_SIZE


def with_summaries(spec: Any) -> Any:
    """Return ``spec`` with room for the summaries of its pages."""
    return compat.with_bytes_behind(spec, bytes_behind(spec.head_size, spec.dtype.itemsize))


@dataclass(frozen=True)
class PageViews:
    """One layer's cache: K, V and, where its pages have room for them, summaries."""

    keys: torch.Tensor  # ``[pages, Hkv, page_size, D]``
    values: torch.Tensor  # as ``keys``
    # ``[pages, Hkv, bytes]`` uint8 view of the bytes behind K and V
    summary: torch.Tensor | None

    @cached_property
    def located(self) -> Located | None:
        """Where these are, which the layer's calls of every step need not ask."""
        return locate_pages(self.keys, self.values, self.summary)


def page_rows(kv_cache: torch.Tensor, head_size: int, summaries: bool) -> torch.Tensor:
    """Each page of a layer's cache as one row of elements, summaries included: a view.

    Args:
        kv_cache: ``[pages, Hkv, page_size, C]`` as :func:`view_pages` takes it.
        head_size: ``D``.
    """
    behind = bytes_behind(head_size, kv_cache.itemsize) // kv_cache.itemsize if summaries else 0
    elements = compat.page_elements(kv_cache, head_size, behind)
    return kv_cache.as_strided((kv_cache.shape[0], elements), (kv_cache.stride(0), 1))


def view_pages(
    kv_cache: torch.Tensor,
    head_size: int,
    summaries: bool,
    size: Callable[[int, int], int] = summary_bytes,
) -> PageViews:
    """Split a layer's cache into K, V and summaries.

    Args:
        kv_cache: ``[pages, Hkv, page_size, C]`` as vLLM allocates it, head by head, with ``C >= 2 *
            D`` elements for each token; bytes are read as fp8 (e4m3).
        size: bytes of the summaries of a page and head, by its tokens and ``D``.

    Raises:
        ValueError: summaries are asked for and the pages have no room for them.
    """
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    pages, heads, page_size, content = kv_cache.shape
    page_stride, head_stride = kv_cache.stride()[:2]
    both = kv_cache
    if content > 2 * head_size:
        strides = (page_stride, head_stride, 2 * head_size, 1)
        both = kv_cache.as_strided((pages, heads, page_size, 2 * head_size), strides)
    keys, values = both[..., :head_size], both[..., head_size:]
    if not summaries:
        return PageViews(keys, values, None)
    each = size(page_size, head_size)
    tail = each // kv_cache.itemsize
    room, first, stride = compat.place_behind(kv_cache, head_size, tail)
    if room < tail:
        raise ValueError(
            f"kv_cache: expected room for {tail} elements of block summaries behind the K and V of "
            f"each head and page, got room for {room}"
        )
    offset = kv_cache.storage_offset() + first
    behind = kv_cache.as_strided((pages, heads, tail), (page_stride, stride, 1), offset)
    return PageViews(keys, values, behind.view(torch.uint8))


class PageReader:
    """Views of one layer's cache (:func:`view_pages`), made once for each cache tensor."""

    def __init__(
        self,
        head_size: int,
        summaries: bool = False,
        size: Callable[[int, int], int] = summary_bytes,
    ) -> None:
        self.head_size = head_size
        self.summaries = summaries
        self._size = size
        self._views: PageViews | None = None
        self._key: tuple[Hashable, ...] | None = None

    def view(self, kv_cache: torch.Tensor) -> PageViews:
        """Return views of a cache: K, V and, where the pages keep them, summaries."""
        return view_pages(kv_cache, self.head_size, self.summaries, self._size)

    def cached(self, kv_cache: torch.Tensor) -> PageViews:
        """Return :meth:`view` of the layer's own cache."""
        key = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), kv_cache.dtype)
        if self._views is None or self._key != key:
            self._views, self._key = self.view(kv_cache), key
        return self._views
