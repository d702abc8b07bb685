"""The sketch that pages keep: its format, and writing it on a CPU in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import write_kv
from sparsek_kernels.paged.reference import hadamard_reference, sketch_reference
from sparsek_kernels.paged.sketch import (
    VECTOR_SIZE,
    quantise,
    read_vectors,
    rotate,
    sketch_pages,
    split_summary,
    summary_bytes,
)

HEADS, PAGE = 2, 32


def empty_pages(pages: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """K, V and a sketch that nothing was written to."""
    k_cache = torch.full((pages, HEADS, PAGE, dim), float("nan"), dtype=dtype)
    summary = torch.full((pages, HEADS, summary_bytes(PAGE, dim)), 255, dtype=torch.uint8)
    return k_cache, k_cache.clone(), summary


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_the_sketch_equals_the_oracle(dim: int) -> None:
    """Unusual sizes: outlier channels, and keys far apart in size."""
    torch.manual_seed(dim)
    keys = torch.randn(3 * PAGE, HEADS, dim) * torch.rand(3 * PAGE, 1, 1).exp()
    keys[..., dim // 3] *= 30.0
    k_cache, v_cache, summary = empty_pages(3, dim, keys.dtype)
    write_kv(keys, keys, k_cache, v_cache, summary, torch.arange(len(keys)))
    found = read_vectors(summary, PAGE, dim).transpose(1, 2).flatten(0, 1).double()
    rotation = hadamard_reference(dim)
    torch.testing.assert_close(rotation @ rotation, torch.eye(dim, dtype=torch.float64))
    expected = sketch_reference(keys) @ rotation
    scale = split_summary(summary, PAGE, dim)[1].transpose(1, 2).flatten(0, 1).double()
    levels = (found - expected).abs() / scale[..., None]
    assert levels.max() < 1.001  # where a value lies between two levels
    assert (levels > 0.001).double().mean() < 1e-3
    means = keys.unflatten(0, (-1, VECTOR_SIZE)).mean(1)
    error = (found - rotate(means)).abs() / scale[..., None]
    assert error.max() < 0.51
    whole = torch.empty_like(summary)
    sketch_pages(k_cache, whole)
    used = split_summary(summary, PAGE, dim)
    for mine, theirs in zip(used, split_summary(whole, PAGE, dim), strict=True):
        assert torch.equal(mine, theirs)
    q = torch.randn(dim)
    torch.testing.assert_close(rotate(means) @ rotate(q), means @ q, atol=1e-3, rtol=1e-4)


@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(1, 70),
    dim=st.sampled_from([32, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_the_same_bytes_in_any_order(
    length: int, dim: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    torch.manual_seed(length)
    order = torch.randperm(5)
    position = torch.arange(length)
    slots = order[position // PAGE] * PAGE + position % PAGE
    keys = torch.randn(length, HEADS, dim).to(dtype)
    whole, pieces = empty_pages(5, dim, dtype), empty_pages(5, dim, dtype)
    write_kv(keys, keys, *whole, slots)
    begin = 0
    while begin < length:
        end = begin + data.draw(st.sampled_from([1, 2, 3, 9, length]))
        write_kv(keys[begin:end], keys[begin:end], *pieces, slots[begin:end])
        begin = end
    assert torch.equal(whole[2], pieces[2])
    untouched = torch.ones(5, dtype=torch.bool)
    untouched[slots // PAGE] = False
    assert (whole[2][untouched] == 255).all()


def test_values_at_the_ends_of_the_scale() -> None:
    levels, scale = quantise(torch.zeros(2, 8))
    assert (levels.shape, scale.tolist()) == ((2, 8), [0.0, 0.0])
    largest = torch.tensor([[3e38, -3e38, 1.0, 0.0], [1e-9, 0.0, 0.0, 0.0]])
    levels, scale = quantise(largest)
    assert levels.tolist()[0][:2] == [15, 0]
    assert scale.tolist() == [65504.0, 0.0]
    small, _ = quantise(torch.tensor([[7.5, -7.5, 0.25, -0.25]]))
    assert small.tolist() == [[15, 0, 8, 7]]


def test_bytes_of_a_page() -> None:
    assert summary_bytes(64, 128) == 64 * 16.5
    assert summary_bytes(16, 80) == 176  # 168, rounded up
    with pytest.raises(ValueError, match="page_size: expected a multiple of 16, got 24"):
        summary_bytes(24, 64)
    with pytest.raises(NotImplementedError, match="head_dim: selecting blocks needs a multiple"):
        summary_bytes(16, 66)
