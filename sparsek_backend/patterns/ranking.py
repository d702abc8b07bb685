"""Choosing blocks by weight, after those that stay whatever they weigh.

Sinks and the nearest blocks stay: a sink draws attention that carries hardly any value (Xiao et
al., arXiv 2309.17453), and counting it would hide the rest.  A row without either keeps its
heaviest block, so that no query loses all its keys.
"""

from __future__ import annotations

import torch


def fixed_blocks(mass: torch.Tensor, listed: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    """Listed blocks that are always kept, ``[P, R, C]`` bool.

    Args:
        window: latest key blocks, a query block's own included; as many after it where listed.
    """
    rows, cols = mass.shape[1:]
    row = torch.arange(rows, device=mass.device)[:, None] + (cols - rows)
    col = torch.arange(cols, device=mass.device)[None, :]
    fixed = listed & ((col < sinks) | ((row - col).abs() < window))
    best = mass.masked_fill(~listed, float("-inf")).argmax(2, keepdim=True)
    heaviest = torch.zeros_like(listed).scatter_(2, best, True) & listed
    return fixed | (heaviest & ~fixed.any(2, keepdim=True))


def heaviest_blocks(
    mass: torch.Tensor, listed: torch.Tensor, fixed: torch.Tensor, count: int
) -> torch.Tensor:
    """The fixed and then the heaviest listed blocks, ``count`` of each pattern if it has as many.

    Args:
        fixed: ``[P, R, C]`` bool, from :func:`fixed_blocks`; at most ``count`` in a pattern.
    """
    weight = mass.masked_fill(~listed, float("-inf")).masked_fill(fixed, float("inf")).flatten(1)
    order = weight.argsort(dim=1, descending=True, stable=True)
    counts = listed.flatten(1).sum(1).clamp(max=count)
    chosen = torch.arange(order.shape[1], device=order.device) < counts[:, None]
    return torch.zeros_like(chosen).scatter_(1, order, chosen).view_as(listed)
