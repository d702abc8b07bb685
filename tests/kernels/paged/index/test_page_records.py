"""Attention of decoded tokens by records, through the public call, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsek_kernels.paged import PageRecords, SelectionPolicy, StepPolicy, paged_attention
from sparsek_kernels.paged.api import default_indexers, select_blocks, write_index
from sparsek_kernels.paged.lengths import batch_of_lengths
from sparsek_kernels.paged.record import page_bytes
from tests.kernels.paged.records_oracle import decode_reference

TILES = SelectionPolicy(num_sink=64, window_size=100, top_k=4, query_tile=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("page_size", "new"), [(64, 1), (128, 3)])
def test_decoded_tokens_attend_by_records(page_size: int, new: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(7)
    heads, group, dim = 2, 3, 64
    lengths = (900, 300, 1217)
    policy = StepPolicy(replace(TILES, dense_last=0), TILES.by_records(192))
    indexers = default_indexers(policy)
    assert isinstance(indexers.decode, PageRecords)
    each = -(-max(lengths) // page_size)
    shape = (len(lengths) * each + 1, heads, page_size, dim)
    k_cache, v_cache = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
    table = torch.randperm(len(lengths) * each, generator=draw).view(len(lengths), each).int()
    records = torch.zeros(shape[0], heads, page_bytes(page_size, dim), dtype=torch.uint8)
    filled = batch_of_lengths(table, lengths, lengths)
    write_index(k_cache, v_cache, records, filled, policy.decode, indexers.decode)
    batch = batch_of_lengths(table, (new,) * 3, lengths, decodes=3)
    q = (2 * torch.randn(3 * new, heads * group, dim, generator=draw)).to(dtype)
    sinks = torch.randn(heads * group, generator=draw)
    out = paged_attention(
        q, k_cache, v_cache, batch, policy, k_summary=records, indexers=indexers, sinks=sinks
    )
    listed = select_blocks(q, k_cache, batch, policy, k_summary=records)
    assert [len(one) for one in listed] == [1, 1, 1]  # of a request's tokens together
    wanted = decode_reference(q, k_cache, v_cache, batch, policy.decode, dim**-0.5, sinks)
    torch.testing.assert_close(
        out.double(), wanted, atol=2e-5 if dtype == torch.float32 else 2e-2, rtol=0.0
    )


def test_records_need_pages_of_whole_segments() -> None:
    pages = torch.zeros(3, 1, 96, 64)
    with pytest.raises(ValueError, match="page_size: expected a multiple of 64"):
        PageRecords().check(TILES.by_records(64), pages)


def test_attended_tokens_of_a_request_count_from_its_first() -> None:
    rule = TILES.by_records(192)
    alone = rule.attended_tokens(1406)
    assert [rule.attended_tokens(p, 1406) - alone for p in (1406, 1408, 1410)] == [0, 2, 4]
    assert rule.attended_tokens(1408) < alone  # by itself: a segment more is far
    dense = next(p for p in range(2000) if not rule.sees_all(p)) - 1
    assert rule.attended_tokens(dense + 2, dense) == dense + 3
    tiles = TILES.per_token()
    assert tiles.attended_tokens(1408, 1406) == tiles.attended_tokens(1408)
