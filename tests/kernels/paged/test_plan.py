"""Which queries of a step attend everything: rows of one prefill, and segments of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek_kernels.paged import PagedBatch, SelectionPolicy, StepPolicy, attend_segment, scratch
from sparsek_kernels.paged.api import default_indexers
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment, everything, first_sparse, plan_step, split_queries
from tests.kernels.paged.cache_cases import make_case, run

EVERYTHING = SelectionPolicy()
TOPK = SelectionPolicy(num_sink=64, window_size=128, top_k=2, dense_below=256)
DECODED = TOPK.per_token(1)


def make_batch(
    seq_lens: list[int], query_lens: list[int], num_decodes: int, **known: object
) -> PagedBatch:
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
        **known,
    )


def planned(
    batch: PagedBatch, policy: SelectionPolicy, seq_lens: list[int] | None = None
) -> tuple[Segment, ...]:
    """Segments of a step whose decoded tokens attend by :data:`DECODED`."""
    return plan_step(batch, StepPolicy(policy, DECODED), seq_lens)


def spans(found: tuple[Segment, ...]) -> list[tuple[int, list[int], SelectionPolicy]]:
    return [(s.batch.num_decodes, s.batch.seq_lens.tolist(), s.policy) for s in found]


@given(
    window=st.one_of(st.none(), st.integers(1, 90)),
    num_sink=st.integers(0, 40),
    top_k=st.integers(0, 3),
    tile=st.sampled_from([1, 16, 48, 64]),
    dense_below=st.integers(0, 300),
    dense_last=st.integers(0, 40),
    num_q=st.integers(0, 200),
    before=st.integers(0, 200),
)
def test_rows_of_a_prefill(
    window: int | None,
    num_sink: int,
    top_k: int,
    tile: int,
    dense_below: int,
    dense_last: int,
    num_q: int,
    before: int,
) -> None:
    policy = SelectionPolicy(
        num_sink=0 if window is None else num_sink,
        window_size=window,
        top_k=0 if window is None else top_k,
        sel_block_size=32,
        dense_below=dense_below,
        dense_last=dense_last,
        query_tile=tile,
    )
    num_k = before + num_q
    sparse = [
        row
        for row in range(num_q)
        if row < num_q - dense_last and not policy.sees_all(before + row)
    ]
    first, last = split_queries(policy, num_q, num_k)
    assert list(range(first, last)) == sparse
    if not sparse:
        assert (first, last) == (num_q, num_q)
    position = first_sparse(policy, before, num_k)
    assert all(policy.sees_all(p) for p in range(before, position))
    assert not any(policy.sees_all(p) for p in range(position, num_k))


def test_neighbours_of_one_kind_share_a_segment() -> None:
    batch = make_batch([900, 100, 256, 4000, 5000, 90], [1, 100, 16, 300, 200, 90], 1)
    found = planned(batch, TOPK)
    assert spans(found) == [
        (1, [900], DECODED),
        (0, [100, 256], EVERYTHING),
        (0, [4000, 5000], TOPK),
        (0, [90], EVERYTHING),
    ]
    assert found[1].batch.cu_seqlens_q.tolist() == [1, 101, 117]
    assert (found[1].batch.max_query_len, found[1].batch.max_seq_len) == (100, 256)
    assert found[2].batch.block_table.tolist() == batch.block_table[3:5].tolist()
    assert [segment.rows for segment in found] == [slice(None)] * 4
    assert planned(batch, TOPK) is found


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (EVERYTHING, [[100, 9000, 90]]),
        (SelectionPolicy(window_size=100), [[100, 9000, 90]]),
        (SelectionPolicy(window_size=100, dense_below=100), [[100, 9000, 90]]),
        (SelectionPolicy(window_size=100, dense_below=128), [[100], [9000], [90]]),
        (SelectionPolicy(num_sink=4, window_size=100), [[100], [9000], [90]]),
        (TOPK, [[100], [9000], [90]]),
    ],
)
def test_one_band_is_one_segment(policy: SelectionPolicy, expected: list[list[int]]) -> None:
    found = planned(make_batch([100, 9000, 90], [50, 500, 90], 0), policy)
    assert [segment.batch.seq_lens.tolist() for segment in found] == expected
    assert policy.is_band == (len(expected) == 1)
    for segment in found:
        assert segment.policy == (policy if 9000 in segment.batch.seq_lens else segment.policy)


@pytest.mark.parametrize(("length", "dense"), [(99, True), (100, True), (101, False)])
def test_windows_are_dense_up_to_the_very_position(length: int, dense: bool) -> None:
    policy = SelectionPolicy(num_sink=4, window_size=20, dense_below=100)
    (segment,) = planned(make_batch([length], [60], 0), policy)
    assert segment.policy.is_dense == dense


def test_last_queries_of_sparse_prefills_come_again_as_dense_segments() -> None:
    policy = replace(TOPK, dense_last=64)
    batch = make_batch([900, 100, 4000, 5000, 6000], [1, 100, 300, 80, 40], 1)
    decodes, short, sparse, *tails, whole = planned(batch, policy)
    assert spans((decodes, short, sparse)) == [
        (1, [900], DECODED),
        (0, [100], EVERYTHING),
        (0, [4000, 5000], TOPK),
    ]
    assert [tail.policy for tail in tails] == [EVERYTHING] * 2
    assert [tail.rows for tail in tails] == [slice(337, 401), slice(417, 481)]
    assert [tail.batch.cu_seqlens_q.tolist() for tail in tails] == [[0, 64]] * 2
    assert [tail.batch.seq_lens.tolist() for tail in tails] == [[4000], [5000]]
    assert [(t.batch.max_query_len, t.batch.max_seq_len) for t in tails] == [(64, 4000), (64, 5000)]
    assert tails[1].batch.block_table.tolist() == batch.block_table[3:4].tolist()
    assert spans((whole,)) == [(0, [6000], EVERYTHING)]  # every query is among the last
    assert whole.rows == slice(None)


@pytest.mark.parametrize("size", [32, 96])
def test_segments_attended_one_by_one_make_the_step(size: int) -> None:
    policy = SelectionPolicy(
        num_sink=16, window_size=20, top_k=1, sel_block_size=size, dense_below=64, dense_last=10
    )
    case = make_case([300, 60, 410, 333, 8], [1, 60, 400, 40, 8], 1, page_size=192)
    step = StepPolicy.of(policy)
    found = plan_step(case.batch, step)
    assert [segment.policy.is_dense for segment in found] == [False, True, False, True, True, True]
    out = torch.full_like(case.q, float("nan"))
    operands = PagedOperands(case.q, case.k_cache, case.v_cache, out, 32**-0.5, case.k_summary)
    for segment in found:
        index = default_indexers(step).of(segment)
        attend_segment(operands.of_rows(segment.rows), segment, index)
    assert torch.equal(out, run(case, policy))


def test_tails_of_a_part_keep_their_rows() -> None:
    batch = make_batch([900, 4000, 5000], [1, 300, 80], 1)
    (sparse, tail) = planned(batch.part(2, 3), replace(TOPK, dense_last=64))
    assert sparse.batch.cu_seqlens_q.tolist() == [301, 381]
    assert tail.rows == slice(317, 381)


def test_a_step_without_requests_has_no_segments() -> None:
    case = make_case([300], [300], 0)
    case.batch = replace(case.batch.part(1, 1), first_row=0)
    case.q = case.q[:0]
    assert plan_step(case.batch, StepPolicy.of(TOPK)) == ()
    assert run(case, TOPK).shape == (0, 4, 32)


def test_bounds_of_lengths_are_enough() -> None:
    batch = make_batch([100, 200], [100, 50], 0)
    assert spans(planned(batch, TOPK, [100, 4000])) == [
        (0, [100], EVERYTHING),
        (0, [200], TOPK),
    ]


def test_prompts_by_records_are_tokens_where_they_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_ROW_ELEMENTS", 1)
    rule = TOPK.by_records(4)
    batch = make_batch([500, 200, 620, 640], [1, 150, 20, 3], 1)
    decodes, whole, *parts = plan_step(batch, StepPolicy(rule, rule))
    assert (decodes.rows, decodes.policy) == (slice(None), rule)
    assert (whole.policy, whole.batch.seq_lens.tolist()) == (everything(rule), [200])
    assert [part.rows for part in parts] == [slice(151, 167), slice(167, 174)]
    assert all(part.policy == rule and not part.batch.num_prefills for part in parts)
    lengths = torch.cat([part.batch.seq_lens for part in parts])
    assert lengths.tolist() == [*range(601, 621), 638, 639, 640]
    assert [len(part.batch.block_table) for part in parts] == [16, 7]
    pages = torch.cat([part.batch.block_table for part in parts])
    assert torch.equal(pages, batch.block_table[[2] * 20 + [3] * 3])
