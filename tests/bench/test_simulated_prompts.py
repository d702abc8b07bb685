"""benchmarks/simulate: the blocks that a prompt's tiles attend, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.simulate import blocks, prompts
from benchmarks.simulate.cost import cost
from benchmarks.simulate.prompts import PromptRule
from benchmarks.simulate.sketches import Pages
from tests.bench.simulated import DIM, HEADS, attending, close, dense_attention, draw, logits_of

PROMPT = PromptRule("m16", blocks=3, tile=32, candidates=6, window=64)


def _causal_logits(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Logits of some rows of a prompt; those of later keys are -inf."""
    later = torch.arange(k.shape[1]) > rows[:, None]
    return logits_of(q[:, :, rows], k).masked_fill(later, -math.inf)


@pytest.mark.parametrize(
    "rule",
    [
        PROMPT,
        replace(PROMPT, scores="p2dr", tile=64),
        replace(PROMPT, draws=True),
        replace(PROMPT, draws=True, draws_candidates=True),
        replace(PROMPT, draws=True, draws_candidates=True, neighbours=2),
        PromptRule(),
    ],
)
def test_a_prompt_with_enough_blocks_is_dense(rule: PromptRule) -> None:
    drawn = draw(1100, 1100)
    rule = replace(rule, blocks=20, candidates=20)
    out, attended = prompts.attend(rule, *drawn)
    close(out, dense_attention(*drawn))
    assert attended.item() == pytest.approx(1101 / 2)


@pytest.mark.parametrize("scores", ["all", "m16", "m4", "p2dr", "page"])
def test_a_prompts_tiles_attend_the_blocks_of_their_largest_masses(scores: str) -> None:
    """With all blocks as candidates and all rows ranking, every source finds the same."""
    q, k, v = draw(1100, 1100)
    rule = replace(PROMPT, scores=scores, candidates=20, rank_rows=32)
    out, attended = prompts.attend(rule, q, k, v)
    start = 1024 - 32  # a tile whose window begins in block 14
    rows = torch.arange(start, start + 32)
    exact = _causal_logits(q, k, rows)
    mass = exact.softmax(-1)[..., : 17 * 64].unflatten(-1, (-1, 64)).sum(-1).sum(1).amax(1)
    for head in range(HEADS):
        chosen = (0, 14, 15, *(1 + mass[head, 1:14].topk(3).indices))
        ranges = [(64 * block, 64 * block + 64) for block in chosen]
        close(out[head][:, rows], attending(exact[head], v[head], ranges))
    assert attended.item() < 1101 / 2


@pytest.mark.parametrize("sums", [False, True])
def test_one_step_attends_the_candidates(sums: bool) -> None:
    drawn = draw(1100, 1100)
    one_step = replace(PROMPT, ranks="", scores="m8", name_sums=sums)
    out, _ = prompts.attend(replace(one_step, candidates=20), *drawn)
    close(out, dense_attention(*drawn))
    _, few = prompts.attend(replace(one_step, candidates=3), *drawn)
    _, ranked = prompts.attend(PROMPT, *drawn)
    assert few == ranked  # of three blocks, too
    parts, _ = cost(replace(one_step, candidates=3), 4096)
    assert "rank" not in parts
    assert parts["attend"] == cost(PROMPT, 4096)[0]["attend"]


def test_a_tile_draws_as_many_blocks_as_it_needs() -> None:
    mass = torch.tensor([[[0.5, 0.25, 0.125, 0.0625, 0.03125, 0.0]]])
    places, position = torch.tensor([6]), torch.tensor([0])
    picked = prompts._picked(mass, places, position, True, sure=0.125)
    assert picked[0, 0, :3].tolist() == [1, 1, 1]  # 3.75 blocks in all: one of two more, or none
    assert set(picked[0, 0, 3:5].tolist()) <= {0.0, 2.0, 4.0}
    starts = torch.arange(0, 64 * 256, 64)
    each = mass.expand(1, 256, -1)
    many = prompts._picked(each, places.expand(256), starts, True, sure=0.125)
    assert (many > 0).sum(-1).max() <= 4
    close(many.mean(1), torch.tensor([[1.0, 1, 1, 1, 1, 0]]), atol=0.05)
    few = prompts._picked(mass, torch.tensor([2]), position, True, sure=0.125)
    assert torch.equal(few, prompts._picked(mass, torch.tensor([2]), position, True))


