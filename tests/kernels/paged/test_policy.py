"""The selection rule for one position and for arrays of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import CELL_SIZE, SelectionPolicy, StepPolicy
from sparsek_kernels.paged.reference import select_blocks_reference, visible_reference

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
    for ranges in (policy.local_range, policy.candidate_range):
        one_by_one = [ranges(position) for position in positions]
        for many in (array, tensor):
            first, end = ranges(many)
            assert list(zip(first.tolist(), end.tolist(), strict=True)) == one_by_one
    assert array.tolist() == tensor.tolist() == positions


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
        positions = list(range(length))
        seen = visible_reference(q, k, positions, rule, 8**-0.5, select_blocks_reference).sum(-1)
        expected = rule.attended_tokens(torch.arange(length))
        assert torch.equal(seen, expected[:, None].expand(-1, 2))


def test_decoded_tokens_have_a_budget_of_their_own() -> None:
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=40, dense_last=64)
    single = policy.per_token(10)
    assert (single.top_k, single.query_tile, single.dense_last) == (40, 1, 0)
    assert single.sel_block_size == CELL_SIZE  # a quarter of a block
    assert single.per_token() == single
    assert policy.attended_tokens(20_000) > single.attended_tokens(20_000)
    equal = SelectionPolicy(num_sink=64, window_size=512, top_k=10).per_token()
    assert single == equal
    assert policy.per_token(10, 64) == replace(equal, top_k=10, sel_block_size=64)


def test_one_policy_serves_both_phases() -> None:
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=40, dense_last=64)
    assert StepPolicy.of(policy) == StepPolicy(policy, policy.per_token())
    window = replace(policy, top_k=0)
    assert StepPolicy.of(window) == StepPolicy(window, replace(window, dense_last=0))
    alone = replace(policy, query_tile=1)  # prefills select as decoded tokens do
    assert StepPolicy.of(alone) == StepPolicy(policy.per_token(), policy.per_token())
    both = StepPolicy(policy, policy.per_token(10))
    assert StepPolicy.of(both) is both


@pytest.mark.parametrize(
    "fields", [{"query_tile": 64}, {"dense_last": 3}, {"dense_last": 3, "top_k": 0}]
)
def test_decoded_tokens_have_no_tiles(fields: dict[str, int]) -> None:
    decode = SelectionPolicy(**{"window_size": 64, "top_k": 2, "query_tile": 1, **fields})
    with pytest.raises(ValueError, match=r"decode: expected query_tile 1 and dense_last 0 .*, got"):
        StepPolicy(SelectionPolicy(), decode)
