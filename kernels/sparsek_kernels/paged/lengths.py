"""Pages of contiguous sequences, and batches of requests whose lengths the host knows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from sparsek_kernels.paged.api import write_kv
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.pages import summary_bytes
from sparsek_kernels.paged.policy import ceil_div


def pages_of(
    k: torch.Tensor, v: torch.Tensor, page_size: int, *, write_summary: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys ``[B, M, Hkv, D]`` and values as pages, their summaries, and the block table.

    Args:
        write_summary: whether records are written, which takes pages of a multiple of 64 tokens.
            Else there are zeros.
    """
    batch, length, heads, dim = k.shape
    count = ceil_div(length, page_size)
    pages = torch.arange(batch * count, dtype=torch.int32, device=k.device)
    k_cache, v_cache = (x.new_zeros(len(pages), heads, page_size, x.shape[3]) for x in (k, v))
    summary = k.new_zeros(len(pages), heads, summary_bytes(page_size, dim), dtype=torch.uint8)
    slots = torch.arange(len(pages) * page_size, device=k.device).view(batch, -1)[:, :length]
    tokens = (k.flatten(0, 1), v.flatten(0, 1))
    write_kv(*tokens, k_cache, v_cache, summary if write_summary else None, slots.flatten())
    return k_cache, v_cache, summary, pages.view(batch, count)


def batch_of_lengths(
    block_table: torch.Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    decodes: int = 0,
    max_len: int = 0,
) -> PagedBatch:
    """A step over the first requests of a block table.

    Args:
        block_table: ``[R or more, max_pages]`` int32.
        query_lens: new tokens of each request.
        seq_lens: keys of each request, its new tokens included.
        decodes: how many of the requests, the first ones, decode.
        max_len: a context that must fit, if it is longer than all of these.
    """
    return PagedBatch(
        block_table=block_table[: len(seq_lens)],
        seq_lens=_integers(seq_lens, block_table.device),
        cu_seqlens_q=_integers([0, *accumulate(query_lens)], block_table.device),
        num_decodes=decodes,
        num_decode_tokens=sum(query_lens[:decodes]),
        decode_query_len=max(query_lens[:decodes], default=1),
        max_query_len=max(query_lens),
        max_seq_len=max(*seq_lens, max_len),
        seq_lens_host=tuple(seq_lens),
        query_lens_host=tuple(query_lens),
    )


def _integers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """``values`` as int32; where steps are equal, on the device, so that no copy is waited for."""
    first, last = values[0], values[-1]
    step = (last - first) // max(len(values) - 1, 1)
    if step < 0 or any(value != first + step * i for i, value in enumerate(values)):
        return torch.tensor(values, dtype=torch.int32, device=device)
    if step == 0:
        return torch.full((len(values),), first, dtype=torch.int32, device=device)
    return torch.arange(first, last + 1, step, dtype=torch.int32, device=device)
