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
from sparsek_kernels.paged.plan import (
    Segment,
    each_segment,
    everything,
    first_sparse,
    plan_step,
    split_queries,
)
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


def rows_of(segment: Segment) -> list[int]:
    """Rows of a segment that are not neighbours."""
    assert isinstance(segment.rows, torch.Tensor)
    assert segment.rows.dtype == torch.int64  # as index_copy_ takes them
    return segment.rows.tolist()


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


def test_decodes_are_as_long_as_they_are_not_as_a_prompt_beside_them() -> None:
    batch = make_batch([300, 260, 4000], [1, 1, 100], 2)
    decodes, prompt = planned(batch, TOPK)
    assert (decodes.batch.max_seq_len, prompt.batch.max_seq_len) == (304, 4000)
    bounded, _ = planned(make_batch([300, 260, 4000], [1, 1, 100], 2), TOPK, [310, 310, 4000])
    assert bounded.batch.max_seq_len == 312, "bounds are enough"


def test_ends_of_sparse_prompts_come_again_as_one_dense_segment() -> None:
    policy = replace(TOPK, dense_last=64)
    batch = make_batch([900, 100, 4000, 5000, 6000], [1, 100, 300, 80, 40], 1)
    decodes, short, sparse, whole, tails = planned(batch, policy)
    assert spans((decodes, short, sparse)) == [
        (1, [900], DECODED),
        (0, [100], EVERYTHING),
        (0, [4000, 5000], TOPK),
    ]
    assert spans((tails,)) == [(0, [4000, 5000], EVERYTHING)]
    assert rows_of(tails) == [*range(337, 401), *range(417, 481)]
    assert tails.batch.cu_seqlens_q.tolist() == [0, 64, 128]
    assert (tails.batch.max_query_len, tails.batch.max_seq_len) == (64, 5000)
    assert torch.equal(tails.batch.block_table, batch.block_table[2:4])
    assert spans((whole,)) == [(0, [6000], EVERYTHING)]  # every query is among the last
    assert whole.rows == slice(None)


def test_the_end_of_a_prompt_is_dense_whatever_chunks_it_comes_in() -> None:
    policy = replace(TOPK, dense_last=64)
    batch = make_batch(
        [900, 3000, 4000, 3500, 4030, 100, 4010],
        [1, 300, 300, 300, 300, 100, 10],
        1,
        prompt_left_host=(-1, 5000, 0, 20, -30, 0, -10),
    )
    _, sparse, short, recomputed, tails = planned(batch, policy)
    assert spans((sparse, short, recomputed)) == [
        (0, [3000, 4000, 3500, 4030], TOPK),
        (0, [100], EVERYTHING),
        (0, [4010], TOPK),
    ]
    last, straddling = range(301 + 236, 301 + 300), range(601 + 256, 601 + 300)
    assert rows_of(tails) == [*last, *straddling, *range(901 + 206, 901 + 270)]
    assert tails.batch.query_lens == (64, 44, 64)
    assert tails.batch.seq_lens.tolist() == [4000, 3500, 4000]  # what follows a prompt is no key
    assert tails.batch.seq_lens_host is None
    assert tails.batch.max_seq_len == 4000


def test_the_end_of_a_prompt_is_dense_where_it_counts_as_a_decode() -> None:
    policy = replace(TOPK, dense_last=64)
    known = {"prompt_left_host": (-2, 0, 90, 63, 0, 200), "query_lens_host": (2, 2, 2, 2, 2, 2)}
    lengths = [900, 4000, 3000, 800, 150, 5000]  # of which one is short enough to be attended whole
    decodes, tail = planned(make_batch(lengths, [2] * 6, 6, **known), policy)
    assert (decodes.batch.num_decodes, decodes.policy, decodes.rows) == (6, DECODED, slice(None))
    assert rows_of(tail) == [2, 3, 7]
    assert (tail.policy, tail.batch.num_decodes) == (EVERYTHING, 0)
    assert tail.batch.query_lens == (2, 1)
    assert tail.batch.seq_lens.tolist() == [4000, 800]
    mixed = {name: (*value, 300) for name, value in known.items()}
    batch = make_batch([*lengths, 2000], [2] * 6 + [300], 6, **mixed)
    decodes, chunk, tail = planned(batch, policy)
    assert (decodes.batch.num_decodes, chunk.batch.num_prefills) == (6, 1)
    assert rows_of(tail) == [2, 3, 7]
    neighbours = {"prompt_left_host": (0, 0), "query_lens_host": (2, 2)}
    *_, tail = planned(make_batch([4000, 800], [2, 2], 2, **neighbours), policy)
    assert tail.rows == slice(0, 4)  # nothing is copied
    unknown = replace(batch.part(0, 6), prompt_left_host=None, _derived={})
    for found in (planned(unknown, policy), planned(batch.part(0, 6), TOPK)):
        assert [segment.policy for segment in found] == [DECODED]


