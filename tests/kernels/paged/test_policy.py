"""The selection rule for one position and for arrays of them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import SelectionPolicy
from sparsek_kernels.paged.policy import LIST_SPAN
from sparsek_kernels.paged.reference import visible_reference

policies = st.one_of(
    st.just(SelectionPolicy()),
    st.builds(
        SelectionPolicy,
        num_sink=st.integers(0, 200),
        window_size=st.integers(1, 700),
        top_k=st.sampled_from([0, 1, 2, 7, 32]),
        sel_block_size=st.sampled_from([16, 32, 64, 128]),
        dense_below=st.sampled_from([0, 1, 100, 1024]),
        dense_last=st.sampled_from([0, 1, 64]),
        query_tile=st.sampled_from([1, 16, 64, 100]),
    ),
)


@settings(deadline=None, max_examples=200)
@given(policies, st.lists(st.integers(0, 20_000), max_size=20))
def test_arrays_follow_the_rule_of_their_positions(
    policy: SelectionPolicy, positions: list[int]
) -> None:
    array, tensor = np.array(positions, dtype=np.int64), torch.tensor(positions, dtype=torch.int64)
    for method in (policy.attended_tokens, policy.sees_all):
        one_by_one = [method(position) for position in positions]
        assert method(array).tolist() == one_by_one
        assert method(tensor).tolist() == one_by_one
    for ranges in (policy.local_range, policy.candidate_range, policy.list_range):
        one_by_one = [ranges(position) for position in positions]
        for many in (array, tensor):
            first, end = ranges(many)
            assert list(zip(first.tolist(), end.tolist(), strict=True)) == one_by_one
    assert array.tolist() == tensor.tolist() == positions


@settings(deadline=None, max_examples=200)
@given(
    policy=st.builds(
        SelectionPolicy,
        num_sink=st.integers(0, 200),
        window_size=st.integers(1, 700),
        top_k=st.integers(1, 8),
        sel_block_size=st.sampled_from([16, 32, 48, 64, 128]),
        query_tile=st.integers(1, 600),
    ),
    position=st.integers(0, 20_000),
)
def test_tiles_of_a_list_lie_within_a_span(policy: SelectionPolicy, position: int) -> None:
    tile, size, span = policy.query_tile, policy.sel_block_size, policy.list_span
    assert span == policy.tiles_per_list * tile
    if tile == 1:
        assert policy.tiles_per_list == 1
    elif tile > LIST_SPAN:
        assert span == tile
    else:
        assert LIST_SPAN - tile < span <= LIST_SPAN
    tiles = range(position // span * span, position // span * span + span, tile)
    assert len(tiles) == policy.tiles_per_list
    seen = {p // size for start in tiles for p in range(start, start + tile)}
    windows = {min(seen) - back for back in range(policy.reach_blocks + 1)} | seen
    assert len(windows) <= policy.list_local_blocks
    for start in tiles:
        assert policy.list_range(start) == policy.list_range(position)
        first, last = policy.candidate_range(start)
        first_listed, last_listed = policy.list_range(start)
        assert last_listed == policy.local_range(tiles.start)[0]
        assert first_listed <= last_listed <= last
        assert first_listed == first or last_listed < policy.sink_blocks
        between = range(max(last_listed, policy.sink_blocks), last)
        assert len(between) <= policy.list_local_blocks - policy.reach_blocks
        listed = {*range(first_listed, last_listed), *between}
        assert listed == set(range(first, last))


@settings(deadline=None, max_examples=100)
@given(
    window=st.integers(1, 300),
    size=st.sampled_from([16, 32, 48, 64, 128]),
    tile=st.integers(1, 600),
)
def test_no_list_touches_more_blocks_and_some_touches_as_many(
    window: int, size: int, tile: int
) -> None:
    policy = SelectionPolicy(window_size=window, top_k=1, sel_block_size=size, query_tile=tile)
    for queries, most in (
        (tile, policy.local_blocks),
        (policy.list_span, policy.list_local_blocks),
    ):
        starts = range(0, size * queries, queries)  # every place of a first query in its block
        touched = [(s + queries - 1) // size - s // size + 1 for s in starts]
        assert max(touched) + policy.reach_blocks == most


@settings(deadline=None, max_examples=25)
@given(
    policy=st.builds(
        SelectionPolicy,
        num_sink=st.integers(0, 40),
        window_size=st.integers(1, 90),
        top_k=st.integers(0, 4),
        sel_block_size=st.sampled_from([16, 32, 48, 64]),
        dense_below=st.sampled_from([0, 1, 100]),
        query_tile=st.integers(1, 100),
    ),
    length=st.integers(1, 260),
)
def test_the_attended_tokens_are_as_many_as_the_oracle_sees(
    policy: SelectionPolicy, length: int
) -> None:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(length, 4, 8, generator=generator)
    k = torch.randn(length, 2, 8, generator=generator)
    for rule in (policy, policy.per_token()):
        seen = visible_reference(q, k, list(range(length)), rule, 8**-0.5).sum(-1)
        expected = rule.attended_tokens(torch.arange(length))
        assert torch.equal(seen, expected[:, None].expand(-1, 2))


def test_decoded_tokens_have_a_budget_of_their_own() -> None:
    policy = SelectionPolicy(
        num_sink=64, window_size=512, top_k=40, decode_top_k=10, head_top_k=(40, 8, 1)
    )
    single = policy.per_token()
    assert (single.top_k, single.head_top_k) == (40, (40, 8, 1))  # cells: a quarter of a block
    assert single.per_token() is single
    assert policy.attended_tokens(20_000) > single.attended_tokens(20_000)
    equal = SelectionPolicy(num_sink=64, window_size=512, top_k=10).per_token()
    whole = SelectionPolicy(num_sink=64, window_size=512, top_k=40, decode_top_k=10).per_token()
    assert whole == equal
