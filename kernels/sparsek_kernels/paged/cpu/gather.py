"""Reading runs of a paged cache into contiguous tensors, for the torch path.

A *run* is consecutive tokens of one KV head inside one page.  Pages need not be adjacent (their
tails hold summaries), and K and V of a token may sit side by side.  Where the strides allow it,
the cache is viewed as equal pieces of memory ("units") and runs are read with one ``index_select``
that copies whole pieces; any other layout goes through advanced indexing.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import cache

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


@cache
def _counting(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)


class RunReader:
    """Reads runs of ``run_tokens`` tokens, named by integers that :meth:`locate` hands out.

    The integers depend on the cache's geometry alone (:attr:`geometry`), so that layers of one
    geometry can share them.

    Args:
        cache: ``[P, Hkv, page_size, D]``, any strides.
        run_tokens: tokens of a run; divides the page size.
    """

    def __init__(self, cache: torch.Tensor, run_tokens: int) -> None:
        _, self.heads, self.page_size, self.dim = cache.shape
        self.run_tokens = run_tokens
        self.runs_per_page = self.page_size // run_tokens
        self._cache = cache
        page_stride, head_stride, token_stride, last = cache.stride()
        offset = cache.storage_offset()
        run_elements = run_tokens * self.dim
        unit = math.gcd(run_elements, page_stride, head_stride, offset)
        self.geometry: Hashable = (cache.shape[1:], cache.stride(), offset, run_tokens)
        self._flat: torch.Tensor | None = None
        if last == 1 and token_stride == self.dim and unit >= self.dim:
            units = cache.untyped_storage().nbytes() // cache.element_size() // unit
            self._flat = cache.as_strided((units, unit), (unit, 1), 0)
            self._units_per_run = run_elements // unit
            self._page_units, self._head_units = page_stride // unit, head_stride // unit
            self._offset_units = offset // unit

    def locate(self, pages: torch.Tensor, runs: torch.Tensor | int = 0) -> torch.Tensor:
        """Name runs of every KV head, ``[T, Hkv, n]`` int64.

        ``runs`` are places within the physical ``pages [T, 1 or Hkv, n]``.
        """
        head = torch.arange(self.heads, device=pages.device).view(self.heads, 1)
        if self._flat is None:
            return (pages * self.heads + head) * self.runs_per_page + runs
        start = pages * self._page_units + head * self._head_units + self._offset_units
        return torch.add(start, runs * self._units_per_run)

    def read(self, names: torch.Tensor) -> torch.Tensor:
        """Copy runs.  names: ``[...]`` of :meth:`locate`; returns ``[..., run_tokens, D]``."""
        shape = (*names.shape, self.run_tokens, self.dim)
        if self._flat is not None:
            if self._units_per_run > 1:
                units = _counting(self._units_per_run, names.device)
                names = names.unsqueeze(-1) + units
            return torch.index_select(self._flat, 0, names.flatten()).view(shape)
        split = self._cache.unflatten(2, (self.runs_per_page, self.run_tokens))
        place = names // self.runs_per_page
        rows: torch.Tensor = split[
            place // self.heads, place % self.heads, names % self.runs_per_page
        ]
        return rows


def block_reader(cache: torch.Tensor, sel_block_size: int) -> RunReader:
    """Reader whose runs make up blocks: a block in one run, or in several whole pages."""
    return RunReader(cache, min(sel_block_size, cache.shape[2]))


def locate_blocks(
    reader: RunReader, table: torch.Tensor, num_blocks: int, sel_block_size: int
) -> torch.Tensor:
    """Name the runs of sequences' first blocks: ``[T, Hkv, num_blocks, runs per block]`` int64.

    Blocks past the page table rows ``table [T, W]`` name the last page.
    """
    per_block = sel_block_size // reader.run_tokens
    run = torch.arange(num_blocks * per_block)
    logical = (run // reader.runs_per_page).clamp_(max=table.shape[1] - 1)
    pages = table.index_select(1, logical).unsqueeze(1)
    names = reader.locate(pages, run % reader.runs_per_page)
    return names.view(*names.shape[:2], num_blocks, per_block)


def pick_blocks(located: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Names ``[T, Hkv, n * runs per block]`` of the runs of ``blocks [T, Hkv, n]``.

    ``located`` is of :func:`locate_blocks`, for all ``T`` or for each.
    """
    per_block = located.shape[-1]
    source = located.expand(blocks.shape[0], -1, -1, -1)
    if per_block == 1:
        return source.squeeze(-1).gather(2, blocks)
    index = blocks.unsqueeze(-1).expand(-1, -1, -1, per_block)
    return source.gather(2, index).flatten(2)


def read_sequence(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """First tokens ``[Hkv, length, D]`` of a sequence with the page table row ``pages [W]``."""
    reader = RunReader(cache, cache.shape[2])
    count = -(-length // reader.page_size)
    rows = reader.read(reader.locate(pages[:count].view(1, 1, count)))
    return rows.reshape(reader.heads, -1, reader.dim)[:, :length]
