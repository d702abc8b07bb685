"""What blocks matter: sampled masses, the tracker over batches, and what is kept of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsek_backend.patterns import BlockSparsePattern, masses
from sparsek_backend.patterns.training import (
    ImportanceTracker,
    Pruning,
    overlap,
    sampled_block_masses,
    visible_blocks,
)
from sparsek_backend.patterns.training.pruning import mean_by_distance


def inputs(n: int = 70, m: int = 70, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [2 * torch.randn(2, n, 4, 8), torch.randn(2, m, 2, 8), torch.randn(2, m, 2, 8)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n", "m"), [(70, 70), (40, 90), (40, 20)])
def test_all_queries_give_the_exact_mass(
    causal: bool, n: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masses, "_MOST_SCORES", 20_000)  # several chunks
    q, k, v = inputs(n, m)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(2, 2)) * 8**-0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(n, m).tril(m - n).bool(), float("-inf"))
    mean = scores.softmax(-1).nan_to_num(0.0).mean(0)  # [4, n, m]
    found = sampled_block_masses(q, k, v, 16, samples=16, causal=causal)
    assert found.shape == (4, -(-n // 16), -(-m // 16))
    for r in range(found.shape[1]):
        for c in range(found.shape[2]):
            block = mean[:, 16 * r : 16 * r + 16, 16 * c : 16 * c + 16]
            torch.testing.assert_close(found[:, r, c], block.sum(2).mean(1))


def test_autocast_does_not_reach_the_products() -> None:
    q, k, v = inputs()
    wanted = sampled_block_masses(q, k, v, 16, samples=16)
    with torch.autocast("cpu", torch.bfloat16):
        found = sampled_block_masses(q, k, v, 16, samples=16)
    assert torch.equal(found, wanted)


def test_products_beyond_fp16() -> None:
    q, k, v = ((300 * x).half() for x in inputs())
    found = sampled_block_masses(q, k, v, 16, samples=16)
    torch.testing.assert_close(
        found, sampled_block_masses(q.float(), k.float(), v.float(), 16, samples=16)
    )


def test_norms_of_what_a_block_adds() -> None:
    q, k, v = inputs()
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(2, 2)) * 8**-0.5
    probs = scores.masked_fill(~torch.ones(70, 70).tril().bool(), float("-inf")).softmax(-1)
    for measure, power in (("l1", 1), ("l2", 2)):
        size = v.norm(p=power, dim=3).repeat_interleave(2, 2).transpose(1, 2)[:, :, None]
        added = (probs * size).pow(power)  # of l2 the mean over queries and texts, then the root
        found = sampled_block_masses(q, k, v, 16, samples=16, measure=measure)  # type: ignore[arg-type]
        block = added[:, :, 32:48, 16:32].sum(3).mean((0, 2)).pow(1 / power)
        torch.testing.assert_close(found[:, 2, 1], block)
        last = added[:, :, 64:, :16].sum(3).mean((0, 2)).pow(1 / power)
        torch.testing.assert_close(found[:, 4, 0], last)


def test_samples_are_of_every_block_and_right_on_average() -> None:
    q, k, v = inputs()
    exact = sampled_block_masses(q, k, v, 16, samples=16)
    generator = torch.Generator().manual_seed(0)
    found = torch.stack(
        [sampled_block_masses(q, k, v, 16, samples=2, generator=generator) for _ in range(300)]
    )
    torch.testing.assert_close(found.sum(3), torch.ones(300, 4, 5))
    assert (found[0] != found[1]).any()
    torch.testing.assert_close(found.mean(0), exact, atol=0.02, rtol=0.0)


def test_blocks_that_causality_leaves() -> None:
    assert torch.equal(visible_blocks(64, 64, 16, True), torch.ones(4, 4).tril().bool())
    assert visible_blocks(20, 50, 16, True).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert visible_blocks(20, 50, 16, False).all()


@pytest.mark.parametrize("reduction", ["mean", "max", "ema"])
def test_the_tracker_reduces_its_window(reduction: Any) -> None:
    batches = torch.rand(5, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    tracker = ImportanceTracker((2, 3, 3), reduction=reduction, window=3, decay=0.5)
    for mass in batches:
        tracker.add(mass)
        tracker.add(torch.full_like(mass, torch.nan))  # does not count
    weights = 0.5 ** torch.arange(4.0, -1.0, -1.0)
    wanted = {
        "mean": batches[2:].mean(0),
        "max": batches[2:].amax(0),
        "ema": (batches * weights[:, None, None, None]).sum(0) / weights.sum(),
    }
    torch.testing.assert_close(tracker.value(), wanted[reduction])
    again = ImportanceTracker((2, 3, 3), reduction=reduction, window=3, decay=0.5)
    again.load_state_dict(tracker.bfloat16().state_dict())
    torch.testing.assert_close(again.value(), wanted[reduction])
    tracker.reset()
    tracker.add(batches[0])
    torch.testing.assert_close(tracker.value(), batches[0])


def test_top_k_and_threshold_keep_sinks_and_window() -> None:
    visible = torch.ones(8, 8).tril().bool()
    mass = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0)) * visible
    fixed = BlockSparsePattern.local((8, 8), 16, window=2, sinks=1).mask()[0]
    top = Pruning(sinks=1, window=2).mask(mass, visible, 0.25)
    assert top.sum((1, 2)).tolist() == [27] * 3
    assert not (fixed & ~top).any()
    assert mass[top & ~fixed].min() > 0
    for kept, weights in zip(top, mass, strict=True):
        rest = visible & ~fixed
        assert weights[kept & rest].min() >= weights[~kept & rest].max()
    above = Pruning(threshold=0.3, sinks=1, window=2).mask(mass, visible, 0.0)
    shares = mass / mass.sum(2, keepdim=True)
    assert torch.equal(above, (visible & (shares >= 0.3)) | fixed)
    both = Pruning(threshold=0.3, sinks=1, window=2).mask(mass, visible, 0.5)
    assert not (both & ~above).any()
    assert (
        Pruning(sinks=1, window=2).mask(mass, visible, 0.99).sum((1, 2)).tolist()
        == [int(fixed.sum())] * 3
    )


def test_a_pooled_budget_goes_where_the_mass_is() -> None:
    visible = torch.ones(8, 8).tril().bool()
    mass = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0)) * visible
    mass[1] *= 3.0
    rule = Pruning(sinks=1, window=1, pooled=True)
    kept = rule.mask(mass, visible, 0.4)
    near, far = kept.sum((1, 2)).tolist()
    assert near + far == 2 * round(0.6 * 36)
    assert far > near
    rest = visible & ~BlockSparsePattern.local((8, 8), 16, window=1, sinks=1).mask()[0]
    dropped = torch.cat([m[rest & ~k] for m, k in zip(mass, kept, strict=True)])
    assert min(m[rest & k].min() for m, k in zip(mass, kept, strict=True)) >= dropped.max()


def test_layers_share_a_budget() -> None:
    visible = torch.ones(8, 8).tril().bool()
    mass = torch.rand(5, 8, 8, generator=torch.Generator().manual_seed(0)) * visible
    sharp, even = mass[:3] ** 8, 1.0 + 0.1 * mass[3:]  # layers may have as many heads as they like
    layers = [100.0 * sharp, even * visible]
    rule = Pruning(pooled="model")
    kept = rule.masks(layers, [visible, visible], 0.4)
    assert [x.shape for x in kept] == [x.shape for x in layers]
    assert sum(int(x.sum()) for x in kept) == 5 * 22
    assert kept[0].sum() / 3 < 0.8 * kept[1].sum() / 2, "few blocks hold what the first one attends"
    scaled = rule.masks(
        [x * scale for x, scale in zip(layers, (7.0, 0.1), strict=True)], [visible] * 2, 0.4
    )
    assert all(torch.equal(a, b) for a, b in zip(kept, scaled, strict=True))
    each = Pruning(pooled=True).masks(layers, [visible, visible], 0.4)
    assert [int(x.sum()) for x in each] == [3 * 22, 2 * 22]
    with pytest.raises(ValueError, match="visible: expected one grid"):
        rule.masks(layers, [visible, visible[:4, :4]], 0.4)


def test_blocks_as_far_from_the_diagonal_have_one_weight() -> None:
    mass = torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(0))
    found = mean_by_distance(mass, 1)
    assert torch.equal(found[..., 0], mass[..., 0])
    for offset in range(-4, 6):
        line = mass[..., 1:].diagonal(offset, -2, -1)
        same = found[..., 1:].diagonal(offset, -2, -1)
        torch.testing.assert_close(same, line.mean(-1, keepdim=True).expand_as(line))
    visible = torch.ones(6, 6).tril().bool()
    planted = torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(1)) * visible
    planted[..., 3:, :].diagonal(0, -2, -1)[:] = 0.9  # three blocks before the diagonal
    kept = Pruning(sinks=1, window=1, by_distance=True).mask(planted, visible, 1 - 14 / 21)
    assert kept[0].diagonal(-3).all()
    assert kept[0].sum() == 14


def test_diversity_spreads_the_heads() -> None:
    visible = torch.ones(8, 8).bool()
    generator = torch.Generator().manual_seed(0)
    shared, own = torch.rand(8, 8, generator=generator), torch.rand(4, 8, 8, generator=generator)
    mass = shared + 0.2 * own
    found = [
        overlap(Pruning(0.0, 0, 0, diversity).mask(mass, visible, 0.75))
        for diversity in (0.0, 0.3, 1.0)
    ]
    assert found[0] > found[1] > found[2]
    assert found[2] < 0.2
    assert overlap(visible[None]) == 1.0


ONE = torch.ones(1, 2, 2)
REFUSED: list[tuple[str, Any]] = [
    ("measure: expected 'mass', 'l1'", lambda: sampled_block_masses(*inputs(), 16, measure="l3")),  # type: ignore[arg-type]
    ("samples: expected an integer >= 1", lambda: sampled_block_masses(*inputs(), 16, samples=0)),
    ("block_size: expected a multiple of 16", lambda: sampled_block_masses(*inputs(), 20)),
    ("reduction: expected 'mean'", lambda: ImportanceTracker((1, 1, 1), reduction="sum")),  # type: ignore[arg-type]
    ("decay: expected a number from 0", lambda: ImportanceTracker((1, 1, 1), decay=1.0)),
    ("tracker: expected at least one batch", lambda: ImportanceTracker((1, 1, 1)).value()),
    ("mass: expected shape", lambda: ImportanceTracker((1, 1, 1)).add(torch.ones(1, 2, 2))),
    ("threshold: expected a number", lambda: Pruning(threshold=2.0)),
    ("pooled: expected True, False or 'model'", lambda: Pruning(pooled="layer")),  # type: ignore[arg-type]
    ("diversity: expected 0 where pooled", lambda: Pruning(diversity=0.5, pooled=True)),
    ("sparsity: expected a number", lambda: Pruning().mask(ONE, ONE[0].bool(), 1.0)),
]


@pytest.mark.parametrize(("message", "action"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refuses(message: str, action: Any) -> None:
    with pytest.raises(ValueError, match=message):
        action()


def test_blocks_that_nobody_sees_do_not_count() -> None:
    visible = visible_blocks(64, 64, 16, causal=True)
    rule = Pruning(threshold=0.3, sinks=0, window=0)
    found = rule.mask(torch.ones(1, 4, 4), visible, 0.0)
    assert found[0].sum(1).tolist() == [1, 2, 3, 1]  # a third of a row is enough, a quarter not
    assert torch.equal(found, rule.mask(visible[None].float(), visible, 0.0))
