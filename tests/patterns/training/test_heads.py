"""A window for each head, by what a head loses."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.patterns.training import WindowErrors, fit_windows, window_sizes
from tests.kernels.block_sparse.reference import block_sparse_attention_reference

BLOCK, TOKENS = 16, 90


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, TOKENS, 4, 8), (2, TOKENS, 2, 8), (2, TOKENS, 2, 8))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q * 3.0, k, v


@pytest.mark.parametrize("sinks", [0, 1])
def test_errors_of_all_queries_are_those_of_the_oracle(sinks: int) -> None:
    q, k, v = _inputs()
    learner = WindowErrors([1, 2, 4], BLOCK, sinks=sinks, samples=BLOCK)
    learner.observe(q[:1], k[:1], v[:1])
    learner.observe(q[1:], k[1:], v[1:])
    everything = BlockSparsePattern.local((6, 6), BLOCK, window=6)

    def attend(pattern: BlockSparsePattern) -> torch.Tensor:
        return block_sparse_attention_reference(
            q, k, v, pattern.crow_indices, pattern.col_indices, BLOCK, causal=True
        )[0]

    whole = attend(everything)
    found = learner.shares()
    assert found.shape == (4, 3)
    for at, window in enumerate(learner.windows):
        near = attend(BlockSparsePattern.local((6, 6), BLOCK, window=window, sinks=sinks))
        expected = (near - whole).square().sum((0, 1, 3)) / whole.square().sum()
        torch.testing.assert_close(found[:, at].double(), expected, rtol=1e-4, atol=1e-7)


def test_few_samples_stand_for_all_queries() -> None:
    q, k, v = (x[:, : 5 * BLOCK] for x in _inputs())
    every = WindowErrors([1, 2], BLOCK, samples=BLOCK)
    few = [WindowErrors([1, 2], BLOCK, samples=4, seed=seed) for seed in range(20)]
    for learner in (every, *few):
        learner.observe(q, k, v)
    mean = torch.stack([x.shares() for x in few]).mean(0)
    torch.testing.assert_close(mean, every.shares(), rtol=0.15, atol=0.0)


def test_sizes_grow_to_all_blocks() -> None:
    assert window_sizes(TOKENS, BLOCK) == [1, 2, 3, 4, 6]
    assert window_sizes(8192, 64)[-4:] == [48, 64, 96, 128]
    assert window_sizes(5, BLOCK) == [1]


def test_the_heads_that_lose_most_get_the_longest_windows() -> None:
    sizes = [1, 2, 4, 6]
    cost = [
        int(BlockSparsePattern.local((6, 6), BLOCK, window=x, sinks=1).num_blocks) for x in sizes
    ]
    errors = {
        0: torch.tensor([[0.9, 0.9, 0.9, 0.0], [0.2, 0.0, 0.0, 0.0]]),
        3: torch.tensor([[0.1, 0.09, 0.08, 0.07], [0.5, 0.3, 0.0, 0.0]]),
    }
    best = {0: [6, 2], 3: [1, 4]}
    budget = cost[3] + cost[1] + cost[0] + cost[2] + 1  # 68: 17 blocks a head
    patterns = fit_windows(errors, sizes, TOKENS, BLOCK, sparsity=1.0 - budget / (4 * 21))
    for layer, windows in best.items():
        for mask, window in zip(patterns[layer].mask(), windows, strict=True):
            expected = BlockSparsePattern.local((6, 6), BLOCK, window=window, sinks=1)
            assert torch.equal(mask, expected.mask()[0]), (layer, window)


def test_a_small_gain_is_taken_where_a_large_one_does_not_fit() -> None:
    errors = {0: torch.tensor([[1.0, 0.9, 0.0]])}
    found = fit_windows(errors, [1, 2, 8], 160, 16, sinks=0, sparsity=0.6)[0]
    assert torch.equal(found.mask(), BlockSparsePattern.local((10, 10), 16, window=2).mask())


@settings(deadline=None, max_examples=40)
@given(
    losses=st.lists(
        st.lists(st.floats(0, 1, width=16), min_size=3, max_size=3), min_size=3, max_size=3
    ),
    sparsity=st.floats(0.1, 0.8),
)
def test_no_other_windows_lose_less(losses: list[list[float]], sparsity: float) -> None:
    sizes, layers = [1, 3, 6], {0: torch.tensor(losses[:2]), 5: torch.tensor(losses[2:])}
    patterns = fit_windows(layers, sizes, TOKENS, BLOCK, sparsity=sparsity)
    grids = [BlockSparsePattern.local((6, 6), BLOCK, window=x, sinks=1).mask()[0] for x in sizes]
    costs = [int(grid.sum()) for grid in grids]
    budget = 3 * max(round((1 - sparsity) * 21), costs[0])
    every = itertools.product(range(3), repeat=3)
    fitting = [taken for taken in every if sum(costs[x] for x in taken) <= budget]
    least = min(sum(row[x] for row, x in zip(losses, taken, strict=True)) for taken in fitting)
    masks = torch.cat([pattern.mask() for pattern in patterns.values()])
    taken = [next(i for i, grid in enumerate(grids) if torch.equal(grid, mask)) for mask in masks]
    assert int(masks.sum()) <= budget
    assert sum(row[x] for row, x in zip(losses, taken, strict=True)) == pytest.approx(
        least, abs=1e-5
    )


def test_a_budget_is_kept_and_the_smallest_window_stays() -> None:
    sizes = window_sizes(TOKENS, BLOCK)
    errors = {
        0: torch.rand(4, len(sizes), generator=torch.Generator().manual_seed(1)).sort(1, True)[0]
    }
    for sparsity in (0.2, 0.3, 0.4):
        (pattern,) = fit_windows(errors, sizes, TOKENS, BLOCK, sparsity=sparsity).values()
        assert pattern.num_blocks <= 4 * round((1 - sparsity) * 21)
    (least,) = fit_windows(errors, sizes, TOKENS, BLOCK, sparsity=0.99).values()
    assert (
        least.num_blocks
        == 4 * BlockSparsePattern.local((6, 6), BLOCK, window=1, sinks=1).num_blocks
    )
    with pytest.raises(ValueError, match="sparsity"):
        fit_windows(errors, sizes, TOKENS, BLOCK, sparsity=1.0)
    with pytest.raises(ValueError, match="windows"):
        WindowErrors([2, 1], BLOCK)


def test_autocast_does_not_reach_the_errors() -> None:
    q, k, v = (torch.randn(1, 64, 2, 16, generator=torch.Generator().manual_seed(0)) for _ in "qkv")
    plain, cast = WindowErrors([1, 2], 16), WindowErrors([1, 2], 16)
    plain.observe(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.observe(q, k, v)
    assert torch.equal(plain.shares(), cast.shares())
