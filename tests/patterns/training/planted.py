"""A task that a known pattern solves: each block of queries needs the means of two key blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_backend.patterns.training import (
    ImportanceOptions,
    PatternScheduler,
    Pruning,
    SparseAttentionLayer,
    SparsitySchedule,
)

SIZE, CONTENT = 16, 8


def planted_mask(blocks: int, seed: int = 0) -> torch.Tensor:
    """``[blocks, blocks]`` bool: two earlier blocks of each, or its own."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(blocks, blocks, dtype=torch.bool)
    for row in range(blocks):
        mask[row, torch.randperm(row + 1, generator=generator)[:2]] = True
    return mask


def batch(mask: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``[4, N, CONTENT + blocks]``, whose last features name the block, and targets."""
    blocks = len(mask)
    content = torch.randn(4, blocks * SIZE, CONTENT, generator=generator)
    means = content.unflatten(1, (blocks, SIZE)).mean(2)
    weights = mask.float() / mask.sum(1, keepdim=True)
    target = torch.einsum("rc,bcd->brd", weights, means).repeat_interleave(SIZE, 1)
    block = torch.eye(blocks).repeat_interleave(SIZE, 0).expand(4, -1, -1)
    return torch.cat([content, block], 2), target


@dataclass
class Run:
    """What a training run left."""

    layer: SparseAttentionLayer
    scheduler: PatternScheduler
    losses: list[float]
    mask: torch.Tensor

    @property
    def recall(self) -> float:
        """Share of the planted blocks that the layer attends."""
        kept = self.layer.pattern.mask()[0]
        return float((kept & self.mask).sum() / self.mask.sum())


def train(steps: int = 140, blocks: int = 8, *, gates: bool = False) -> Run:
    """Train from dense to exactly as many blocks as are planted."""
    torch.manual_seed(0)
    mask, generator = planted_mask(blocks), torch.Generator().manual_seed(1)
    layer = SparseAttentionLayer(
        CONTENT + blocks, 2, blocks * SIZE, SIZE,
        heads="all", gates=gates, importance=ImportanceOptions(samples=2),
    )  # fmt: skip
    head = torch.nn.Linear(CONTENT + blocks, CONTENT)
    final = 1.0 - int(mask.sum()) / (blocks * (blocks + 1) / 2)
    schedule = SparsitySchedule(final, begin=40, end=120, every=20)
    scheduler = PatternScheduler(layer, schedule, Pruning(sinks=0, window=0))
    optimiser = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.03)
    losses = []
    for _ in range(steps):
        inputs, target = batch(mask, generator)
        loss = (head(layer(inputs)) - target).square().mean() * SIZE
        optimiser.zero_grad()
        (loss + scheduler.sparsity_loss()).backward()
        optimiser.step()
        scheduler.step(loss)
        losses.append(loss.item())
    return Run(layer, scheduler, losses, mask)
