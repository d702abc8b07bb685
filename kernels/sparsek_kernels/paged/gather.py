"""Reading blocks of a paged cache into contiguous tensors, for the torch path.

A page of the cache is usually one run of memory per KV head, but pages need not be adjacent (their
tails hold summaries) and K and V of a token may sit side by side.  Where the strides allow it the
cache is viewed as equal runs of memory ("units") and read with one ``index_select``, which copies
whole runs; any other layout goes through advanced indexing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def join_kv(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor | None:
    """``[P, Hkv, page_size, 2D]`` view over interleaved K and V, or None where they are apart."""
    dim = k_cache.shape[-1]
    joined = (
        v_cache.shape == k_cache.shape
        and k_cache.stride() == v_cache.stride()
        and k_cache.stride(-1) == 1
        and k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
        and v_cache.storage_offset() == k_cache.storage_offset() + dim
        and (k_cache.shape[2] == 1 or k_cache.stride(2) >= 2 * dim)
    )
    if not joined:
        return None
    return k_cache.as_strided(
        (*k_cache.shape[:-1], 2 * dim), k_cache.stride(), k_cache.storage_offset()
    )


@dataclass(frozen=True)
class BlockReader:
    """Reads runs of ``run_tokens`` tokens of one KV head.

    ``run_tokens`` divides the page size; run ``r`` of page ``p`` holds the page's tokens from
    ``r * run_tokens``.
    """

    cache: torch.Tensor
    run_tokens: int

    def read(self, pages: torch.Tensor, runs: torch.Tensor | None) -> torch.Tensor:
        """Gather runs for every KV head.

        Args:
            pages: ``[..., Hkv, n]`` int64 physical pages.
            runs: likewise, run within the page; ``None`` when a page is one run.

        Returns:
            ``[..., Hkv, n, run_tokens, D]``, freshly allocated.
        """
        cache = self.cache
        heads, page_size, dim = cache.shape[1:]
        head = torch.arange(heads).view(heads, 1)
        run_elements = self.run_tokens * dim
        contiguous = cache.stride(3) == 1 and cache.stride(2) == dim
        unit = math.gcd(run_elements, cache.stride(0), cache.stride(1), cache.storage_offset())
        if contiguous and unit >= dim:
            storage_units = cache.untyped_storage().nbytes() // cache.element_size() // unit
            flat = cache.as_strided((storage_units, unit), (unit, 1), 0)
            index = pages * (cache.stride(0) // unit) + head * (cache.stride(1) // unit)
            if runs is not None:
                index = index + runs * (run_elements // unit)
            index = index + cache.storage_offset() // unit
            per_run = run_elements // unit
            if per_run > 1:
                index = index.unsqueeze(-1) + torch.arange(per_run)
            rows = flat.index_select(0, index.flatten())
            return rows.view(*pages.shape, self.run_tokens, dim)
        split = cache.unflatten(2, (page_size // self.run_tokens, self.run_tokens))
        run = torch.zeros_like(pages) if runs is None else runs
        return split[pages, head.expand_as(pages), run]


def read_blocks(
    cache: torch.Tensor, table: torch.Tensor, blocks: torch.Tensor, sel_block_size: int
) -> torch.Tensor:
    """Gather selection blocks by logical index.

    Args:
        cache: ``[P, Hkv, page_size, D]``.
        table: ``[T, W]`` int64 page table row of each tile.
        blocks: ``[T, Hkv, n]`` int64 logical blocks; ones past the table read its last page.
        sel_block_size: tokens per block; divides the page size or is a multiple of it.

    Returns:
        ``[T, Hkv, n * sel_block_size, D]``.
    """
    page_size = cache.shape[2]
    tiles, heads, count = blocks.shape
    if page_size >= sel_block_size:
        per_page = page_size // sel_block_size
        logical = blocks // per_page
        runs = blocks % per_page if per_page > 1 else None
        reader = BlockReader(cache, sel_block_size)
    else:
        per_block = sel_block_size // page_size
        logical = (blocks.unsqueeze(-1) * per_block + torch.arange(per_block)).flatten(2)
        runs = None
        reader = BlockReader(cache, page_size)
    logical = logical.clamp_(max=table.shape[1] - 1)
    pages = torch.gather(table.unsqueeze(1).expand(-1, heads, -1), 2, logical)
    return reader.read(pages, runs).view(tiles, heads, count * sel_block_size, cache.shape[-1])


def read_sequence(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """First ``length`` tokens of a sequence.

    Args:
        cache: ``[P, Hkv, page_size, D]``.
        pages: ``[W]`` int64 page table row.

    Returns:
        ``[Hkv, length, D]`` (a view of a fresh copy).
    """
    heads, page_size, dim = cache.shape[1:]
    count = -(-length // page_size)
    index = pages[:count].expand(heads, count)
    rows = BlockReader(cache, page_size).read(index, None)
    return rows.view(heads, count * page_size, dim)[:, :length]


def read_summaries(k_summary: torch.Tensor, table: torch.Tensor, num_vectors: int) -> torch.Tensor:
    """Summary vectors of sequences.

    Args:
        k_summary: ``[P, Hkv, vectors per page, D]``.
        table: ``[R, W]`` int64 page table rows.
        num_vectors: vectors wanted of each sequence.

    Returns:
        ``[R, Hkv, num_vectors, D]`` float32.
    """
    heads, per_page, dim = k_summary.shape[1:]
    requests = table.shape[0]
    count = -(-num_vectors // per_page)
    pages = table[:, :count].unsqueeze(1).expand(requests, heads, count)
    rows = BlockReader(k_summary, per_page).read(pages, None)
    return rows.view(requests, heads, count * per_page, dim)[:, :, :num_vectors].float()
