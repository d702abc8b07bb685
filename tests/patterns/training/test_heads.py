"""Heads that attend everything, chosen by what they lose with a window."""

from __future__ import annotations

import pytest
import torch

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.patterns.training import WindowErrors, whole_heads
from sparsek_kernels.block_sparse.reference import block_sparse_attention_reference

BLOCK, TOKENS = 16, 90


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, TOKENS, 4, 8), (2, TOKENS, 2, 8), (2, TOKENS, 2, 8))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q * 3.0, k, v


@pytest.mark.parametrize("sinks", [0, 1])
def test_errors_of_all_queries_are_those_of_the_oracle(sinks: int) -> None:
    q, k, v = _inputs()
    learner = WindowErrors([1, 2], BLOCK, sinks=sinks, samples=BLOCK)
    learner.observe(q[:1], k[:1], v[:1])
    learner.observe(q[1:], k[1:], v[1:])
    everything = BlockSparsePattern.local((6, 6), BLOCK, window=6)

    def attend(pattern: BlockSparsePattern) -> torch.Tensor:
        return block_sparse_attention_reference(
            q, k, v, pattern.crow_indices, pattern.col_indices, BLOCK, causal=True
        )[0]

    whole = attend(everything)
    for window in (1, 2):
        near = attend(BlockSparsePattern.local((6, 6), BLOCK, window=window, sinks=sinks))
        expected = (near - whole).square().sum((0, 1, 3)) / whole.square().sum()
        torch.testing.assert_close(learner.shares(window).double(), expected, rtol=1e-4, atol=1e-7)


def test_few_samples_look_at_every_block() -> None:
    q, k, v = _inputs()
    few, all_queries = (WindowErrors([1], BLOCK, samples=n) for n in (4, BLOCK))
    for learner in (few, all_queries):
        learner.observe(q, k, v)
    torch.testing.assert_close(few.shares(1), all_queries.shares(1), rtol=0.35, atol=0.0)


def test_the_heads_that_lose_most_attend_everything() -> None:
    errors = {0: torch.tensor([0.1, 0.4, 0.0, 0.2]), 3: torch.tensor([0.3, 0.0, 0.0, 0.1])}
    near = BlockSparsePattern.local((6, 6), BLOCK, window=2, sinks=1).mask()[0]
    everything = torch.ones(6, 6, dtype=torch.bool).tril()
    room = (2 * everything.sum() + 6 * near.sum()).item() / (8 * everything.sum().item())
    patterns = whole_heads(errors, TOKENS, BLOCK, window=2, sparsity=1.0 - room)
    whole = {layer: [torch.equal(x, everything) for x in p.mask()] for layer, p in patterns.items()}
    assert whole == {0: [False, True, False, False], 3: [True, False, False, False]}
    assert torch.equal(patterns[3].mask()[2], near)
    nothing = whole_heads(errors, TOKENS, BLOCK, window=2, sparsity=0.99)
    assert all(torch.equal(x, near) for p in nothing.values() for x in p.mask())
    with pytest.raises(ValueError, match="sparsity"):
        whole_heads(errors, TOKENS, BLOCK, window=2, sparsity=1.0)
