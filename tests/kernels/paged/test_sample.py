"""The rule of a sample, and the check of lists that scores of other paths draw."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged.sample import (
    CELL_BITS,
    CELL_MASK,
    STEPS,
    WHOLE_BITS,
    draw,
    probabilities,
    sample_cells,
    start_of,
    weight_steps,
)
from sparsek_kernels.paged.sample_reference import (
    Choice,
    draw_by_scores,
    draw_reference,
    key_reference,
    list_error,
    start_reference,
    threshold_reference,
)

ONE = 1 << WHOLE_BITS


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys of far cells, how many there are of each, and fewer places."""
    segments, spread = draw(st.integers(1, 20)), draw(st.sampled_from([0, 1, 4, 12, 40]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    keys = draw(st.integers(0, 63)) + spread * torch.randn(segments, 32, generator=generator)
    keys = keys.round().clamp(0, 63).int()
    counts = torch.bincount(keys.flatten(), minlength=64)
    return keys, counts, draw(st.integers(1, keys.numel() - 1))


@settings(max_examples=200, deadline=None)
@given(case=cases(), start=st.integers(0, ONE - 1))
def test_lists_are_the_oracles(case: tuple[torch.Tensor, torch.Tensor, int], start: int) -> None:
    keys, _, places = case
    found = sample_cells(keys, places, start).tolist()
    threshold = threshold_reference(keys.flatten(), places)
    steps = (threshold - 8 * keys.flatten()).clamp(min=0)
    assert found == draw_reference(steps, start, places, 0)


@settings(max_examples=200, deadline=None)
@given(case=cases(), start=st.integers(0, ONE - 1))
def test_places_are_filled_and_weights_make_up_for_what_is_left_out(
    case: tuple[torch.Tensor, torch.Tensor, int], start: int
) -> None:
    keys, counts, places = case
    steps, sizes = weight_steps(counts, places), (torch.arange(64).double() / 4).exp2()
    drawn = int((counts * probabilities(steps)).sum()) / ONE
    rounding = counts.sum() / ONE
    assert places * 2 ** (-1 / STEPS) - rounding - 1e-6 * places <= drawn <= places
    total = float((counts * sizes).sum())
    assert (steps[(counts > 0) & (sizes * places >= total)] == 0).all()
    entries = sample_cells(keys, places, start)
    entries = entries[entries >= 0]
    assert abs(len(entries) - drawn) <= 1
    mine = keys.flatten()[(entries & ((1 << CELL_BITS) - 1)).long()].long()
    assert torch.equal(entries >> CELL_BITS, steps[mine])
    certain = (steps[keys.long()] == 0).flatten().nonzero().flatten()
    assert set(certain.tolist()) <= set(entries.tolist())
    weights = ((entries >> CELL_BITS).double() / STEPS).exp2()
    threshold = float((steps.double() / STEPS).exp2() @ sizes.where(steps > 0, 0.0)) / max(
        int((steps > 0).sum()), 1
    )  # of all keys that are not certain, weight times size is the same
    assert abs(float(weights @ sizes[mine]) - total) <= threshold * (1 + rounding) + 1e-9 * total


def test_each_cell_is_drawn_as_often_as_its_weight_says() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = (30 + 8 * torch.randn(6, 32, generator=generator)).round().clamp(0, 63).int()
    counts, starts = torch.bincount(keys.flatten(), minlength=64), 4096
    times = torch.zeros(keys.numel(), dtype=torch.long)
    for start in range(0, ONE, ONE // starts):
        entries = sample_cells(keys, 40, start)
        times[(entries[entries >= 0] & ((1 << CELL_BITS) - 1)).long()] += 1
    steps = weight_steps(counts, 40)[keys.flatten().long()]
    shares = probabilities(steps).double() / ONE
    assert 0.05 < (steps == 0).double().mean() < 0.5
    assert ((times / starts - shares).abs() <= 1 / starts).all()
    weights = (steps.double() / STEPS).exp2()
    assert ((shares * weights - 1).abs() <= weights / ONE).all()


@pytest.mark.parametrize("count", [10, 100, 1000])
def test_starts_of_neighbours_are_spread(count: int) -> None:
    """No gap between any of them is three times as wide as between even ones."""
    for first in (0, 4095, 1 << 20):
        starts = sorted(start_of(first + i) for i in range(count))
        gaps = [b - a for a, b in pairwise([*starts, starts[0] + ONE])]
        assert max(gaps) < 3 * ONE / count
    assert start_of(count) == start_reference(count)


def choice_of(seed: int, noise: float = 0.0) -> Choice:
    """1280 cells of which 200 are drawn, by scores that are wrong by up to ``noise``."""
    generator = torch.Generator().manual_seed(seed)
    scores = (2.5 * torch.randn(1, 1280, generator=generator)).double().exp()
    scores *= 4 / scores.sum()
    scores *= 1 + noise * (2 * torch.rand(1, 1280, generator=generator).double() - 1)
    return draw_by_scores(scores, start_of(seed), 200, 64, 4)


@pytest.mark.parametrize("noise", [1e-4, 0.02, 0.1])
@pytest.mark.parametrize("seed", range(6))
def test_lists_by_scores_that_are_a_little_off_are_explained(seed: int, noise: float) -> None:
    exact, other = choice_of(seed), choice_of(seed, noise).entries[0]
    assert not list_error(exact, 0, exact.entries[0], 0.0)
    assert not list_error(exact, 0, other, noise)
    assert other == exact.entries[0] or list_error(exact, 0, other, 0.0)


def test_lists_by_other_rules_are_not() -> None:
    """Nor is anything but the oracle's list where no error of scores is allowed."""
    for seed in range(6):
        choice = choice_of(seed)
        entries, other = choice.entries[0], start_of(seed + 1)
        steps = choice.steps[0]
        filled = [entry for entry in entries if entry >= 0]
        cells = {(entry & 0x1FFFFF) - 64: place for place, entry in enumerate(filled)}
        rare = next(place for cell, place in cells.items() if 40 < steps[cell] < 200)
        common = next(place for cell, place in cells.items() if steps[cell] == 0)
        spare = next(c for c in range(1280) if c not in cells)
        dropped = [entry for place, entry in enumerate(entries) if place != common]
        largest = sorted(choice.scores[0].argsort(descending=True)[:200].tolist())
        wrong = {
            "no weights": [entry if entry < 0 else entry & 0x1FFFFF for entry in entries],
            "the largest": [64 + cell for cell in largest],
            "another start": draw_reference(steps, other, 200, 64),
            "places": entries[:-1],
            "ascending": sorted(entries),
            "a hole": [-1, *entries[:-1]],
            "twice": [entries[0], *entries[:-1]],
            "a certain cell is dropped": [*dropped, -1],
            "out of range": [*filled[:-1], 64 + 1280, *entries[len(filled) :]],
            "another cell": [*entries[:common], 64 + spare, *entries[common + 1 :]],
        }
        for what, mine in wrong.items():
            assert list_error(choice, 0, mine, 0.0), what
            assert list_error(choice, 0, mine, 0.02), what
        mine = list(entries)
        mine[rare] += 1 << CELL_BITS
        assert list_error(choice, 0, mine, 0.0)
        mine[rare] += 9 << CELL_BITS
        assert list_error(choice, 0, mine, 0.02)


@given(data=st.data())
def test_samples_of_some_things_are_the_oracles(data: st.DataObject) -> None:
    """Several lists at once, of which some things do not compete; few of them are all taken."""
    count = data.draw(st.integers(1, 40))
    places = data.draw(st.integers(1, 12))
    seed, start = data.draw(st.integers(0, 99)), data.draw(st.integers(0, ONE - 1))
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, 64, (3, count), generator=generator)
    there = torch.rand(3, count, generator=generator) < data.draw(st.sampled_from([0.2, 0.7, 1.0]))
    found = draw(keys, there, places, torch.tensor([start, 0, ONE - 1]))
    for mine, row, some, begin in zip(found, keys, there, (start, 0, ONE - 1), strict=True):
        steps = torch.zeros_like(row)
        if int(some.sum()) > places:
            steps = (threshold_reference(row[some], places) - 8 * row).clamp(min=0)
        order = some.nonzero().flatten().tolist()
        assert mine.tolist() == draw_reference(steps, begin, places, 0, order)


def test_samples_of_tiles_are_right_in_the_mean() -> None:
    """Each thing counts once in the mean over tiles of 64 positions."""
    things, tiles = 60, 1 << 12
    keys = torch.randint(20, 36, (things,), generator=torch.Generator().manual_seed(3))
    starts = torch.tensor([start_of(64 * tile) for tile in range(tiles)])
    found = draw(keys.expand(tiles, -1), torch.ones(tiles, things, dtype=torch.bool), 8, starts)
    found = found[found >= 0]
    weights = ((found >> CELL_BITS).double() / STEPS).exp2()
    mean = torch.zeros(things).double().index_add_(0, found & CELL_MASK, weights) / tiles
    assert (mean - 1).abs().max() < 0.02


def test_keys_are_quarters_of_octaves_below_the_share_of_a_place() -> None:
    scores = torch.tensor([0.0, 1e-9, 0.9999, 1.0, 1.2499, 1.25, 2.0, 4.0]).double() / 16
    assert key_reference(scores, 64, 4).tolist() == [0, 0, 62, 63, 63, 63, 63, 63]
    assert key_reference(scores, 32, 4).tolist() == [0, 0, 58, 59, 59, 60, 63, 63]
