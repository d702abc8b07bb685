"""The sketch that pages keep: its format, and writing it on a CPU in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import summary_bytes, write_kv
from sparsek_kernels.paged.index.key_means.sketch import (
    VECTOR_SIZE,
    checksums,
    code_scales,
    quantise,
    read_vectors,
    rotate,
    sketch_pages,
    view_rows,
)
from sparsek_kernels.paged.reference import hadamard_reference, sketch_reference

HEADS, PAGE = 2, 32


def empty_pages(pages: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """K, V and a sketch that nothing was written to."""
    k_cache = torch.full((pages, HEADS, PAGE, dim), float("nan"), dtype=dtype)
    summary = torch.full((pages, HEADS, summary_bytes(PAGE, dim)), 255, dtype=torch.uint8)
    return k_cache, k_cache.clone(), summary


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 192, 256])
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
    rows = view_rows(summary, PAGE, dim)
    scale = code_scales(checksums(rows)).transpose(1, 2).flatten(0, 1).double()
    levels = (found - expected).abs() / scale[..., None]
    assert levels.max() < 2.001  # where a value lies between two levels, or two are as near to that
    assert (levels > 0.001).double().mean() < 1e-3
    means = keys.unflatten(0, (-1, VECTOR_SIZE)).mean(1)
    error = (found - rotate(means)).abs() / scale[..., None]
    inside = rotate(means).abs() / scale[..., None] < 7.5
    assert error[inside].max() < 1.01
    assert ((error > 0.51) & inside).sum(-1).max() <= 8
    whole = torch.empty_like(summary)
    sketch_pages(k_cache, whole)
    assert torch.equal(rows, view_rows(whole, PAGE, dim))
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
        mine, theirs = (view_rows(summary, PAGE, dim) for summary in (pieces[2], whole[2]))
        assert torch.equal(mine[held[0], :, held[1]], theirs[held[0], :, held[1]])
    untouched = torch.ones(pages, dtype=torch.bool)
    untouched[torch.cat(slots) // PAGE] = False
    assert (whole[2][untouched] == 255).all()


def levels_and_scale(vector: list[float]) -> tuple[list[int], float]:
    row = quantise(torch.tensor(vector))
    return [*(row & 15).tolist(), *(row >> 4).tolist()], float(code_scales(checksums(row)))


def test_values_at_the_ends_of_the_scale() -> None:
    levels, scale = levels_and_scale([3e38, -3e38, 1.0, 0.0, -0.1, 0.0, 0.0, 1.0])
    assert scale == 61440.0
    assert {*levels[:2]} <= {0, 1, 14, 15}
    for nothing in ([0.0] * 8, [1e-9] + [0.0] * 7):
        levels, scale = levels_and_scale(nothing)
        assert scale == 2.0**-16
        assert {*levels} <= {7, 8}
    assert levels_and_scale([8.0, -8.0, 8.0, -8.0] * 2)[1] == 1.0


@pytest.mark.parametrize(("dim", "most"), [(64, 1.03), (128, 0.95), (256, 0.92)])
def test_a_scale_that_takes_no_room_costs_no_accuracy(dim: int, most: float) -> None:
    """Squared error beside nearest levels, 7.5 of which are the largest channel's, exactly."""
    torch.manual_seed(dim)
    vectors = torch.randn(4000, dim)
    step = vectors.abs().amax(-1, keepdim=True) / 7.5
    nearest = ((vectors / step).floor().clamp(-8, 7) + 0.5) * step
    rows = quantise(vectors)
    found = torch.cat([rows & 15, rows >> 4], -1) - 7.5
    found *= code_scales(checksums(rows))[:, None]
    assert (found - vectors).square().sum() <= most * (nearest - vectors).square().sum()


def test_bytes_of_a_page() -> None:
    assert summary_bytes(64, 128) == 64 * 16
    assert summary_bytes(16, 40) == 80
    assert summary_bytes(16, 24) == 48
    with pytest.raises(ValueError, match="page_size: expected a multiple of 16, got 24"):
        summary_bytes(24, 64)
    for dim in (68, 520):
        with pytest.raises(NotImplementedError, match="head_dim: selecting blocks needs a mult"):
            summary_bytes(16, dim)