@pytest.mark.parametrize("draws", [False, True])
def test_neighbours_share_what_all_of_their_rows_name(draws: bool) -> None:
    drawn = draw(1088, 1088)
    large = replace(PROMPT, ranks="", candidates=3, tile=64, draws_candidates=draws)
    halves = replace(large, tile=32, neighbours=2)
    out, attended = prompts.attend(large, *drawn)
    shared, of_halves = prompts.attend(halves, *drawn)
    close(shared, out)
    assert of_halves == attended
    ranked = replace(PROMPT, neighbours=2)
    assert cost(ranked, 4096)[0] == cost(PROMPT, 4096)[0]
    assert cost(ranked, 4096)[1] < cost(PROMPT, 4096)[1]  # keys that two tiles read once


def test_a_mass_too_small_is_left_out() -> None:
    drawn = draw(1100, 1100)
    _, all_of_it = prompts.attend(PROMPT, *drawn)
    _, less = prompts.attend(replace(PROMPT, min_mass=0.4), *drawn)
    _, none = prompts.attend(replace(PROMPT, min_mass=1.0), *drawn)
    assert none < less < all_of_it


def test_a_budget_grows_with_depth() -> None:
    drawn = draw(2200, 2200)
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


def _probabilities(size: torch.Tensor, places: int) -> torch.Tensor:
    """``min(1, size / T)``, with the ``T`` for which they add up to ``places``: by bisection."""
    size = size.double()
    low, high = 0.0, size.sum().item()
    for _ in range(100):
        middle = (low + high) / 2
        more = (size / middle).clamp(max=1.0).sum() > places
        low, high = (middle, high) if more else (low, middle)
    return (size / high).clamp(max=1.0)


@pytest.mark.parametrize("places", [4, 12])
def test_a_drawn_block_stands_for_as_many_as_it_was_unlikely(places: int) -> None:
    mass = torch.randn(40, generator=torch.Generator().manual_seed(places)).exp()
    mass[[7, 20]] *= 100
    mass[5] = 0
    positions = 64 * torch.arange(1 << 15)  # each starts elsewhere
    drawn = mass.expand(1, len(positions), -1)
    (weights,) = prompts._picked(drawn, torch.full_like(positions, places), positions, True)
    chance = _probabilities(mass, places)
    picked = weights > 0
    close(weights, torch.where(picked, 1 / chance, 0.0).float())
    assert chance[[7, 20]].eq(1).all()
    assert weights[:, chance == 1].eq(1).all()
    numbers = picked.sum(-1)
    assert (numbers - places).abs().max() <= 1
    assert numbers.float().mean().item() == pytest.approx(places, abs=0.01)
    assert not picked[:, 5].any()
    torch.testing.assert_close(weights.mean(0), (mass > 0).float(), rtol=0, atol=0.1)


