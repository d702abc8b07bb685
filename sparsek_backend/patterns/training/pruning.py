"""Which blocks stay: the heaviest, above a threshold, and not the same in every head."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sparsek_backend.patterns.ranking import fixed_blocks, heaviest_blocks
from sparsek_kernels.checks import check_int


@dataclass(frozen=True)
class Pruning:
    """A rule that turns importance into a mask.

    Sinks and window stay; of the other blocks those at ``threshold`` and above stay, and of these
    the heaviest, as many as the sparsity leaves.  A rule without a threshold is top-k, sparsity 0
    leaves the threshold alone.

    Args:
        threshold: least importance of a block, as a share of its row's total.
        sinks: first key blocks, which stay.
        window: latest key blocks, a query block's own included, which stay; without causality as
            many after it.
        diversity: from 0 to 1: how much less a block counts for a pattern where the patterns
            before have it all.
        pooled: whether the patterns of a layer share one budget, so that heads that look far get
            more blocks than those that look near.  ``"model"``: the patterns of all layers share
            one; a block then counts by its share of its layer's importance.
        by_distance: whether blocks as far from the diagonal have one weight, their mean; sinks keep
            their own.  What is peculiar to the texts that were seen is then not learned.
    """

    threshold: float = 0.0
    sinks: int = 1
    window: int = 1
    diversity: float = 0.0
    pooled: bool | Literal["model"] = False
    by_distance: bool = False

    def __post_init__(self) -> None:
        check_int("sinks", self.sinks, 0)
        check_int("window", self.window, 0)
        for name in ("threshold", "diversity"):
            if not 0.0 <= (value := getattr(self, name)) <= 1.0:
                raise ValueError(f"{name}: expected a number from 0 to 1, got {value}")
        if self.pooled not in (False, True, "model"):
            raise ValueError(f"pooled: expected True, False or 'model', got {self.pooled!r}")
        if self.pooled and self.diversity:
            raise ValueError(f"diversity: expected 0 where pooled, got {self.diversity}")

    def masks(
        self, importance: Sequence[torch.Tensor], visible: Sequence[torch.Tensor], sparsity: float
    ) -> list[torch.Tensor]:
        """The mask of every layer, as :meth:`mask` makes it.

        Args:
            importance: ``[P, R, C]`` of each layer.
            visible: ``[R, C]`` bool of each layer.
            sparsity: share of the visible blocks to leave out.

        Raises:
            ValueError: one budget for layers whose grids of blocks differ.
        """
        if self.pooled != "model":
            return [self.mask(*x, sparsity) for x in zip(importance, visible, strict=True)]
        if not all(torch.equal(x, visible[0]) for x in visible):
            raise ValueError("visible: expected one grid of blocks where a model shares a budget")
        seen = [x.masked_fill(~visible[0], 0.0) for x in importance]
        shares = [x / x.sum().clamp(min=1e-30) for x in seen]
        whole = self.mask(torch.cat(shares), visible[0], sparsity)
        return list(whole.split([len(x) for x in importance]))

    def mask(
        self, importance: torch.Tensor, visible: torch.Tensor, sparsity: float
    ) -> torch.Tensor:
        """``[P, R, C]`` bool: the blocks that stay.

        Args:
            importance: ``[P, R, C]``.
            visible: ``[R, C]`` bool, the blocks that causality leaves.
            sparsity: share of the visible blocks to leave out, from 0 to below 1; less is left out
                where sinks and window alone are more than the rest.
        """
        if not 0.0 <= sparsity < 1.0:
            raise ValueError(f"sparsity: expected a number from 0 to below 1, got {sparsity}")
        importance = importance.masked_fill(~visible, 0.0)  # gates know no causality
        budget = max(round((1.0 - sparsity) * int(visible.sum())), 1)
        if self.by_distance:
            importance = mean_by_distance(importance, self.sinks)
        shares = importance / importance.sum(2, keepdim=True).clamp(min=1e-30)
        if self.pooled:
            seen = visible.expand_as(importance)
            fixed = fixed_blocks(importance, seen, self.sinks, self.window)
            listed = (seen & (shares >= self.threshold)) | fixed
            count = _room(budget * len(importance), fixed, seen)
            weight, listed_rows, fixed_rows = (
                x.flatten(0, 1)[None] for x in (importance, listed, fixed)
            )
            return heaviest_blocks(weight, listed_rows, fixed_rows, count).view_as(listed)
        taken = torch.zeros_like(importance[0])
        masks = []
        for index, mass in enumerate(importance):
            weight = mass * (1.0 - self.diversity * taken / max(index, 1))
            fixed = fixed_blocks(weight[None], visible[None], self.sinks, self.window)
            listed = (visible & (shares[index] >= self.threshold))[None] | fixed
            count = _room(budget, fixed, visible)
            masks.append(heaviest_blocks(weight[None], listed, fixed, count)[0])
            taken = taken + masks[-1]
        return torch.stack(masks)


def _room(budget: int, fixed: torch.Tensor, visible: torch.Tensor) -> int:
    """How many blocks stay; warns where sinks and window are all of them."""
    least, most = int(fixed.sum()), int(visible.sum())
    if budget <= least and budget < most:
        warnings.warn(
            f"sparsity: leaves {budget} of {most} blocks, sinks and window alone are {least}, so "
            "none is chosen; take a lower sparsity, smaller blocks or longer texts",
            RuntimeWarning,
            stacklevel=3,
        )
    return max(budget, least)


def mean_by_distance(importance: torch.Tensor, sinks: int) -> torch.Tensor:
    """``[P, R, C]``: for each block the mean of its diagonal, without the first ``sinks`` columns.

    Those columns keep the values of ``importance [P, R, C]``.
    """
    rows, columns = importance.shape[1:]
    row = torch.arange(rows, device=importance.device)[:, None]
    column = torch.arange(sinks, max(columns, sinks), device=importance.device)
    diagonal = column - row + rows  # [R, C - sinks], from 1 on
    flat = diagonal.flatten()
    sums = importance.new_zeros(len(importance), rows + columns)
    sums.index_add_(1, flat, importance[..., sinks:].flatten(1))
    counts = torch.bincount(flat, minlength=rows + columns).clamp(min=1)
    return torch.cat([importance[..., :sinks], (sums / counts)[:, diagonal]], dim=-1)


def overlap(mask: torch.Tensor) -> float:
    """Mean Jaccard index of every two of the patterns ``mask [P, R, C]``: shared blocks over all.

    1 where all patterns are the same, and for a single one.
    """
    flat = mask.flatten(1).double()
    both = flat @ flat.T
    sizes = flat.sum(1)
    either = sizes[:, None] + sizes - both
    first, second = torch.triu_indices(len(flat), len(flat), 1)
    if not len(first):
        return 1.0
    return float((both / either.clamp(min=1.0))[first, second].mean())
