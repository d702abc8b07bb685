"""How a step's prefills are split between FlashAttention and the sparse kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="the vLLM backend needs vLLM")

import torch

from sparsek_backend.vllm_backend.dense_prefill import FlashPrefill, Run, split_runs
from sparsek_kernels.paged import PagedBatch, SelectionPolicy

TOPK = SelectionPolicy(num_sink=64, window_size=128, top_k=2, dense_below=256)


def make_batch(seq_lens: list[int], query_lens: list[int], num_decodes: int) -> PagedBatch:
    offsets = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    return PagedBatch(
        block_table=torch.arange(len(seq_lens) * 4, dtype=torch.int32).view(len(seq_lens), 4),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        cu_seqlens_q=offsets,
        num_decodes=num_decodes,
        num_decode_tokens=sum(query_lens[:num_decodes]),
        decode_query_len=1,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def spans(runs: tuple[Run, ...]) -> list[tuple[int, list[int], bool]]:
    return [(run.batch.num_decodes, run.batch.seq_lens.tolist(), run.dense) for run in runs]


def test_neighbours_of_one_kind_share_a_run() -> None:
    seq_lens, query_lens = [900, 100, 256, 4000, 5000, 90], [1, 100, 16, 300, 200, 90]
    batch = make_batch(seq_lens, query_lens, 1)
    runs = split_runs(batch, TOPK, seq_lens, query_lens)
    assert spans(runs) == [
        (1, [900], False),
        (0, [100, 256], True),
        (0, [4000, 5000], False),
        (0, [90], True),
    ]
    assert runs[1].batch.cu_seqlens_q.tolist() == [1, 101, 117]
    assert (runs[1].max_query_len, runs[1].max_seq_len) == (100, 256)
    assert runs[2].batch.block_table.tolist() == batch.block_table[3:5].tolist()


@pytest.mark.parametrize(
    ("policy", "dense"),
    [
        (SelectionPolicy(), True),
        (SelectionPolicy(window_size=100), True),
        (SelectionPolicy(window_size=100, dense_below=100), True),
        (SelectionPolicy(window_size=100, dense_below=128), False),
        (SelectionPolicy(num_sink=4, window_size=100), False),
        (TOPK, False),
    ],
)
def test_long_prefills_are_dense_only_where_flash_has_the_mask(
    policy: SelectionPolicy, dense: bool
) -> None:
    runs = split_runs(make_batch([9000], [500], 0), policy, [9000], [500])
    assert [run.dense for run in runs] == [dense]
    assert [run.window_size for run in runs] == [policy.window_size if dense else None]


@pytest.mark.parametrize(("length", "dense"), [(99, True), (100, True), (101, False)])
def test_windows_are_dense_up_to_the_very_position(length: int, dense: bool) -> None:
    policy = SelectionPolicy(num_sink=4, window_size=20, dense_below=100)
    runs = split_runs(make_batch([length], [60], 0), policy, [length], [60])
    assert [run.dense for run in runs] == [dense]


def test_last_queries_of_sparse_prefills_come_again_as_dense_runs() -> None:
    policy = replace(TOPK, dense_last=64)
    seq_lens, query_lens = [900, 100, 4000, 5000], [1, 100, 300, 40]
    batch = make_batch(seq_lens, query_lens, 1)
    decodes, short, sparse, *tails = split_runs(batch, policy, seq_lens, query_lens)
    assert spans((decodes, short, sparse)) == [
        (1, [900], False),
        (0, [100], True),
        (0, [4000, 5000], False),
    ]
    assert (decodes.policy, short.policy, sparse.policy) == (None, None, TOPK)
    assert [(tail.dense, tail.policy) for tail in tails] == [(True, SelectionPolicy())] * 2
    assert [tail.rows for tail in tails] == [slice(337, 401), slice(401, 441)]
    assert [tail.batch.cu_seqlens_q.tolist() for tail in tails] == [[0, 64], [0, 40]]
    assert [tail.batch.seq_lens.tolist() for tail in tails] == [[4000], [5000]]
    assert [(tail.max_query_len, tail.max_seq_len) for tail in tails] == [(64, 4000), (40, 5000)]
    assert tails[1].batch.block_table.tolist() == batch.block_table[3:].tolist()


def test_nothing_is_selected_where_every_query_is_among_the_last() -> None:
    policy = replace(TOPK, dense_last=64)
    runs = split_runs(make_batch([4000, 5000], [64, 40], 0), policy, [4000, 5000], [64, 40])
    assert spans(runs) == [(0, [4000], True), (0, [5000], True)]


@pytest.mark.parametrize(
    ("policy", "window"), [(TOPK, [-1, -1]), (SelectionPolicy(window_size=33), [32, 0])]
)
def test_flash_is_called_over_our_pages(policy: SelectionPolicy, window: list[int]) -> None:
    calls = []
    flash = FlashPrefill(lambda **kwargs: calls.append(kwargs), 3)
    batch = make_batch([100, 40], [100, 40], 0)
    (run,) = split_runs(batch, policy, [100, 40], [100, 40])
    q = torch.zeros(140, 4, 64)
    pages = torch.zeros(8, 2, 64, 128)
    flash(
        q,
        pages[..., :64],
        pages[..., 64:],
        run,
        softmax_scale=0.125,
        sinks=None,
        out=q,
    )
    (call,) = calls
    assert call["k"].shape == (8, 64, 2, 64)
    assert call["k"].data_ptr() == pages.data_ptr()
    assert call["window_size"] == window
    assert call["causal"] is True
    assert call["fa_version"] == 3
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (100, 100)
    assert call["seqused_k"].tolist() == [100, 40]
