"""benchmarks/simulate: sketches, what is attended, and a run on a tiny model."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.simulate import blocks, decode, prompts, results
from benchmarks.simulate.__main__ import main
from benchmarks.simulate.cost import cost
from benchmarks.simulate.decode import DecodeRule
from benchmarks.simulate.model import Model
from benchmarks.simulate.prompts import PromptRule
from benchmarks.simulate.sketches import PAGE, SKETCHES, Pages, hadamard, quantise
from benchmarks.simulate.variants import SETS, Variant

ROOT = Path(__file__).resolve().parents[2]
HEADS, GROUP, DIM = 2, 3, 32
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _draw(rows: int, count: int, seed: int = 0) -> Tensors:
    """Queries of the last rows, keys with large common channels, values."""
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS, GROUP, rows, DIM, generator=make) * 1.5
    spread = torch.rand(DIM // 2, generator=make).mul(4).sub(2).exp().repeat(2)
    k = torch.randn(HEADS, count, DIM, generator=make) * spread / spread.mean()
    k += 8 * torch.randn(HEADS, 1, DIM, generator=make)
    return q, k, torch.randn(HEADS, count, DIM, generator=make)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    count, rows = k.shape[1], q.shape[2]
    seen = torch.arange(count) <= torch.arange(count - rows, count)[:, None]
    keys, values = (x[:, None].expand(-1, GROUP, -1, -1) for x in (k, v))
    return scaled_dot_product_attention(q, keys, values, attn_mask=seen)


def _logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("hgrd,hnd->hgrn", q, k) / math.sqrt(DIM)


def _decoded(rule: DecodeRule, drawn: Tensors) -> tuple[torch.Tensor, float]:
    q, k, v = drawn
    prompt = k.shape[1] - q.shape[2]
    out, attended = decode.attend(rule, Pages(k[:, :prompt], v[:, :prompt]), q, k, v)
    return out, attended.item()


@pytest.mark.parametrize("scores", ["exact", "dense", *SKETCHES])
def test_a_budget_over_the_context_is_dense(scores: str) -> None:
    drawn = _draw(5, 700)
    cell = 16 if "16" in scores else 4
    out, attended = _decoded(DecodeRule(scores, tokens=1024, cell=cell, window=128), drawn)
    torch.testing.assert_close(out, _dense(*drawn))
    assert attended == 698


def test_the_tail_of_exact_scores_is_the_mean_value_with_a_pages_weight() -> None:
    q, k, v = drawn = _draw(1, 705)
    rule = DecodeRule("exact", tokens=0, window=128, value_bits=24)
    out, attended = _decoded(rule, drawn)
    weights = _logits(q, k).exp()
    first, last = PAGE, 704 - 128  # of what stands in
    near = torch.cat([weights[..., :first], weights[..., last:]], -1)
    pages = weights[..., first:last].unflatten(-1, (-1, PAGE)).sum(-1)
    means = v[:, first:last].unflatten(1, (-1, PAGE)).mean(2)
    total = torch.einsum("hgrn,hnd->hgrd", near, torch.cat([v[:, :first], v[:, last:]], 1))
    total += torch.einsum("hgrn,hnd->hgrd", pages, means)
    torch.testing.assert_close(out, total / weights.sum(-1, keepdim=True), rtol=1e-3, atol=1e-4)
    assert attended == 64 + 128 + 1


def test_cells_are_chosen_by_the_sum_of_heads_and_the_rest_of_a_page_stands_in() -> None:
    q, k, v = drawn = _draw(1, 705)
    out, attended = _decoded(DecodeRule("exact", tokens=32, window=128, value_bits=24), drawn)
    logits = _logits(q, k)[:, :, 0]
    mass = logits.softmax(-1)[..., 64:576].unflatten(-1, (-1, 4)).sum((1, 3))
    for head in range(HEADS):
        chosen = torch.zeros(705, dtype=torch.bool)
        chosen[:64] = chosen[576:] = True
        for cell in mass[head].topk(8).indices:
            chosen[64 + 4 * cell : 68 + 4 * cell] = True
        weights = logits[head].softmax(-1)
        stands = v[head].clone()
        stands[64:576] = v[head, 64:576].unflatten(0, (-1, 64)).mean(1).repeat_interleave(64, 0)
        expected = weights @ torch.where(chosen[:, None], v[head], stands)
        torch.testing.assert_close(out[head, :, 0], expected, rtol=1e-3, atol=1e-4)
    assert attended == 64 + 129 + 32


@pytest.mark.parametrize("scores", ["p2dr", "exact"])
@pytest.mark.parametrize("level1", ["page", "cells", "p4x16dr"])
def test_level_1_that_keeps_every_page_changes_nothing(scores: str, level1: str) -> None:
    drawn = _draw(3, 900)
    rule = DecodeRule(scores, tokens=64, window=128, level1=level1)
    whole, _ = _decoded(rule, drawn)
    torch.testing.assert_close(_decoded(replace(rule, pages=0.999), drawn)[0], whole)
    half = _decoded(replace(rule, pages=0.5), drawn)[0]
    assert not torch.allclose(half, whole)
    left_out = _decoded(replace(rule, pages=0.5, stand_in=False), drawn)[0]
    assert not torch.allclose(left_out, half)


def test_level_1_by_cells_attends_the_best_cells_of_the_best_pages() -> None:
    q, k, _ = drawn = _draw(1, 705)
    rule = DecodeRule("exact", tokens=32, window=128, tail=False, pages=0.25, level1="cells")
    _, attended = _decoded(replace(rule, tokens=256), drawn)
    assert attended == 64 + 129 + 128, "no more than two of eight pages have"
    mass = _logits(q, k)[:, :, 0].softmax(-1)[..., 64:576].unflatten(-1, (-1, 64)).sum((1, 3))
    best = mass.topk(2).indices
    everything, _ = _decoded(replace(rule, tokens=512), drawn)
    for head in range(HEADS):
        keep = torch.zeros(705, dtype=torch.bool)
        keep[:64] = keep[576:] = True
        for page in 1 + best[head]:
            keep[64 * page : 64 * page + 64] = True
        weights = _logits(q, k)[head, :, 0].masked_fill(~keep, -math.inf).softmax(-1)
        torch.testing.assert_close(
            everything[head, :, 0], weights @ drawn[2][head], rtol=1e-3, atol=1e-4
        )


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
    _, k, v = _draw(400, 700)
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
    q, k, v = _draw(16, 2048)
    scale, pages = DIM**-0.5, Pages(k, v)
    exact = _logits(q, k).unflatten(-1, (-1, 32, 2)).logsumexp(-1)
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
    q, k, v = drawn = _draw(1, 705)
    rule = DecodeRule("p4", tokens=64, window=64, tail=False, shares=shares)
    out, _ = _decoded(rule, drawn)
    vectors = Pages(k[:, :704], v[:, :704]).vectors("p4").logits(q)[:, :, 0]
    cells = (vectors / math.sqrt(DIM) + math.log(4)).flatten(-2)  # [H, G, 176]
    exact = _logits(q, k)[:, :, 0]
    over = {
        "pages": cells,
        "context": torch.cat([exact[..., :64], cells[..., 16:160], exact[..., 640:]], -1),
    }[shares]
    mass = (cells - over.logsumexp(-1, keepdim=True)).exp().sum(1)[:, 16:160]
    for head in range(HEADS):
        keep = torch.zeros(705, dtype=torch.bool)
        keep[:64] = keep[640:] = True
        for cell in 16 + mass[head].topk(16).indices:
            keep[4 * cell : 4 * cell + 4] = True
        weights = exact[head].masked_fill(~keep, -math.inf).softmax(-1)
        torch.testing.assert_close(out[head, :, 0], weights @ v[head], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("counts", ["rank", "sum", "tail"])
def test_variance_counts_in_the_tail_only_where_it_is_asked_for(
    counts: Literal["rank", "sum", "tail"],
) -> None:
    """With nothing chosen the ranking does not matter."""
    drawn = _draw(1, 705)
    rule = DecodeRule("p2dr", tokens=0, window=128)
    plain, _ = _decoded(rule, drawn)
    out, _ = _decoded(replace(rule, variance="page", variance_counts=counts), drawn)
    assert torch.equal(out, plain) == (counts != "tail")


def test_sketches_lose_less_with_more_bits_and_less_about_the_pages_mean() -> None:
    q, k, v = _draw(64, 4096)
    pages = Pages(k, v)
    exact = _logits(q, k).unflatten(-1, (-1, PAGE))

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
    q, k, v = _draw(16, 2048)
    exact = _logits(q, k).unflatten(-1, (-1, PAGE)).logsumexp(-1)
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


PROMPT = PromptRule("m16", blocks=3, tile=32, candidates=6, window=64)


@pytest.mark.parametrize("rule", [PROMPT, replace(PROMPT, scores="p2dr", tile=64), PromptRule()])
def test_a_prompt_with_enough_blocks_is_dense(rule: PromptRule) -> None:
    drawn = _draw(1100, 1100)
    rule = replace(rule, blocks=20, candidates=20)
    out, attended = prompts.attend(rule, *drawn)
    torch.testing.assert_close(out, _dense(*drawn), rtol=1e-3, atol=1e-4)
    assert attended.item() == pytest.approx(1101 / 2)


@pytest.mark.parametrize("scores", ["all", "m16", "m4", "p2dr", "page"])
def test_a_prompts_tiles_attend_the_blocks_of_their_largest_masses(scores: str) -> None:
    """With all blocks as candidates and all rows ranking, every source finds the same."""
    q, k, v = _draw(1100, 1100)
    rule = replace(PROMPT, scores=scores, candidates=20, rank_rows=32)
    out, attended = prompts.attend(rule, q, k, v)
    start = 1024 - 32  # a tile whose window begins in block 14
    rows = torch.arange(start, start + 32)
    logits = _logits(q[:, :, rows], k).masked_fill(torch.arange(1100) > rows[:, None], -math.inf)
    mass = logits.softmax(-1)[..., : 17 * 64].unflatten(-1, (-1, 64)).sum(-1).sum(1).amax(1)
    for head in range(HEADS):
        keep = torch.zeros(1100, dtype=torch.bool)
        for block in (0, 14, 15, *(1 + mass[head, 1:14].topk(3).indices)):
            keep[64 * block : 64 * block + 64] = True
        weights = logits[head].masked_fill(~keep, -math.inf).softmax(-1)
        torch.testing.assert_close(out[head][:, rows], weights @ v[head], rtol=1e-3, atol=1e-4)
    assert attended.item() < 1101 / 2


def test_a_mass_too_small_is_left_out() -> None:
    drawn = _draw(1100, 1100)
    _, all_of_it = prompts.attend(PROMPT, *drawn)
    _, less = prompts.attend(replace(PROMPT, min_mass=0.4), *drawn)
    _, none = prompts.attend(replace(PROMPT, min_mass=1.0), *drawn)
    assert none < less < all_of_it


def test_a_budget_grows_with_depth() -> None:
    drawn = _draw(2200, 2200)
    shares = []
    for growth in (-1.0, 0.0, 1.0):
        rule = replace(PROMPT, blocks=1, growth=growth)
        shares.append(prompts.attend(rule, *drawn)[1].item())
    assert shares[2] < shares[1] < shares[0]
    q, k, v = drawn
    rule = replace(PROMPT, blocks=16384 // 512, growth=1.0, rank_rows=32)  # a block each 512 keys
    _, attended = prompts.attend(rule, q, k, v)
    assert attended.item() == pytest.approx(_attended(lambda row: round((row + 1) / 512)), rel=1e-3)


def _attended(places: Callable[[int], int], count: int = 2200) -> float:
    """Keys that a row of tiles of 32 attends in the mean, with a window of 64."""
    total = 0
    for row in range(count):
        tile = row // 32 * 32
        between = max(tile // 64 - 2, 0)
        total += 64 * min(places(tile), between) + min(row + 1, 64 + 64 + row % 64 + 1)
    return total / count


@pytest.mark.parametrize("ranks", ["m2", "p2dr", "page"])
def test_a_sketch_may_rank_beside_exact_logits_of_what_is_attended_anyway(ranks: str) -> None:
    q, k, v = _draw(1100, 1100)
    rule = replace(PROMPT, scores="all", ranks=ranks, rank_rows=32)
    out, _ = prompts.attend(rule, q, k, v)
    rows, pages = torch.arange(992, 1024), Pages(k, v)
    exact = _logits(q[:, :, rows], k).masked_fill(torch.arange(1100) > rows[:, None], -math.inf)
    logits = exact[..., : 17 * 64].unflatten(-1, (-1, 64)).logsumexp(-1)
    scale = DIM**-0.5
    if ranks == "page":
        logits[..., 1:14] = pages.logits(q[:, :, rows], scale)[..., 1:14]
    else:
        made = pages.vectors(ranks).logits(q[:, :, rows]) * scale + math.log(2)
        made = made.amax(-1) if ranks == "m2" else made.logsumexp(-1)
        logits[..., 1:14] = made[..., 1:14]
    mass = logits.softmax(-1).sum(1).amax(1)
    for head in range(HEADS):
        keep = torch.zeros(1100, dtype=torch.bool)
        for block in (0, 14, 15, *(1 + mass[head, 1:14].topk(3).indices)):
            keep[64 * block : 64 * block + 64] = True
        weights = exact[head].masked_fill(~keep, -math.inf).softmax(-1)
        torch.testing.assert_close(out[head][:, rows], weights @ v[head], rtol=1e-3, atol=1e-4)


def test_spread_and_the_largest_share_change_what_is_named() -> None:
    drawn = _draw(1100, 1100)
    rule = replace(PROMPT, scores="p2dr", candidates=5)
    plain, _ = prompts.attend(rule, *drawn)
    for other in (
        {"variance": True},
        {"name_by": "largest"},
        {"name_stride": 16},
        {"rank_by": "sum"},
    ):
        assert not torch.allclose(prompts.attend(replace(rule, **other), *drawn)[0], plain)


@pytest.mark.parametrize("tail", ["page", "variance"])
def test_the_tail_of_a_prompt_is_one_key_for_each_block_that_is_not_attended(tail: str) -> None:
    q, k, v = _draw(1100, 1100)
    out, _ = prompts.attend(replace(PROMPT, blocks=0, tail=tail), q, k, v)
    pages, rows = Pages(k, v), torch.arange(992, 1024)  # whose window begins in block 14
    logits = _logits(q[:, :, rows], k).masked_fill(torch.arange(1100) > rows[:, None], -math.inf)
    logits[..., 64 : 14 * 64] = -math.inf
    if tail == "page":
        means = (q[:, :, rows] @ pages.mean()[:, None, 1:14].mT) / math.sqrt(DIM) + math.log(64)
    else:
        means = pages.logits(q[:, :, rows], DIM**-0.5)[..., 1:14]
    weights = torch.cat([logits, means], -1).softmax(-1)
    expected = weights @ torch.cat([v, pages.value_means(8)[:, 1:14]], 1)[:, None]
    torch.testing.assert_close(out[:, :, rows], expected, rtol=1e-3, atol=1e-4)
    if tail == "page":
        by_sketch, _ = prompts.attend(replace(PROMPT, blocks=0, tail="p2dr"), q, k, v)
        dense = _dense(q, k, v)
        assert (by_sketch - dense).abs().mean() < (out - dense).abs().mean()


@pytest.mark.parametrize("vectors", [4, 16, 32, 64])
@pytest.mark.parametrize("how", ["plain", "base", "causal", "largest"])
def test_the_kernel_of_block_logits_is_plain_torch(vectors: int, how: str) -> None:
    make = torch.Generator().manual_seed(vectors)
    q, x = (torch.randn(2, *shape, 32, generator=make) for shape in ((150,), (21, vectors)))
    base = torch.randn(2, 150, 21, generator=make) if how == "base" else None
    rows = torch.arange(150) * 3 if how == "causal" else None
    expected = blocks.block_logits(q, x, 0.3, base=base, rows=rows, largest=how == "largest")
    found = blocks.launch_block_logits(q, x, 0.3, base, rows, how == "largest")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tile", "start"), [(16, 512), (32, 512), (64, 0)])
def test_the_kernel_of_chosen_blocks_is_plain_torch(tile: int, start: int) -> None:
    q, k, v = _draw(128, start + 100)
    tiles, count = 128 // tile, -(-(start + 100) // 64)
    chosen = torch.rand(HEADS, tiles, count) < 0.4
    chosen[:, :, 0] = True
    expected = blocks.attend_blocks(q, k, v, chosen, tile, start)
    found = blocks.launch_attend_blocks(q, k, v, chosen, tile, start)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_anchors_and_the_last_rows_are_dense_and_no_row_depends_on_later_ones() -> None:
    q, k, v = _draw(1100, 1100)
    rule = replace(PROMPT, anchors=64, dense_last=10)
    out, _ = prompts.attend(rule, q, k, v)
    dense = _dense(q, k, v)
    anchors = torch.arange(0, 1100, 64)
    torch.testing.assert_close(out[:, :, anchors], dense[:, :, anchors], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(out[:, :, 1090:], dense[:, :, 1090:], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(out[:, :, 1000:1090], dense[:, :, 1000:1090], atol=1e-2)
    plain, _ = prompts.attend(PROMPT, q, k, v)
    change = (out - plain)[:, :, 960:1024]
    torch.testing.assert_close(change, change[:, :, :1].expand_as(change), rtol=1e-3, atol=1e-4)

    other, _ = prompts.attend(replace(rule, dense_last=0), q, k, v)
    k[:, 960:], v[:, 960:] = 0, 1
    again, _ = prompts.attend(replace(rule, dense_last=0), q, k, v)
    torch.testing.assert_close(again[:, :, :960], other[:, :, :960])


def test_the_cost_of_a_prompt_is_of_whole_blocks() -> None:
    assert cost(PromptRule(), 1024) == ({"attend": 1.0}, 2 * 2 * 64 * 128 * 136 / 2**30)
    rule = PromptRule("m16", blocks=2, tile=32, candidates=3, rank_rows=16, window=64, anchors=64)
    attended, named, ranked, rows, read = 0.0, 0.0, 0.0, 0.0, 0.0
    for tile in range(64):  # of a prompt of 2048, a layer of one KV head
        own = tile // 2
        always = min(own + 1, 3)
        between = own + 1 - always
        attended += 2 * 64 * (always + min(between, 2))
        named += 4 * own / 4
        ranked += 64 * (always + min(between, 3)) / 2
        rows += 2 * 64 * (own + 1) / 64
        read += 2 * 16384 * (always + min(between, 2)) + 16384 * (always + min(between, 3))
        read += (4 * 256 + 256) * own * (8 * 4 / 128) + 2 * 16384 * (own + 1) / 64 * 32 * 4 / 128
    dense = 2 * 64 * 2 * sum(range(1, 33))
    parts, gib = cost(rule, 2048)
    expected = {"attend": attended, "name": named, "rank": ranked, "dense rows": rows}
    assert parts == pytest.approx({name: x / dense for name, x in expected.items()})
    assert gib == pytest.approx(read / 2**30)


def test_sketches_cost_half_and_tails_a_key_for_each_block() -> None:
    rule = PromptRule("all", ranks="m2", blocks=8)
    parts = cost(rule, 65536)[0]
    assert set(parts) == {"attend", "rank"}
    assert cost(replace(rule, ranks="p2dr"), 65536)[0]["rank"] < 0.53 * parts["rank"]
    fewer = cost(replace(rule, ranks="page", scores="page"), 65536)[0]
    assert fewer["name"] < 0.1 * parts["rank"]
    assert cost(replace(rule, tail="page"), 65536)[0]["tail"] == pytest.approx(1 / 64, rel=0.1)
    assert cost(replace(rule, growth=1.0), 65536)[0]["attend"] > parts["attend"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DecodeRule("p9"), "scores: expected a sketch"),
        (lambda: DecodeRule("p4", window=100), "window: expected a multiple of 64, got 100"),
        (lambda: DecodeRule("p4", cell=2), "cell: expected whole vectors"),
        (lambda: DecodeRule("p4", level1="p9"), "level1: expected a sketch"),
        (lambda: DecodeRule("p4", shares="pages", pages=0.5), "shares: expected context"),
        (lambda: PromptRule("p9"), "scores: expected a sketch"),
        (lambda: PromptRule("exact"), "scores: expected a sketch or one of"),
        (lambda: PromptRule("m16", ranks="all"), "ranks: expected a sketch or one of"),
        (lambda: PromptRule("m16", tail="exact"), "tail: expected a sketch or one of"),
        (lambda: PromptRule("m16", name_stride=3), "name_stride: expected one in the tile"),
        (lambda: PromptRule("m16", tile=96), "a tile in 4096"),
        (lambda: _decoded(DecodeRule("p4", window=0), _draw(200, 700)), "reaches the prompt"),
    ],
)
def test_what_has_no_meaning_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder of a tiny Qwen2 model with random weights."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    folder = tmp_path / "tiny"
    folder.mkdir()
    weights = {
        name: x.clone() for name, x in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


@torch.no_grad()
def test_the_model_is_transformers(tiny: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 50, (1, 200), generator=torch.Generator().manual_seed(0))
    expected = transformers.Qwen2ForCausalLM.from_pretrained(tiny)(ids).logits[0, 180:]
    model = Model(tiny, "cpu")
    tokens = ids[0].tolist()

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _grouped_dense(q, k, v)

    prompt = model.prompt(tokens[:180], attend)
    found = model.answer(tokens[180:], prompt, attend)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def _grouped_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    count, rows = k.shape[1], q.shape[2]
    seen = torch.arange(count) <= torch.arange(count - rows, count)[:, None]
    return scaled_dot_product_attention(q, k[:, None], v[:, None], attn_mask=seen)


def test_a_run_goes_on_where_others_stopped_and_its_figures_are_merged(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = [
        Variant("all", DecodeRule("p2dr", tokens=2048, window=128)),
        Variant("window", DecodeRule("none", tokens=0, window=128, tail=False)),
    ]
    monkeypatch.setitem(SETS, "decode", variants)
    make = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 50, (count,), generator=make).tolist()

    rows = [
        {"task": "t", "variant": "plain", "length": 600, "index": index, "pieces": [0, 1],
         "target": ids(2 + index)}
        for index in range(3)
    ]  # fmt: skip
    rows.append({**rows[0], "index": 3, "target": [1]})  # nothing to score
    document = {"pieces": [ids(500), ids(100), ids(100)], "prompts": rows}
    source, out, merged = (tmp_path / name for name in ("prompts.json", "out", "merged.json"))
    source.write_text(json.dumps(document))

    def run(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["simulate", *map(str, words)])
        assert main() == 0
        return capsys.readouterr().out

    command = ("run", tiny, "--name", "m", "--prompts", source, "--set", "decode", "--out", out)
    assert len(run(*command, "--per-task", "2").splitlines()) == 2
    (out / "decode_m_t_plain_600_2.json").touch()  # another process has taken it
    assert run(*command) == ""
    run("merge", out, "--commit", "abc", "--json", merged)
    found = json.loads(merged.read_text())
    (cell,) = found["cells"]
    assert found["commit"] == "abc"
    assert found["settings"]["decode"]["all"]["decode"]["tokens"] == 2048
    assert (cell["model"], cell["length"], cell["prompts"]) == ("m", 600, 2)
    assert cell["of_task"] == {"t, plain": 2}
    dense, everything, window = (cell["variants"][name] for name in ("dense", "all", "window"))
    assert dense["kl"] == dense["added_nll"] == dense["lost"] == 0
    assert everything["kl"] < 1e-4 < window["kl"]
    assert window["attended"] == pytest.approx(64 + 128 + 24, abs=3)
    assert window["of_task"] == {"t, plain": {"kl": window["kl"], "added_nll": window["added_nll"]}}
    assert cell["of_question"] == {"plain": 2}
    assert window["of_question"]["plain"]["kl"] == window["kl"]
    assert (everything["kl_ratio"], everything["kl_ratio_error"]) == (1, 1)
    kls = [json.loads((out / f"decode_m_t_plain_600_{i}.json").read_text()) for i in range(2)]
    over = [(x["results"]["window"]["kl"] + 1e-5) / (x["results"]["all"]["kl"] + 1e-5) for x in kls]
    assert window["kl_ratio"] == pytest.approx(math.sqrt(over[0] * over[1]), rel=1e-3)
    text = run("table", merged, "--set", "decode")
    assert text.startswith("| variant | MiB | m, 0k |")
    assert "| window | " in text


DOCUMENTS = [
    json.loads((ROOT / "benchmarks/results" / name).read_text())
    for name in ("simulation_qwen_h200.json", "simulation_prompts_qwen_h200.json")
]


@pytest.mark.parametrize("chosen", ["decode", "budgets"])
def test_the_tables_of_the_docs_are_of_the_committed_files(chosen: str) -> None:
    page = (ROOT / "docs/quality.md").read_text(encoding="utf-8")
    head = results.table(DOCUMENTS, chosen, ["dense"]).partition("\n")[0] + "\n"
    shown = page[page.index(head) :].partition("\n\n")[0]
    names = [line.split(" | ")[0].removeprefix("| ") for line in shown.splitlines()[2:]]
    assert results.table(DOCUMENTS, chosen, names) == shown
    known = {variant.name for variant in SETS[chosen]} | {"dense"}
    assert set(names) <= known


def test_figures_of_an_answer() -> None:
    dense = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])
    other = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    found = results.figures(dense, other, torch.tensor([1, 1]))
    first = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert found["kl"] == pytest.approx(first / 2, abs=1e-5)
    assert found["kl_max"] == pytest.approx(first, abs=1e-5)
    assert found["nll"] == pytest.approx(math.log(2), abs=1e-5)
    assert found["right"] == 0
    assert found["tokens_right"] == 0
