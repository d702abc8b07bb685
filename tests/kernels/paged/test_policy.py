"""The selection rule for one position and for arrays of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import CELL_SIZE, SelectionPolicy, StepPolicy
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


aligned = st.builds(
    lambda alignment, size, **fields: SelectionPolicy(
        sel_block_size=min(size, alignment), alignment=alignment, query_tile=1, **fields
    ),
    alignment=st.sampled_from([64, 128]),
    size=st.sampled_from([2, 4, 16, 64, 128]),
    num_sink=st.integers(0, 200),
    window_size=st.integers(1, 700),
    top_k=st.sampled_from([1, 7, 64, 700]),
    dense_below=st.sampled_from([0, 1, 100, 1024]),
)


@given(
    st.sampled_from([0, 1, 64, 90, 1024]),
    st.sampled_from([0, 1, 16]),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 30_000), st.integers(-300, 3000))),
)
def test_the_last_tokens_of_a_prompt(
    dense_last: int, part: int, chunks: list[tuple[int, int, int]]
) -> None:
    policy = SelectionPolicy(dense_last=dense_last, last_part=part)
    chunks = [(count, before + count, max(left, -before)) for count, before, left in chunks]
    expected = []
    for count, length, left in chunks:
        prompt = count + left  # ends so many rows after the chunk's first
        size = min(dense_last, max(64, (length + left) // part)) if part else dense_last
        rows = [row for row in range(count) if prompt - size <= row < prompt]
        assert list(range(*policy.last_rows(count, length, left))) == rows
        expected.append(len(rows))
    counts, lengths, left = np.array(chunks, dtype=np.int64).reshape(-1, 3).T
    first, end = policy.last_rows(counts, lengths, left)
    assert (end - first).tolist() == expected
    fewest = min(dense_last, 64) if part else dense_last  # where a chunk's length says nothing
    first, end = policy.last_rows(counts, lengths, None)
    assert end.tolist() == counts.tolist()
    assert (end - first).tolist() == [min(count, fewest) for count in counts]


@settings(deadline=None, max_examples=200)
@given(policies | aligned, st.lists(st.integers(0, 20_000), max_size=20))
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


def earliest(
    q: torch.Tensor, k: torch.Tensor, positions: list[int], policy: SelectionPolicy, scale: float
) -> list[list[int]] | None:
    """The first blocks that compete."""
    first = policy.candidate_range(positions[0])[0]
    chosen = list(range(first, first + policy.scored_blocks))
    return None if policy.sees_all(positions[0]) else [chosen] * k.shape[1]


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
    for rule in (policy, policy.per_token(), policy.by_records(32)):
        positions = list(range(length))
        seen = visible_reference(q, k, positions, rule, 8**-0.5, earliest).sum(-1)
        expected = rule.attended_tokens(torch.arange(length))
        assert torch.equal(seen, expected[:, None].expand(-1, 2))


@settings(deadline=None, max_examples=200)
@given(aligned, st.integers(0, 5000))
def test_sinks_and_window_end_with_segments(policy: SelectionPolicy, position: int) -> None:
    """Token by token: what is seen in any case, and how many are chosen from the rest."""
    size, alignment = policy.sel_block_size, policy.alignment
    own = position // alignment
    sinks = range((policy.num_sink + alignment - 1) // alignment)
    before = max((policy.window_size + alignment - 1) // alignment, 1)
    forced = {n for n in range(own + 1) if n in sinks or n >= own - before}
    far = [t for t in range(position + 1) if t // alignment not in forced]
    cells = sorted({t // size for t in far})
    assert len(far) == len(cells) * size  # whole cells, all in the past
    assert policy.scored_blocks == policy.top_k
    everything = len(cells) <= policy.top_k or position < policy.dense_below
    assert policy.sees_all(position) == everything
    assert list(range(*policy.candidate_range(position))) == cells
    first, end = policy.local_range(position)
    assert first * size == max(own - before, 0) * alignment
    assert end == position // size + 1
    assert end - first <= policy.local_blocks
    chosen = len(far) if everything else policy.top_k * size
    attended = position + 1 - len(far) + chosen
    assert policy.attended_tokens(position) == attended
    assert everything or attended <= policy.budget_blocks * size


def test_the_policy_by_records_chooses_pairs_of_keys() -> None:
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=40, dense_last=64, dense_below=9)
    single = policy.by_records(4097)
    assert single == SelectionPolicy(64, 512, 2048, 2, 9, 0, 1, 64)
    assert StepPolicy.of(single) == StepPolicy(single, single)
    assert StepPolicy(policy, single).selects_blocks
    window = replace(policy, top_k=0)
    assert window.by_records(4096) == window.per_token()
    with pytest.raises(ValueError, match="tokens: expected an integer >= 2, got 1"):
        policy.by_records(1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alignment": -64}, "alignment: expected an integer >= 0, got -64"),
        ({"alignment": 32}, "alignment: expected 0, or a multiple of 64 with query_tile 1"),
        ({"query_tile": 64}, "alignment: expected 0, or .*, got 64 with 64 and 2"),
        ({"top_k": 0}, "alignment: expected 0, or .*, got 64 with 1 and 0"),
        ({"top_k": 32768}, r"top_k: .* at most 32767 .* \(decode_tokens of 65534\), got 32768"),
        (
            {"top_k": 65535, "alignment": 0, "query_tile": 64},
            "top_k: expected at most 65534 with query_tile > 1, got 65535",
        ),
        ({"sel_block_size": 1}, "sel_block_size: expected a power of two >= 2 .*, got 1"),
        ({"sel_block_size": 6}, "sel_block_size: expected a power of two >= 2 .*, got 6"),
        ({"sel_block_size": 128}, "sel_block_size: .* that divides alignment=64, got 128"),
        ({"sel_block_size": 2, "alignment": 0}, "sel_block_size: expected a multiple of 16"),
    ],
)
def test_sizes_that_are_refused(fields: dict[str, int], message: str) -> None:
    good = {"window_size": 64, "top_k": 2, "query_tile": 1, "sel_block_size": 4, "alignment": 64}
    SelectionPolicy(**good)
    with pytest.raises(ValueError, match=message):
        SelectionPolicy(**{**good, **fields})


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
    assert StepPolicy.of(policy) == StepPolicy(policy, policy.by_records(40 * 64))
    window = replace(policy, top_k=0)
    assert StepPolicy.of(window) == StepPolicy(window, replace(window, dense_last=0))
    alone = replace(policy, query_tile=1)  # prefills select as decoded tokens do
    assert StepPolicy.of(alone) == StepPolicy(*[policy.by_records(40 * 64)] * 2)
    both = StepPolicy(policy, policy.per_token(10))
    assert StepPolicy.of(both) is both


@pytest.mark.parametrize(
    "fields", [{"query_tile": 64}, {"dense_last": 3}, {"dense_last": 3, "top_k": 0}]
)
def test_decoded_tokens_have_no_tiles(fields: dict[str, int]) -> None:
    decode = SelectionPolicy(**{"window_size": 64, "top_k": 2, "query_tile": 1, **fields})
    with pytest.raises(ValueError, match=r"decode: expected query_tile 1 and dense_last 0 .*, got"):
        StepPolicy(SelectionPolicy(), decode)
