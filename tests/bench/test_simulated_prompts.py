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


@pytest.mark.parametrize("rule", [PROMPT, replace(PROMPT, scores="p2dr", tile=64), PromptRule()])
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
    tiles, count = 128 // tile, -(-(start + 100) // 64)
    chosen = torch.rand(HEADS, tiles, count) < 0.4
    chosen[:, :, 0] = True
    expected = blocks.attend_blocks(q, k, v, chosen, tile, start)
    found = blocks.launch_attend_blocks(q, k, v, chosen, tile, start)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


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
    ],
)
def test_what_has_no_meaning_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