def test_a_chunk_among_the_last_tokens_of_its_prompt_is_dense() -> None:
    policy = replace(TOPK, dense_last=64)
    batch = make_batch([4000, 5000], [30, 30], 0, prompt_left_host=(34, 35))
    dense, sparse, tail = planned(batch, policy)
    assert spans((dense, sparse)) == [(0, [4000], EVERYTHING), (0, [5000], TOPK)]
    assert (tail.rows, tail.batch.query_lens) == (slice(31, 60), (29,))  # alone: nothing is copied


@pytest.mark.parametrize("size", [32, 96])
def test_segments_attended_one_by_one_make_the_step(size: int) -> None:
    policy = SelectionPolicy(
        num_sink=16, window_size=20, top_k=1, sel_block_size=size, dense_below=64, dense_last=10
    )
    case = make_case([300, 60, 410, 333, 8], [1, 60, 400, 40, 8], 1, page_size=192)
    step = StepPolicy.of(policy)
    found = plan_step(case.batch, step)
    assert [segment.policy.is_dense for segment in found] == [False, True, False, True, True]
    out = torch.full_like(case.q, float("nan"))
    operands = PagedOperands(case.q, case.k_cache, case.v_cache, out, 32**-0.5, case.k_summary)
    for mine, segment in each_segment(operands, found):
        attend_segment(mine, segment, default_indexers(step).of(segment))
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


def test_where_nobody_knows_of_ends_they_are_of_the_fewest_tokens() -> None:
    """Whatever bounds of lengths there are: else other requests of a step would decide."""
    policy = replace(TOPK, dense_last=1024, last_part=16)
    batch = make_batch([3000, 4000], [500, 600], 0)
    for bounds in (None, [4000, 4000], [90_000, 90_000]):
        *_, tails = planned(replace(batch, _derived={}), policy, bounds)
        assert tails.batch.query_lens == (64, 64)
    *_, tails = planned(replace(batch, prompt_left_host=(0, 100), _derived={}), policy)
    assert tails.batch.query_lens == (3000 // 16, 4100 // 16 - 100)


def test_a_prompt_alone_ends_sparse_at_the_tile_where_its_dense_end_begins() -> None:
    policy = replace(TOPK, dense_last=150)
    known = {"seq_lens_host": (900, 4000), "query_lens_host": (1, 500)}
    batch = make_batch([900, 4000], [1, 500], 1, **known)
    _, sparse, tail = planned(batch, policy)
    # The end begins at 3850, and the tile that holds it ends at 3904.
    assert (sparse.rows, sparse.batch.first_row) == (slice(1, 405), 0)
    assert (sparse.policy, sparse.batch.seq_lens.tolist()) == (TOPK, [3904])
    assert sparse.batch.cu_seqlens_q.tolist() == [0, 404]
    assert (sparse.batch.max_query_len, sparse.batch.max_seq_len) == (404, 3904)
    assert sparse.batch.seq_lens_host == (3904,)
    assert torch.equal(sparse.batch.block_table, batch.block_table[1:])
    assert (tail.rows, tail.batch.seq_lens.tolist()) == (slice(351, 501), [4000])
    whole = [
        planned(replace(batch, seq_lens_host=None, _derived={}), policy),  # its length is a bound
        planned(replace(batch, prompt_left_host=(-1, -3), _derived={}), policy),  # more follows
        planned(batch, replace(TOPK, dense_last=10)),  # it ends inside the last tile
    ]
    for _, sparse, _ in whole:
        assert (sparse.rows, sparse.batch.seq_lens.tolist()) == (slice(None), [4000])
    several = make_batch([3900, 4000], [500, 500], 0, seq_lens_host=(3900, 4000))
    sparse, _ = planned(several, policy)
    assert (sparse.rows, sparse.batch.seq_lens.tolist()) == (slice(None), [3900, 4000])


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
