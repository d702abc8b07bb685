"""The tiles of a step's prefills, as a table on the device."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div


def prefill_tiles(batch: PagedBatch, tile: int, num_tokens: int, together: int = 1) -> torch.Tensor:
    """Device table of the prefills' tiles: ``[bound, 2]`` int32, request (or -1) and base.

    Rows come in runs of ``together`` neighbouring tiles, which begin at a multiple of their size:
    the first and the last tiles of a request's runs may have no query.
    """
    span = tile * together
    bound = (num_tokens - batch.num_decode_tokens) // span + 2 * batch.num_prefills

    def build() -> torch.Tensor:
        first = batch.num_decodes
        cu = batch.cu_seqlens_q[first:].to(torch.int64)
        counts = cu[1:] - cu[:-1]
        lens = batch.seq_lens[first:].to(torch.int64)
        first_span = (lens - counts).clamp(min=0) // span
        spans = torch.where(counts > 0, (lens - 1).clamp(min=0) // span - first_span + 1, 0)
        ends = spans.cumsum(0)
        index = torch.arange(bound, device=cu.device)
        owner = torch.searchsorted(ends, index, right=True)
        known = owner < lens.shape[0]
        owner = owner.clamp(max=lens.shape[0] - 1)
        base = (first_span[owner] + index - (ends - spans)[owner]) * span
        base = (base[:, None] + tile * torch.arange(together, device=cu.device)).flatten()
        request = torch.where(known, owner + first, -1).repeat_interleave(together)
        return torch.stack([request, base], dim=1).to(torch.int32).contiguous()

    return batch.derived(("prefill tiles", tile, together, bound), build)


def rows_with_queries(batch: PagedBatch, policy: SelectionPolicy) -> list[int]:
    """Rows of the table of ``policy``'s tiles that have queries, in the order of the queries."""
    tile, together = policy.query_tile, policy.tiles_per_list
    rows: list[int] = []
    first = 0
    for length, count in list(zip(*host_lengths(batch), strict=True))[batch.num_decodes :]:
        begin = (length - count) // tile % together
        end = begin + policy.num_tiles(length - count, length)
        rows += range(first + begin, first + end)
        first += ceil_div(end, together) * together if count else 0
    return rows
