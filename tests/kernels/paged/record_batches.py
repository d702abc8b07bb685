"""Steps over random pages whose records are written, for tests of choosing by records."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.paged import PagedBatch, SelectionPolicy
from sparsek_kernels.paged.index.page_records import write_records
from sparsek_kernels.paged.lengths import batch_of_lengths
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.record import page_bytes

TILES = SelectionPolicy(num_sink=64, window_size=100, top_k=4, query_tile=64)


@dataclass
class RecordsCase:
    """A filled cache with its records, and the batch that reads it."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    records: torch.Tensor
    batch: PagedBatch
    policy: SelectionPolicy

    def operands(self) -> PagedOperands:
        """What an indexer and attention take."""
        caches = self.k_cache, self.v_cache
        scale = self.q.shape[-1] ** -0.5
        return PagedOperands(self.q, *caches, torch.empty_like(self.q), scale, self.records)


def make_records(
    lengths: list[int],
    new: list[int],
    *,
    decodes: int | None = None,
    page_size: int = 64,
    heads: int = 2,
    group: int = 3,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    tokens: int = 192,
) -> RecordsCase:
    """Requests of ``lengths`` keys and ``new`` tokens, of which the first ones decode; or all."""
    draw = torch.Generator().manual_seed(7)
    each = -(-max(lengths) // page_size)
    shape = (len(lengths) * each + 1, heads, page_size, dim)
    k_cache, v_cache = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
    table = torch.randperm(len(lengths) * each, generator=draw).view(len(lengths), each).int()
    records = torch.zeros(shape[0], heads, page_bytes(page_size, dim), dtype=torch.uint8)
    policy = TILES.by_records(tokens)
    write_records(k_cache, records, torch.arange(shape[0] * page_size))
    count = len(lengths) if decodes is None else decodes
    batch = batch_of_lengths(table, new, lengths, decodes=count)
    q = (2 * torch.randn(sum(new), heads * group, dim, generator=draw)).to(dtype)
    return RecordsCase(q, k_cache, v_cache, records, batch, policy)
