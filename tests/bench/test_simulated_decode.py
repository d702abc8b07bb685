"""benchmarks/simulate: sketches, and what decoded tokens attend by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch

from benchmarks.simulate import decode
from benchmarks.simulate.decode import DecodeRule
from benchmarks.simulate.sketches import PAGE, SKETCHES, Pages, hadamard, quantise
from tests.bench.simulated import (
    DIM,
    GROUP,
    HEADS,
    Tensors,
    attending,
    close,
    dense_attention,
    draw,
    logits_of,
)


def _decoded(rule: DecodeRule, drawn: Tensors) -> tuple[torch.Tensor, float]:
    q, k, v = drawn
    prompt = k.shape[1] - q.shape[2]
    out, attended = decode.attend(rule, Pages(k[:, :prompt], v[:, :prompt]), q, k, v)
    return out, attended.item()


@pytest.mark.parametrize("scores", ["exact", "dense", *SKETCHES])
def test_a_budget_over_the_context_is_dense(scores: str) -> None:
    drawn = draw(5, 700)
    cell = max(SKETCHES[scores].keys if scores in SKETCHES else 4, 4)
    out, attended = _decoded(DecodeRule(scores, tokens=1024, cell=cell, window=128), drawn)
    torch.testing.assert_close(out, dense_attention(*drawn))
    assert attended == 698


def test_the_tail_of_exact_scores_is_the_mean_value_with_a_pages_weight() -> None:
    q, k, v = drawn = draw(1, 705)
    rule = DecodeRule("exact", tokens=0, window=128, value_bits=24)
    out, attended = _decoded(rule, drawn)
    weights = logits_of(q, k).exp()
    first, last = PAGE, 704 - 128  # of what stands in
    near = torch.cat([weights[..., :first], weights[..., last:]], -1)
    pages = weights[..., first:last].unflatten(-1, (-1, PAGE)).sum(-1)
    means = v[:, first:last].unflatten(1, (-1, PAGE)).mean(2)
    total = torch.einsum("hgrn,hnd->hgrd", near, torch.cat([v[:, :first], v[:, last:]], 1))
    total += torch.einsum("hgrn,hnd->hgrd", pages, means)
    close(out, total / weights.sum(-1, keepdim=True))
    assert attended == 64 + 128 + 1


def test_cells_are_chosen_by_the_sum_of_heads_and_the_rest_of_a_page_stands_in() -> None:
    q, k, v = drawn = draw(1, 705)
    out, attended = _decoded(DecodeRule("exact", tokens=32, window=128, value_bits=24), drawn)
    exact = logits_of(q, k)[:, :, 0]
    mass = exact.softmax(-1)[..., 64:576].unflatten(-1, (-1, 4)).sum((1, 3))
    for head in range(HEADS):
        chosen = torch.zeros(705, dtype=torch.bool)
        chosen[:64] = chosen[576:] = True
        for cell in mass[head].topk(8).indices:
            chosen[64 + 4 * cell : 68 + 4 * cell] = True
        weights = exact[head].softmax(-1)
        stands = v[head].clone()
        stands[64:576] = v[head, 64:576].unflatten(0, (-1, 64)).mean(1).repeat_interleave(64, 0)
        close(out[head, :, 0], weights @ torch.where(chosen[:, None], v[head], stands))
    assert attended == 64 + 129 + 32


@pytest.mark.parametrize("scores", ["p2dr", "exact"])
@pytest.mark.parametrize("level1", ["page", "cells", "p4x16dr"])
def test_level_1_that_keeps_every_page_changes_nothing(scores: str, level1: str) -> None:
    drawn = draw(3, 900)
    rule = DecodeRule(scores, tokens=64, window=128, level1=level1)
    whole, _ = _decoded(rule, drawn)
    torch.testing.assert_close(_decoded(replace(rule, pages=0.999), drawn)[0], whole)
    half = _decoded(replace(rule, pages=0.5), drawn)[0]
    assert not torch.allclose(half, whole)
    left_out = _decoded(replace(rule, pages=0.5, stand_in=False), drawn)[0]
    assert not torch.allclose(left_out, half)


def test_level_1_by_cells_attends_the_best_cells_of_the_best_pages() -> None:
    q, k, v = drawn = draw(1, 705)
    rule = DecodeRule("exact", tokens=32, window=128, tail=False, pages=0.25, level1="cells")
    _, attended = _decoded(replace(rule, tokens=256), drawn)
    assert attended == 64 + 129 + 128, "no more than two of eight pages have"
    exact = logits_of(q, k)[:, :, 0]
    mass = exact.softmax(-1)[..., 64:576].unflatten(-1, (-1, 64)).sum((1, 3))
    best = mass.topk(2).indices
    everything, _ = _decoded(replace(rule, tokens=512), drawn)
    for head in range(HEADS):
        ranges = [(0, 64), (576, 705), *((64 * page, 64 * page + 64) for page in 1 + best[head])]
        close(everything[head, :, 0], attending(exact[head], v[head], ranges))


def test_a_sample_is_right_in_the_mean_over_its_starts() -> None:
    mass = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)).pow(8)
    mass[:, ::7] = 0
    starts = (torch.arange(2000) + 0.5) / 2000
    kept, share = decode.sample(mass[:, None].expand(-1, 2000, -1), 64, starts.expand(2, -1))
    assert (kept.sum(-1) == 64).all()
    assert not kept[:, :, ::7].any()
    assert kept[share == 1].all()
    assert 10 < (share[:, 0] == 1).sum() < 128  # the largest are certain, not all
    mean = (kept / share.clamp(min=1e-30)).mean(1)
    some = (mass > 0) & (share[:, 0] > 0.01)  # of which enough starts keep a cell
    torch.testing.assert_close(mean[some], torch.ones(int(some.sum())), atol=0.06, rtol=0)


def test_a_sample_counts_as_all_that_it_stands_for() -> None:
    """With equal masses far keys weigh as much as they are many, however few are attended."""
    _, k, v = draw(400, 700)
    far = (torch.arange(700) >= 64) & (torch.arange(700) < 576)
    v[..., 0] = far.float()
    drawn = (torch.zeros(HEADS, GROUP, 4, DIM), k, v)
    rule = DecodeRule("exact", tokens=128, cell=2, window=64, sampled=1.0)
    out, attended = _decoded(rule, drawn)
    assert attended == 128 + 64 + (697 + 698 + 699 + 700) / 4 - 576
    torch.testing.assert_close(out[..., 0], _decoded(DecodeRule("dense"), drawn)[0][..., 0])
    half, _ = _decoded(replace(rule, sampled=0.5), drawn)
    torch.testing.assert_close(half[..., 0], out[..., 0], atol=0.01, rtol=0)  # tails have 8 bits
    chosen, _ = _decoded(replace(rule, sampled=0.0, tail=False), drawn)
    assert (chosen[..., 0] < 0.6 * out[..., 0]).all()


def test_spread_within_vectors_ranks_cells_closer_to_their_sums() -> None:
    q, k, v = draw(16, 2048)
    scale, pages = DIM**-0.5, Pages(k, v)
    exact = logits_of(q, k).unflatten(-1, (-1, 32, 2)).logsumexp(-1)
    means = pages.vectors("m2").logits(q) * scale + math.log(2)
    by_page = means + pages.gain(q, scale, keys=2)
    by_vector = means + pages.gain(q, scale, keys=2, by_vector=True)
    errors = [(made - exact).pow(2).mean() for made in (by_vector, by_page, means)]
    assert errors == sorted(errors)
    torch.testing.assert_close(pages.shares(2).mean(), torch.tensor(1.0), rtol=0.05, atol=0)


@pytest.mark.parametrize("shares", ["context", "pages"])
def test_masses_are_shares_of_the_context_or_of_all_cells(
    shares: Literal["context", "pages"],
) -> None:
    q, k, v = drawn = draw(1, 705)
    rule = DecodeRule("p4", tokens=64, window=64, tail=False, shares=shares)
    out, _ = _decoded(rule, drawn)
    vectors = Pages(k[:, :704], v[:, :704]).vectors("p4").logits(q)[:, :, 0]
    cells = (vectors / math.sqrt(DIM) + math.log(4)).flatten(-2)  # [H, G, 176]
    exact = logits_of(q, k)[:, :, 0]
    over = {
        "pages": cells,
        "context": torch.cat([exact[..., :64], cells[..., 16:160], exact[..., 640:]], -1),
    }[shares]
    mass = (cells - over.logsumexp(-1, keepdim=True)).exp().sum(1)[:, 16:160]
    for head in range(HEADS):
        best = 16 + mass[head].topk(16).indices
        ranges = [(0, 64), (640, 705), *((4 * cell, 4 * cell + 4) for cell in best)]
        close(out[head, :, 0], attending(exact[head], v[head], ranges))


@pytest.mark.parametrize("counts", ["rank", "sum", "tail"])
def test_variance_counts_in_the_tail_only_where_it_is_asked_for(
    counts: Literal["rank", "sum", "tail"],
) -> None:
    """With nothing chosen the ranking does not matter."""
    drawn = draw(1, 705)
    rule = DecodeRule("p2dr", tokens=0, window=128)
    plain, _ = _decoded(rule, drawn)
    out, _ = _decoded(replace(rule, variance="page", variance_counts=counts), drawn)
    assert torch.equal(out, plain) == (counts != "tail")


def test_sketches_lose_less_with_more_bits_and_less_about_the_pages_mean() -> None:
    q, k, v = draw(64, 4096)
    pages = Pages(k, v)
    exact = logits_of(q, k).unflatten(-1, (-1, PAGE))

    def error(name: str) -> float:
        made = pages.vectors(name).logits(q) / math.sqrt(DIM)
        apart = made.repeat_interleave(SKETCHES[name].keys, -1) - exact
        return apart.pow(2).mean().sqrt().item()

    for order in (
        ("m2", "p4x2dr", "p3x2dr", "p2dr", "i4"),
        ("m2", "p4x2", "p2x2r", "i4"),
        ("m4", "p4", "i4"),
    ):
        errors = [error(name) for name in order]
        assert errors == sorted(errors), dict(zip(order, errors, strict=True))


def test_a_vector_scaled_by_its_size_has_its_own_product() -> None:
    x = torch.randn(2, 3, 32, DIM)
    y = quantise(x, SKETCHES["p2x2r"])
    torch.testing.assert_close((x * y).sum(-1), (x * x).sum(-1), rtol=1e-3, atol=0)


def test_a_hadamard_matrix_turns_and_needs_a_power_of_two() -> None:
    torch.testing.assert_close(hadamard(DIM) @ hadamard(DIM).T, torch.eye(DIM))
    with pytest.raises(ValueError, match="channels: expected a power of two, got 80"):
        hadamard(80)


def test_variance_brings_a_pages_logit_closer_to_its_sum() -> None:
    q, k, v = draw(16, 2048)
    exact = logits_of(q, k).unflatten(-1, (-1, PAGE)).logsumexp(-1)
    pages = Pages(k, v)
    with_it = pages.logits(q, DIM**-0.5)
    without = with_it - pages.gain(q, DIM**-0.5)[..., 0]
    assert (without < exact + 0.1).all(), "a mean understates"
    assert (with_it - exact).abs().mean() < 0.5 * (without - exact).abs().mean()


def test_bytes_of_a_record() -> None:
    assert SKETCHES["i4"].bytes_per_key(128) == 16
    assert SKETCHES["p4"].bytes_per_key(128) == 16.5 + 4
    assert SKETCHES["p2dr"].bytes_per_key(128) == 16 + 1 + 4 + 33 / 64
    assert DecodeRule("dense").bytes_read(1000, 128) == 512_000
    window = DecodeRule("none", tokens=0, window=1024, tail=False)
    assert window.bytes_read(10_000, 128) == 512 * 1088
    rule = DecodeRule("p2dr", tokens=1024)
    less = rule.bytes_read(100_000, 128) - replace(rule, pages=0.5).bytes_read(100_000, 128)
    assert less == pytest.approx((100_000 - 576) * ((17 + 33 / 64) / 2 - 1), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DecodeRule("p9"), "scores: expected a sketch"),
        (lambda: DecodeRule("p4", window=100), "window: expected a multiple of 64, got 100"),
        (lambda: DecodeRule("p4", cell=2), "cell: expected whole vectors"),
        (lambda: DecodeRule("p4", level1="p9"), "level1: expected a sketch"),
        (lambda: DecodeRule("p4", shares="pages", pages=0.5), "shares: expected context"),
        (lambda: _decoded(DecodeRule("p4", window=0), draw(200, 700)), "reaches the prompt"),
    ],
)
def test_what_has_no_meaning_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
