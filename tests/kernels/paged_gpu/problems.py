"""Random paged problems for the Triton kernels, small on the CPU and large on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sparsek_kernels.paged.api import default_indexers
from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.index.base import Indexers
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.pages import summary_bytes
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy
from tests.kernels.launched import attend_launched, select_launched


@dataclass
class Problem:
    """A filled cache (pages permuted, unused ones poisoned) and a batch over it."""

    q: torch.Tensor  # [T, Hq, D]
    k_cache: torch.Tensor  # [P, Hkv, page_size, D]
    v_cache: torch.Tensor
    k_summary: torch.Tensor  # [P, Hkv, summary_bytes]
    batch: PagedBatch
    keys: list[torch.Tensor]  # per request [N, Hkv, D]
    values: list[torch.Tensor]
    slots: list[torch.Tensor]  # per request [N]

    def operands(self, out: torch.Tensor, **options: Any) -> PagedOperands:
        """What the launchers take, at the default scale of the softmax."""
        scale = self.q.shape[-1] ** -0.5
        return PagedOperands(
            self.q, self.k_cache, self.v_cache, out, scale, self.k_summary, **options
        )


def phases(batch: PagedBatch, policy: SelectionPolicy | StepPolicy) -> list[Segment]:
    """A batch's decodes and its prefills, each whole: kernels tell dense tiles from sparse ones."""
    rule, cut, total = StepPolicy.of(policy), batch.num_decodes, batch.num_requests
    prefill = replace(rule.prefill, dense_last=0)
    if cut == total:
        return [Segment(batch, rule.decode)]
    if not cut:
        return [Segment(batch, prefill)]
    return [
        Segment(batch.part(0, cut), rule.decode),
        Segment(batch.part(cut, total), prefill),
    ]


def attend_phases(
    operands: PagedOperands,
    batch: PagedBatch,
    policy: SelectionPolicy | StepPolicy,
    indexers: Indexers | None = None,
) -> None:
    """Attend a batch by the launches for decodes, then by those for prefills."""
    indexers = indexers or default_indexers(StepPolicy.of(policy))
    for segment in phases(batch, policy):
        attend_launched(operands, segment, indexers.of(segment))


def select_phases(
    operands: PagedOperands,
    batch: PagedBatch,
    policy: SelectionPolicy | StepPolicy,
    indexers: Indexers | None = None,
) -> list[torch.Tensor]:
    """The blocks of every tile that there is, by request."""
    indexers = indexers or default_indexers(StepPolicy.of(policy))
    found: list[torch.Tensor] = []
    for segment in phases(batch, policy):
        index = indexers.of(segment)
        assert index is not None
        chosen = select_launched(operands, segment, index).indices
        lengths = zip(*host_lengths(segment.batch), strict=True)
        tiles = [
            1 if segment.by_request else segment.policy.num_tiles(length - new, length)
            for length, new in lengths
        ]
        found += chosen[: sum(tiles)].split(tiles)
    return found


def make_caches(
    pages: int,
    heads: int,
    page_size: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    head_major: bool,
    cache_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One buffer per page: K beside V per token, then room for summaries; all poisoned."""
    dtype = cache_dtype or dtype
    body = heads * page_size * 2 * dim
    each = summary_bytes(page_size, dim)
    row = heads * 2 * dim
    tail = -(-heads * each // dtype.itemsize // row) * row  # whole rows, as in a server's pages
    buffer = torch.full((pages, body + tail), float("nan"), device=device).to(dtype)
    if head_major:
        body_strides = (body + tail, page_size * 2 * dim, 2 * dim, 1)
    else:
        body_strides = (body + tail, 2 * dim, heads * 2 * dim, 1)
    kv = buffer.as_strided((pages, heads, page_size, 2 * dim), body_strides)
    behind = buffer.view(torch.uint8)[:, body * dtype.itemsize :]
    summary = behind[:, : heads * each].unflatten(1, (heads, each))
    summary.fill_(255)  # in a record, NaN
    return kv[..., :dim], kv[..., dim:], summary


def make_problem(
    lengths: list[tuple[int, int]],
    *,
    num_decodes: int = 0,
    heads: int = 2,
    group: int = 2,
    dim: int = 32,
    page_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    head_major: bool = False,
    seed: int = 0,
    decode_query_len: int | None = None,
    spare_pages: int = 3,
    query_gain: float = 3.0,
    max_seq_len: int | None = None,
    cache_dtype: torch.dtype | None = None,
    spare_columns: int = 2,
) -> Problem:
    """``lengths``: (new tokens, sequence length) of each request; decodes first.

    Without ``spare_columns`` the block table ends with the longest sequence, and holds no pages
    past the others.
    """
    gen = torch.Generator(device=device).manual_seed(seed)
    counts = [-(-n // page_size) for _, n in lengths]
    pages = sum(counts) + spare_pages
    k_cache, v_cache, k_summary = make_caches(
        pages, heads, page_size, dim, dtype, device, head_major, cache_dtype
    )
    order = torch.randperm(pages, generator=gen, device=device)[: sum(counts)]
    shape = (len(lengths), max([*counts, 1]) + spare_columns)
    table = torch.full(shape, 0 if spare_columns else 1 << 30, dtype=torch.int32, device=device)
    taken = 0
    keys, values, slots = [], [], []
    for row, (_, n) in enumerate(lengths):
        mine = order[taken : taken + counts[row]]
        taken += counts[row]
        table[row, : counts[row]] = mine.to(torch.int32)
        k = torch.randn(n, heads, dim, generator=gen, device=device).to(dtype)
        v = torch.randn(n, heads, dim, generator=gen, device=device).to(dtype)
        position = torch.arange(n, device=device)
        slot = mine[position // page_size] * page_size + position % page_size
        keys.append(k)
        values.append(v)
        slots.append(slot)
    total = sum(t for t, _ in lengths)
    q = torch.randn(total, heads * group, dim, generator=gen, device=device) * query_gain
    cu = torch.tensor([0, *[t for t, _ in lengths]], dtype=torch.int32, device=device)
    decode_counts = [t for t, _ in lengths[:num_decodes]]
    batch = PagedBatch(
        block_table=table,
        seq_lens=torch.tensor([n for _, n in lengths], dtype=torch.int32, device=device),
        cu_seqlens_q=cu.cumsum(0).to(torch.int32),
        num_decodes=num_decodes,
        num_decode_tokens=sum(decode_counts),
        decode_query_len=decode_query_len or max([*decode_counts, 1]),
        max_query_len=max(t for t, _ in lengths),
        max_seq_len=max_seq_len or max(n for _, n in lengths),
        seq_lens_host=tuple(n for _, n in lengths),
        query_lens_host=tuple(t for t, _ in lengths),
    )
    return Problem(q.to(dtype), k_cache, v_cache, k_summary, batch, keys, values, slots)
