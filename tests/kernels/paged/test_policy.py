"""The selection rule for one position and for arrays of them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import SelectionPolicy
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
        seen = visible_reference(q, k, list(range(length)), rule, 8**-0.5).sum(-1)
        expected = rule.attended_tokens(torch.arange(length))
        assert torch.equal(seen, expected[:, None].expand(-1, 2))


def test_decoded_tokens_have_a_budget_of_their_own() -> None:
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=40, decode_top_k=10)
    single = policy.per_token()
    assert single.top_k == 40  # cells: a quarter of a block
    assert single.per_token() is single
    assert policy.attended_tokens(20_000) > single.attended_tokens(20_000)
    equal = SelectionPolicy(num_sink=64, window_size=512, top_k=10).per_token()
    assert single == equal
