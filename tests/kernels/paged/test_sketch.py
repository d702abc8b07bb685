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
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    dim=st.sampled_from([32, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_the_same_bytes_in_any_order(
    lengths: list[int], dim: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Requests whole, one by one; and in pieces, several a call, over what pages held before."""
    torch.manual_seed(sum(lengths))
    pages = 3 * len(lengths) + 2
    free = torch.randperm(pages)
    slots, keys, left = [], [], []
    for request, length in enumerate(lengths):
        position = torch.arange(length)
        slots.append(free[3 * request + position // PAGE] * PAGE + position % PAGE)
        keys.append(torch.randn(length, HEADS, dim).to(dtype))
        left.append(0)
    whole, pieces = empty_pages(pages, dim, dtype), empty_pages(pages, dim, dtype)
    for key, slot in zip(keys, slots, strict=True):
        write_kv(key, key, *whole, slot)
    if data.draw(st.booleans(), label="pages of a request that is gone"):
        old = 100.0 * torch.randn(pages * PAGE, HEADS, dim).to(dtype)
        write_kv(old, old, *pieces, torch.arange(pages * PAGE))
    while unfinished := [r for r, length in enumerate(lengths) if left[r] < length]:
        step = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        parts = []
        for request in step:
            end = left[request] + data.draw(st.sampled_from([1, 2, 3, 9, 70]))
            parts.append((request, slice(left[request], end)))
            left[request] = end
        key = torch.cat([keys[request][rows] for request, rows in parts])
        write_kv(key, key, *pieces, torch.cat([slots[request][rows] for request, rows in parts]))
    for slot in slots:
        held = (slot[::VECTOR_SIZE] // PAGE, slot[::VECTOR_SIZE] % PAGE // VECTOR_SIZE)
        for mine, theirs in zip(
            split_summary(pieces[2], PAGE, dim), split_summary(whole[2], PAGE, dim), strict=True
        ):
            assert torch.equal(mine[held[0], :, held[1]], theirs[held[0], :, held[1]])
    untouched = torch.ones(pages, dtype=torch.bool)
    untouched[torch.cat(slots) // PAGE] = False
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
