"""Filled caches and policies for the tests of paged attention on a CPU."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from sparsek_kernels.paged import (
    Indexers,
    PagedBatch,
    SelectionPolicy,
    StepPolicy,
    paged_attention,
    select_blocks,
    summary_bytes,
    write_kv,
)
from sparsek_kernels.paged.attend.reference import Select
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.reference import paged_attention_reference, select_blocks_reference
from tests.kernels.paged.records_oracle import checked_lists

_TOPK = SelectionPolicy(num_sink=16, window_size=40, top_k=4, sel_block_size=32, query_tile=32)
POLICIES: dict[str, SelectionPolicy | StepPolicy] = {
    "dense": SelectionPolicy(),
    "sink_window": SelectionPolicy(num_sink=4, window_size=50),
    "window": SelectionPolicy(window_size=37),
    "topk": SelectionPolicy(num_sink=16, window_size=40, top_k=3, sel_block_size=32, query_tile=32),
    "topk_token": SelectionPolicy(
        num_sink=1, window_size=33, top_k=2, sel_block_size=16, query_tile=1
    ),
    "topk_wide_tile": SelectionPolicy(
        num_sink=8, window_size=16, top_k=4, sel_block_size=16, query_tile=64
    ),
    "topk_dense_below": SelectionPolicy(
        num_sink=16, window_size=16, top_k=2, sel_block_size=32, dense_below=128, query_tile=32
    ),
    "topk_fewer_decoded": StepPolicy(_TOPK, _TOPK.by_records(32)),
}


@dataclass
class Case:
    """A filled cache and the batch that reads it."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_summary: torch.Tensor
    batch: PagedBatch


def make_case(
    lengths: list[int],
    queries: list[int],
    num_decodes: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    page_size: int = 64,
    dtype: torch.dtype = torch.float32,
    layout: str = "interleaved",
    seed: int = 0,
    permute: int | None = None,
) -> Case:
    """Sequences written to shuffled pages of a cache whose unused part is poison."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // page_size) for length in lengths]
    num_pages = sum(needed) + 3
    each, has_records = summary_bytes(page_size, dim), page_size % 64 == 0
    if layout == "interleaved":
        page_elements = kv_heads * page_size * 2 * dim
        tail = kv_heads * each // dtype.itemsize
        raw = torch.full((num_pages * (page_elements + tail),), float("nan"), dtype=dtype)
        pitch = page_elements + tail
        kv = raw.as_strided(
            (num_pages, kv_heads, page_size, 2 * dim),
            (pitch, page_size * 2 * dim, 2 * dim, 1),
        )
        k_cache, v_cache = kv[..., :dim], kv[..., dim:]
        tails = raw.view(num_pages, pitch)[:, page_elements:]
        k_summary = tails.view(torch.uint8).unflatten(1, (kv_heads, each)).fill_(255)  # NaN
    else:
        shape = (num_pages, page_size, kv_heads, dim)
        k_cache = torch.full(shape, float("nan"), dtype=dtype).transpose(1, 2)
        v_cache = torch.full(shape, float("nan"), dtype=dtype).transpose(1, 2)
        k_summary = torch.full((num_pages, kv_heads, each), 255, dtype=torch.uint8)
    order = torch.randperm(
        num_pages, generator=torch.Generator().manual_seed(seed if permute is None else permute)
    )
    table = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
    used = 0
    for request, count in enumerate(needed):
        table[request, :count] = order[used : used + count]
        used += count
    for request, length in enumerate(lengths):
        keys = torch.randn(length, kv_heads, dim, generator=generator).to(dtype)
        values = torch.randn(length, kv_heads, dim, generator=generator).to(dtype)
        position = torch.arange(length)
        slots = table[request, position // page_size].long() * page_size + position % page_size
        step = 1 + seed % 23  # appended in pieces, which complete segments or do not
        for begin in range(0, length, step * 7):
            part = slice(begin, begin + step * 7)
            write_kv(
                keys[part],
                values[part],
                k_cache,
                v_cache,
                k_summary if has_records else None,
                slots[part],
            )
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    q = 3.0 * torch.randn(int(starts[-1]), heads, dim, generator=generator)
    batch = PagedBatch(
        block_table=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        cu_seqlens_q=starts,
        num_decodes=num_decodes,
        num_decode_tokens=sum(queries[:num_decodes]),
        decode_query_len=max([1, *queries[:num_decodes]]),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )
    return Case(q.to(dtype), k_cache, v_cache, k_summary, batch)


def run(case: Case, policy: SelectionPolicy | StepPolicy, **options: object) -> torch.Tensor:
    out = torch.full((*case.q.shape[:2], case.v_cache.shape[-1]), float("nan"), dtype=case.q.dtype)
    return paged_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.batch,
        policy,
        k_summary=case.k_summary,
        out=out,
        **options,
    )


def lists_of(case: Case, step: StepPolicy, indexers: Indexers | None = None) -> torch.Tensor:
    """Lists of cells of requests that decode, then of tokens of prompts if these have any."""
    summary = case.k_summary
    each = select_blocks(
        case.q, case.k_cache, case.batch, step, k_summary=summary, indexers=indexers
    )
    return torch.cat(each if step.prefill.alignment else each[: case.batch.num_decodes])


def check(
    case: Case,
    policy: SelectionPolicy | StepPolicy,
    *,
    sinks: torch.Tensor | None = None,
    select: Select = select_blocks_reference,
    **options: Any,
) -> None:
    """Compare with the oracle.

    Decoded tokens by records are attended in torch, and their lists are held to the rule: C may
    draw others.
    """
    step, decodes = StepPolicy.of(policy), case.batch.num_decodes
    with ExitStack() as stack:
        if step.prefill.alignment or (step.decode.alignment and decodes):
            stack.enter_context(patch.object(native_decode, "supports", return_value=False))
            select = checked_lists(lists_of(case, step, options.get("indexers")), 1e-4, select)
        found = run(case, policy, sinks=sinks, **options).double()
    expected = paged_attention_reference(
        case.q, case.k_cache, case.v_cache, case.batch, policy, sinks=sinks, select=select
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
