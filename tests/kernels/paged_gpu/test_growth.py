"""Deep tiles that choose more blocks: the rule, and every path against the oracle."""

from __future__ import annotations

from dataclasses import replace

import oracle_check
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem

from sparsek_kernels.paged import paged_attention
from sparsek_kernels.paged.plan import plan_step
from sparsek_kernels.paged.policy import Growth, SelectionPolicy, StepPolicy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POLICY = SelectionPolicy(num_sink=16, window_size=32, top_k=4, sel_block_size=16, query_tile=16)
GROWING = replace(POLICY, growth=Growth(start=128, every=4, end=512))


def test_places_by_hand() -> None:
    few = POLICY.shallow_blocks
    assert GROWING.places(100) == GROWING.places(191) == few
    assert [GROWING.places(x) - few for x in (192, 255, 256, 320, 511, 512, 600, 1 << 20)] == [
        1, 1, 2, 3, 5, 6, 6, 6,
    ]  # fmt: skip
    assert GROWING.scored_blocks == few + 6
    assert POLICY.places(1 << 20) == POLICY.scored_blocks == few


@given(st.integers(0, 2000))
def test_a_tiles_rule_is_that_of_its_places(position: int) -> None:
    mine = GROWING.at(position)
    assert mine.growth is None
    assert mine.scored_blocks == GROWING.places(position)
    assert mine.sees_all(position) >= GROWING.sees_all(position)
    assert mine.attended_tokens(position) == GROWING.attended_tokens(position)
    assert GROWING.attended_tokens(position) == int(
        GROWING.attended_tokens(torch.tensor([position]))[0]
    )


@pytest.mark.parametrize("length", [150, 191, 192, 193, 208, 600])
def test_sequences_without_a_deep_tile_have_shorter_lists(length: int) -> None:
    """They cost what they cost without growth, and are attended as they are with it."""
    grows = any(GROWING.places(x) > POLICY.shallow_blocks for x in range(length))
    assert GROWING.within(length) == (GROWING if grows else POLICY)
    problem = make_problem([(min(length, 90), length)], page_size=16, device=DEVICE)
    (segment,) = plan_step(problem.batch, StepPolicy(GROWING, POLICY.by_records(64)))
    assert segment.policy.scored_blocks == (GROWING if grows else POLICY).scored_blocks


def test_growth_that_never_comes_is_none() -> None:
    never = replace(POLICY, growth=Growth(start=128, every=4, end=190))
    assert never.longest_shallow is None
    assert never.within(1 << 20) == POLICY


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"growth": Growth(start=8, every=0, end=9)}, "growth"),
        ({"growth": Growth(start=10, every=1, end=9)}, "growth"),
        ({"growth": Growth(), "query_tile": 1}, "growth"),
        ({"growth": Growth(), "top_k": 0}, "growth"),
    ],
)
def test_no_growth_without_meaning(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(POLICY, **changes)


def test_single_tokens_do_not_grow() -> None:
    assert GROWING.by_records(64).growth is None
    assert GROWING.per_token().growth is None


@pytest.mark.parametrize("lengths", [[(300, 700)], [(64, 150), (90, 520), (33, 1000)]])
def test_attention_of_deep_tiles_against_the_oracle(lengths: list[tuple[int, int]]) -> None:
    oracle_check.check(make_problem(lengths, page_size=16, device=DEVICE), GROWING)


def test_deep_tiles_attend_as_with_their_own_rule() -> None:
    """A tile's output is that of a policy under which all tiles have as many places."""
    problem = make_problem([(16, 656)], page_size=16, device=DEVICE)
    oracle_check.fill(problem)
    mine = GROWING.at(640)
    assert mine.scored_blocks == POLICY.scored_blocks + 6
    found, same, few = (
        oracle_check.attend(problem, oracle_check.without_records(rule))
        for rule in (GROWING, mine, POLICY)
    )
    torch.testing.assert_close(found, same, rtol=0, atol=0)
    assert not torch.allclose(found, few, atol=1e-3)


@pytest.mark.skipif(DEVICE == "cuda", reason="the path of CPUs")
def test_without_kernels() -> None:
    problem = make_problem([(64, 150), (90, 520), (33, 1000)], page_size=16)
    oracle_check.fill(problem)
    rule = oracle_check.without_records(GROWING)
    caches = problem.k_cache, problem.v_cache
    found = paged_attention(problem.q, *caches, problem.batch, rule)
    torch.testing.assert_close(
        found.double(), oracle_check.expected(problem, rule), atol=1e-5, rtol=0
    )
