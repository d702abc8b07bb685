"""Ranks that see different data hold one pattern."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparsek_backend.patterns.training import (
    ImportanceOptions,
    LearnedPattern,
    PatternScheduler,
    Pruning,
    SparseAttentionLayer,
    SparsitySchedule,
)


def train(rank: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """One rank's importance and mask after a pruning, and what a loss that jumps on rank 1 does."""
    torch.manual_seed(0)
    layer = SparseAttentionLayer(16, 2, 128, 16)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    schedule = SparsitySchedule(0.4, begin=2, end=2, every=10)
    scheduler = PatternScheduler(layer, schedule, Pruning(sinks=0, window=0))
    torch.manual_seed(rank + 1)
    for _ in range(2):
        model(torch.randn(2, 128, 16)).square().mean().backward()
        scheduler.step(1.0)
    own = layer.attention.tracker.history[0] / (1 - 0.9**2)
    return own, layer.pattern.mask(), scheduler.step(1.0 + rank * 1.2)  # 1.6 on average


def pruned_by_gates(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's gates, beside a model that averages its own gradients alone, and its mask."""
    learned = LearnedPattern(2, 1, 128, 16, gates=True)
    assert learned.gates is not None
    torch.nn.init.normal_(learned.gates.logits, generator=torch.Generator().manual_seed(rank))
    rule = Pruning(sinks=0, window=0)
    PatternScheduler(learned, SparsitySchedule(0.4), rule).prune(0.4)
    return learned.gates.probabilities().detach(), learned.pattern.mask()


def importance_of_one(rank: int, reduction: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What rank 0 saw, and the importance, where rank 1 saw nothing but a short input."""
    learned = LearnedPattern(2, 1, 128, 16, importance=ImportanceOptions(reduction=reduction))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, (128, 64)[rank], heads, 16) for heads in (2, 1, 1))
    learned(q, k, v)
    return learned.tracker.history.sum(0), learned.importance()


def work(rank: int, folder: str) -> None:
    """One of two ranks under DDP.

    The DDP model goes before its process group does.  Otherwise it holds the group last and ends
    it with Python's lock in hand, which a thread of gloo may wait for: a deadlock.
    """
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(Path(folder) / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    seen = [importance_of_one(rank, x) for x in ("mean", "max", "ema")]
    torch.save((train(rank), pruned_by_gates(rank), seen), Path(folder) / f"{rank}.pt")
    torch.distributed.barrier()  # no rank may go while the other still talks to it
    torch.distributed.destroy_process_group()


def test_ranks_hold_one_pattern(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    ((own, mask, jumped), gated, seen), ((other, twin, jumped_too), gated_too, seen_too) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)
    )
    assert not torch.allclose(own, other), "each rank saw its own data"
    assert torch.equal(mask, twin)
    visible = torch.ones(8, 8).tril().bool()
    rule = Pruning(sinks=0, window=0)
    assert torch.equal(mask, rule.mask((own + other) / 2, visible, 0.4))
    assert not torch.equal(mask, rule.mask(own, visible, 0.4))
    assert torch.equal(gated[1], rule.mask((gated[0] + gated_too[0]) / 2, visible, 0.4))
    assert torch.equal(gated[1], gated_too[1])
    for (history, importance), (_, importance_too), factor in zip(
        seen, seen_too, (1, 1, 10), strict=True
    ):
        torch.testing.assert_close(importance, history * factor)
        assert torch.equal(importance, importance_too)
    assert jumped is True
    assert jumped_too is True
