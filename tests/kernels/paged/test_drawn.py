"""Blocks that prefill tiles draw: the rule, its weights, and the torch path's lists."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import Indexers, SelectionPolicy, StepPolicy, VerticalSlash
from sparsek_kernels.paged.index.reference import share_reference
from sparsek_kernels.paged.index.two_step import reference
from sparsek_kernels.paged.index.two_step.reference import draw_blocks_reference
from sparsek_kernels.paged.reference import logs_reference, select_blocks_reference
from sparsek_kernels.paged.sample import CELL_BITS, sample_blocks
from tests.kernels.paged.cache_cases import make_case, run

POLICY = SelectionPolicy(
    num_sink=16, window_size=20, top_k=12, sel_block_size=16, query_tile=32, drawn=True
)
ONE = 1 << 16


@st.composite
def scored(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Scores of blocks, and at most as many places."""
    count, spread = draw(st.integers(1, 60)), draw(st.sampled_from([0.0, 1.0, 5.0, 40.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    scores = (spread * torch.randn(count, generator=generator)).exp2()
    scores[torch.rand(count, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0.0
    return scores, draw(st.integers(1, count))


@settings(max_examples=200, deadline=None)
@given(case=scored(), start=st.integers(0, ONE - 1))
def test_torch_draws_what_the_oracle_draws(case: tuple[torch.Tensor, int], start: int) -> None:
    scores, places = case
    blocks = list(range(5, 5 + len(scores)))
    expected = draw_blocks_reference(scores.double(), blocks, places, start)
    there = torch.arange(80).sub(5).clamp(-1, len(scores)) % (len(scores) + 1) < len(scores)
    there &= torch.arange(80) >= 5
    padded = torch.full((80,), 7.0e9).masked_scatter(there, scores)
    steps = sample_blocks(padded, there, torch.tensor([places]), torch.tensor([start]))
    drawn = (steps >= 0).nonzero().flatten()
    assert (drawn + (steps[drawn] << CELL_BITS)).tolist() == expected


@settings(max_examples=50, deadline=None)
@given(case=scored())
def test_sums_are_right_in_the_mean_over_starts(case: tuple[torch.Tensor, int]) -> None:
    """Every block is drawn as often as its weight asks for, and the best ones always."""
    scores, places = case
    blocks, starts = list(range(len(scores))), range(0, ONE, 64)
    often, steps = torch.zeros(len(scores)), torch.full((len(scores),), -1)
    for start in starts:
        entries = draw_blocks_reference(scores.double(), blocks, places, start)
        assert len(entries) <= places
        mine = torch.tensor(entries, dtype=torch.long) % 2**CELL_BITS
        often[mine] += 1.0 / len(starts)
        steps[mine] = torch.tensor(entries, dtype=torch.long) >> CELL_BITS
    seen = steps >= 0
    share = share_reference(steps.clamp(min=0)).double() / ONE
    assert (often[seen] - share[seen]).abs().max() <= 1.01 / len(starts)
    assert (often[~seen] == 0.0).all()
    assert steps[scores.argmax()] == steps[seen].min()
    assert places < len(scores) or (steps == 0).all()


@pytest.mark.parametrize("length", [416, 900, 2000])
def test_places_and_kinds(length: int) -> None:
    """Candidates have all places but an eighth, which others have as far as there are any."""
    generator = torch.Generator().manual_seed(length)
    q = 2.0 * torch.randn(32, 4, 32, generator=generator)
    k = torch.randn(length, 2, 32, generator=generator)
    positions = list(range((length - 1) // 32 * 32, length))
    chosen = select_blocks_reference(q[: len(positions)], k, positions, POLICY, 32**-0.5)
    assert chosen is not None
    first, last = POLICY.candidate_range(positions[0])
    assert (POLICY.scored_blocks, POLICY.listed_blocks, POLICY.other_blocks) == (11, 44, 2)
    for entries in chosen:
        assert len(entries) == POLICY.scored_blocks
        filled = [entry for entry in entries if entry >= 0]
        assert entries == filled + [-1] * (len(entries) - len(filled))
        assert len(filled) >= POLICY.scored_blocks - 2
        blocks = [entry % 2**CELL_BITS for entry in filled]
        assert blocks == sorted(set(blocks))
        assert first <= blocks[0]
        assert blocks[-1] < last
        weights = sum(2.0 ** ((entry >> CELL_BITS) / 32) for entry in filled)
        assert weights > len(filled)


def test_a_rows_sums_are_dense_ones_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row, over all starts: of its weights, and of its weights that are not certain."""
    generator, length = torch.Generator().manual_seed(5), 900
    q = 2.0 * torch.randn(4, 4, 32, generator=generator)
    k = torch.randn(length, 2, 32, generator=generator)
    positions = list(range(length - 4, length))
    starts, weights = range(0, ONE, 512), torch.zeros(2, length, dtype=torch.float64)
    for start in starts:
        monkeypatch.setattr(reference, "start_reference", lambda _number, start=start: start)
        logs = logs_reference(q, k, positions, POLICY, 32**-0.5, select_blocks_reference)
        weights += logs[-1].exp() / len(starts)
    shares = torch.einsum("hgd,nhd->hgn", q[-1].unflatten(0, (2, 2)).double(), k.double())
    shares = shares.mul(32**-0.5).softmax(-1)
    found = (shares * weights[:, None]).sum(-1)
    assert (found - 1.0).abs().max() < 0.02
    first, last = (16 * block for block in POLICY.candidate_range(positions[0]))
    some = weights[:, first:last] != 1.0
    assert some.float().mean() > 0.5
    of_some = (shares[..., first:last] * some[:, None]).sum(-1)
    drawn = (shares * weights[:, None])[..., first:last].where(some[:, None], 0.0).sum(-1)
    assert of_some.min() > 0.1
    assert (drawn / of_some - 1.0).abs().max() < 0.04


def test_tiles_draw_by_turns_and_prompts_in_any_chunks() -> None:
    whole, length = make_case([1200], [1200], 0), 1200
    step = StepPolicy(POLICY, SelectionPolicy())
    expected = run(whole, step)
    batch = replace(
        whole.batch,
        seq_lens=torch.tensor([length], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 176], dtype=torch.int32),
        max_query_len=176,
        _derived={},
    )
    found = run(replace(whole, q=whole.q[-176:], batch=batch), step)
    torch.testing.assert_close(found, expected[-176:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query_tile": 1}, "drawn: expected False, or query_tile > 1 .* got query_tile=1"),
        ({"top_k": 2}, "drawn: expected .* top_k for 2 to 32767 blocks that compete, .* top_k=2"),
        ({"top_k": 0}, "drawn: expected .* top_k=0"),
        ({"top_k": 32768}, "drawn: expected .* top_k=32768"),
    ],
)
def test_policies_that_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(POLICY, **fields)


def test_single_tokens_of_the_same_settings_do_not_draw_blocks() -> None:
    assert not POLICY.per_token().drawn
    assert POLICY.by_records(32) == replace(POLICY, drawn=False).by_records(32)


def test_learned_lists_are_not_drawn() -> None:
    case = make_case([600], [200], 0)
    lists = VerticalSlash(torch.arange(20, dtype=torch.int32).expand(2, -1).contiguous())
    with pytest.raises(ValueError, match="policy: expected drawn=False with VerticalSlash"):
        run(case, StepPolicy(POLICY, SelectionPolicy()), indexers=Indexers(lists))
