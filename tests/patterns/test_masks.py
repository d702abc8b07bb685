"""Predefined patterns, by hand and by what their papers say of them."""

from __future__ import annotations

import pytest
import torch

from sparsek_backend.patterns import (
    BlockSparsePattern,
    bigbird_pattern,
    dilated_pattern,
    longformer_pattern,
    random_pattern,
)

SHAPE = (6, 6)


def test_dilated_and_longformer_by_hand() -> None:
    dilated = dilated_pattern(SHAPE, 16, window=2, dilation=2)
    assert dilated.mask()[0, 3].int().tolist() == [0, 1, 0, 1, 0, 1]
    causal = dilated_pattern(SHAPE, 16, window=2, dilation=2, causal=True)
    assert torch.equal(causal.mask(), dilated.mask().tril())
    near = longformer_pattern(SHAPE, 16, window=2, global_blocks=1)
    assert near.mask()[0].int().tolist()[0] == [1] * 6
    assert near.mask()[0, 4].int().tolist() == [1, 0, 0, 1, 1, 1]
    whole = longformer_pattern(SHAPE, 16, window=2, global_blocks=1, causal=True)
    local = BlockSparsePattern.local(SHAPE, 16, window=2, sinks=1)
    assert torch.equal(whole.mask(), local.mask())
    last = longformer_pattern((2, 6), 16, window=2, global_blocks=0, causal=True)
    assert torch.equal(
        last.mask(), longformer_pattern(SHAPE, 16, window=2, global_blocks=0).mask()[:, 4:].tril(4)
    )


@pytest.mark.parametrize("causal", [True, False])
def test_bigbird_is_longformer_and_random_blocks(causal: bool) -> None:
    base = longformer_pattern((9, 9), 16, window=2, causal=causal).mask()[0]
    found = bigbird_pattern((9, 9), 16, random_blocks=2, seed=3, causal=causal).mask()[0]
    seen = torch.ones(9, 9).tril().bool() if causal else torch.ones(9, 9).bool()
    assert not (base & ~found).any()
    assert not (found & ~seen).any()
    free = (seen & ~base).sum(1)
    assert torch.equal((found & ~base).sum(1), free.clamp(max=2))
    again = bigbird_pattern((9, 9), 16, random_blocks=2, seed=3, causal=causal)
    other = bigbird_pattern((9, 9), 16, random_blocks=2, seed=4, causal=causal)
    assert torch.equal(again.mask()[0], found)
    assert not torch.equal(other.mask()[0], found)


@pytest.mark.parametrize("causal", [True, False])
def test_random_blocks_have_their_density_and_seed(causal: bool) -> None:
    pattern = random_pattern((20, 20), 32, density=0.3, seed=5, num_patterns=3, causal=causal)
    seen = 210 if causal else 400
    assert pattern.mask().sum((1, 2)).tolist() == [round(0.3 * seen)] * 3
    assert pattern.mask().diagonal(dim1=1, dim2=2).all()
    assert not causal or not pattern.mask().triu(1).any()
    again = random_pattern((20, 20), 32, density=0.3, seed=5, num_patterns=3, causal=causal)
    assert torch.equal(again.mask(), pattern.mask())
    assert not torch.equal(pattern.mask()[0], pattern.mask()[1])


def test_refuses() -> None:
    with pytest.raises(ValueError, match="density: expected a number above 0"):
        random_pattern(SHAPE, 16, density=0.0, seed=0)
    with pytest.raises(ValueError, match="dilation: expected an integer >= 1, got 0"):
        dilated_pattern(SHAPE, 16, window=1, dilation=0)
    with pytest.raises(ValueError, match="global_blocks: expected an integer >= 0"):
        longformer_pattern(SHAPE, 16, window=1, global_blocks=-1)
    with pytest.raises(TypeError, match="random_blocks: expected an int"):
        bigbird_pattern(SHAPE, 16, random_blocks=1.5)  # type: ignore[arg-type]
