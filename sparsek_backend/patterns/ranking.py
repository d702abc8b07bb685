"""Choosing blocks by weight; the heaviest block of every row always comes first."""

from __future__ import annotations

import torch


def heaviest_blocks(mass: torch.Tensor, listed: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` heaviest of the listed blocks of each pattern, ``[P, R, C]`` bool.

    Args:
        mass: ``[P, R, C]`` weights.
        listed: ``[P, R, C]`` bool, the blocks to choose from.
        count: blocks to keep in each pattern, at least its rows that list any.
    """
    order, _ = _ranked(mass, listed)
    counts = listed.flatten(1).sum(1).clamp(max=count)
    return _first(order, counts).view_as(listed)


def blocks_holding(mass: torch.Tensor, share: float) -> torch.Tensor:
    """The fewest blocks of each pattern that hold ``share`` of its mass, ``[P, R, C]`` bool.

    Args:
        mass: ``[P, R, C]`` weights; a block without mass is never chosen.
        share: above 0 and up to 1.
    """
    listed = mass > 0
    order, rows = _ranked(mass, listed)
    reached = mass.flatten(1).double().gather(1, order).cumsum(1)
    counts = (reached < share * reached[:, -1:]).sum(1) + 1
    counts = torch.minimum(torch.maximum(counts, rows), listed.flatten(1).sum(1))
    return _first(order, counts).view_as(listed)


def _ranked(mass: torch.Tensor, listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[P, R C]`` blocks from first to last, and ``[P]`` how many are the heaviest of a row."""
    mass = mass.masked_fill(~listed, float("-inf"))
    best = torch.zeros_like(listed).scatter_(2, mass.argmax(2, keepdim=True), True) & listed
    by_mass = mass.flatten(1).argsort(dim=1, descending=True, stable=True)
    heaviest = best.flatten(1)
    later = (~heaviest.gather(1, by_mass)).int().argsort(dim=1, stable=True)
    return by_mass.gather(1, later), heaviest.sum(1)


def _first(order: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``[P, R C]`` bool: the first ``counts [P]`` blocks of each order."""
    chosen = torch.arange(order.shape[1], device=order.device) < counts[:, None]
    return torch.zeros_like(chosen).scatter_(1, order, chosen)