def test_of_drawn_candidates_blocks_are_drawn_and_both_weights_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []

    def attend_blocks(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor, *where: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(weights)
        return blocks.attend_blocks(q, k, v, weights, *where)

    monkeypatch.setattr(prompts, "attend_blocks", attend_blocks)
    q, k, v = draw(1100, 1100)
    rule = replace(PROMPT, rank_rows=32, draws=True, draws_candidates=True)
    out, _ = prompts.attend(rule, q, k, v)
    prompts.attend(replace(rule, blocks=20), q, k, v)
    prompts.attend(replace(rule, blocks=20, draws=False), q, k, v)
    prompts.attend(replace(rule, candidates=20), q, k, v)
    prompts.attend(replace(rule, scores="all"), q, k, v)
    both, named, best, *whole = found
    torch.testing.assert_close(named, best)  # with places for all the second draw takes all
    torch.testing.assert_close(*whole)  # as the first one does
    rows = torch.arange(992, 1024)  # whose window begins in block 14
    exact = _causal_logits(q, k, rows)
    for head in range(HEADS):
        first, weights = named[head, 31], both[head, 31]
        assert (first[1:14] > 0).sum() in (5, 6, 7)
        assert first[1:14].max() > 1
        seen = exact[head] + first.log().repeat_interleave(64)[:1100].clamp(max=0)
        mass = seen.softmax(-1)[..., : 17 * 64].unflatten(-1, (-1, 64)).sum(-1).sum(0).amax(0)
        size = (mass * first[:17])[1:14]
        picked = weights[1:14] > 0
        assert picked.sum() in (2, 3, 4)
        expected = torch.where(picked, first[1:14] / _probabilities(size, 3), 0.0).float()
        close(weights[1:14], expected)
        logits = exact[head] + weights.log().repeat_interleave(64)[:1100]
        close(out[head][:, rows], logits.softmax(-1) @ v[head])


@pytest.mark.parametrize("ranks", ["m2", "p2dr", "page"])
def test_a_sketch_may_rank_beside_exact_logits_of_what_is_attended_anyway(ranks: str) -> None:
    q, k, v = draw(1100, 1100)
    rule = replace(PROMPT, scores="all", ranks=ranks, rank_rows=32)
    out, _ = prompts.attend(rule, q, k, v)
    rows, pages = torch.arange(992, 1024), Pages(k, v)
    exact = _causal_logits(q, k, rows)
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
        chosen = (0, 14, 15, *(1 + mass[head, 1:14].topk(3).indices))
        ranges = [(64 * block, 64 * block + 64) for block in chosen]
        close(out[head][:, rows], attending(exact[head], v[head], ranges))


def test_spread_and_the_largest_share_change_what_is_named() -> None:
    drawn = draw(1100, 1100)
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
    q, k, v = draw(1100, 1100)
    out, _ = prompts.attend(replace(PROMPT, blocks=0, tail=tail), q, k, v)
    pages, rows = Pages(k, v), torch.arange(992, 1024)  # whose window begins in block 14
    logits = _causal_logits(q, k, rows)
    logits[..., 64 : 14 * 64] = -math.inf
    if tail == "page":
        means = (q[:, :, rows] @ pages.mean()[:, None, 1:14].mT) / math.sqrt(DIM) + math.log(64)
    else:
        means = pages.logits(q[:, :, rows], DIM**-0.5)[..., 1:14]
    weights = torch.cat([logits, means], -1).softmax(-1)
    expected = weights @ torch.cat([v, pages.value_means(8)[:, 1:14]], 1)[:, None]
    close(out[:, :, rows], expected)
    if tail == "page":
        by_sketch, _ = prompts.attend(replace(PROMPT, blocks=0, tail="p2dr"), q, k, v)
        dense = dense_attention(q, k, v)
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
    q, k, v = draw(128, start + 100)
    weights = _block_weights(128 // tile, start + 100)
    expected = blocks.attend_blocks(q, k, v, weights, tile, start)
    found = blocks.launch_attend_blocks(q, k, v, weights, tile, start)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_block_counts_as_often_as_its_weight_says() -> None:
    q, k, v = draw(128, 640)
    weights = _block_weights(4, 640)
    out, lse = blocks.attend_blocks(q, k, v, weights, 32, 512)
    counts = weights.repeat_interleave(32, 1).repeat_interleave(64, 2)[:, None]  # of each key
    later = torch.arange(640) > torch.arange(512, 640)[:, None]
    shares = (logits_of(q, k).double().exp() * counts).masked_fill(later, 0.0)
    sums = shares.sum(-1)
    close(out, (shares @ v.double()[:, None] / sums[..., None]).float())
    close(lse, sums.log().float())


def _block_weights(tiles: int, keys: int) -> torch.Tensor:
    """``[HEADS, tiles, blocks]``: some blocks are left out, others count up to five times."""
    make = torch.Generator().manual_seed(tiles)
    shape = (HEADS, tiles, -(-keys // 64))
    weights = 1 + 4 * torch.rand(shape, generator=make)
    weights *= torch.rand(shape, generator=make) < 0.4
    weights[:, :, 0] = 1
    return weights


def test_anchors_and_the_last_rows_are_dense_and_no_row_depends_on_later_ones() -> None:
    q, k, v = draw(1100, 1100)
    rule = replace(PROMPT, anchors=64, dense_last=10)
    out, _ = prompts.attend(rule, q, k, v)
    dense = dense_attention(q, k, v)
    anchors = torch.arange(0, 1100, 64)
    close(out[:, :, anchors], dense[:, :, anchors])
    close(out[:, :, 1090:], dense[:, :, 1090:])
    assert not torch.allclose(out[:, :, 1000:1090], dense[:, :, 1000:1090], atol=1e-2)
    plain, _ = prompts.attend(PROMPT, q, k, v)
    change = (out - plain)[:, :, 960:1024]
    close(change, change[:, :, :1].expand_as(change))

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
        (lambda: PromptRule("p9"), "scores: expected a sketch"),
        (lambda: PromptRule("exact"), "scores: expected a sketch or one of"),
        (lambda: PromptRule("m16", ranks="all"), "ranks: expected a sketch or one of"),
        (lambda: PromptRule("m16", tail="exact"), "tail: expected a sketch or one of"),
        (lambda: PromptRule("m16", name_stride=3), "name_stride: expected one in the tile"),
        (lambda: PromptRule("m16", tile=96), "a tile in 4096"),
        (lambda: PromptRule("m16", neighbours=3), "neighbours: expected whole chunks"),
    ],
)
def test_what_has_no_meaning_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
