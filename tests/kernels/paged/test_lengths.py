"""Batches made of lengths on the host, and pages made of contiguous sequences."""

from __future__ import annotations

import pytest
import torch

from sparsek_kernels.paged.lengths import batch_of_lengths, pages_of


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [7]),
        ([1, 1, 1], [5, 5, 5]),
        ([1, 4, 2], [9, 7, 5]),
        ([3, 3], [3, 10]),
        ([1, 1, 1], [2, 5, 7]),
    ],
)
def test_lengths_and_offsets(query_lens: list[int], seq_lens: list[int]) -> None:
    table = torch.zeros(4, 3, dtype=torch.int32)
    batch = batch_of_lengths(table, query_lens, seq_lens, decodes=1, max_len=8)
    assert batch.block_table.shape == (len(seq_lens), 3)
    assert batch.seq_lens.tolist() == seq_lens == list(batch.seq_lens_host or ())
    assert batch.cu_seqlens_q.diff().tolist() == query_lens == list(batch.query_lens)
    assert batch.seq_lens.dtype == batch.cu_seqlens_q.dtype == torch.int32
    assert (batch.num_decodes, batch.num_decode_tokens) == (1, query_lens[0])
    assert batch.decode_query_len == query_lens[0]
    assert batch.max_query_len == max(query_lens)
    assert batch.max_seq_len == max(8, *seq_lens)


@pytest.mark.parametrize("write_summary", [True, False])
def test_pages_hold_the_sequences(write_summary: bool) -> None:
    k, v = torch.randn(2, 70, 3, 32), torch.randn(2, 70, 3, 32)
    k_cache, v_cache, summary, table = pages_of(k, v, 64, write_summary=write_summary)
    assert table.dtype == torch.int32
    assert table.tolist() == [[0, 1], [2, 3]]
    for x, cache in ((k, k_cache), (v, v_cache)):
        rows = cache[table.long()].transpose(2, 3).flatten(1, 2)
        assert torch.equal(rows[:, :70], x)
        assert not rows[:, 70:].any()
    assert summary.shape[:2] == k_cache.shape[:2]
    assert bool(summary.any()) is write_summary
