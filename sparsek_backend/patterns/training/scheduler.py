"""Pruning patterns while a model trains."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from sparsek_backend.patterns.training.learned import LearnedPattern
from sparsek_backend.patterns.training.pruning import Pruning
from sparsek_backend.patterns.training.schedule import SparsitySchedule
from sparsek_backend.patterns.training.tracker import over_ranks

_SMOOTHING = 0.9
"""Decay of the loss that a jump is measured against."""


class PatternScheduler:
    """Prunes all learned patterns of a model as training goes on; step it after the optimiser.

    Patterns are pruned again from the importance of all blocks, so a block may return.  Where the
    loss jumps before the next pruning, the patterns before it come back, and the next pruning
    goes half as far.  Data parallel ranks see one importance and one loss, so they hold one
    pattern; every rank has to step.

    Args:
        modules: a module that holds :class:`LearnedPattern` modules, or several.
        schedule: sparsity by step.
        pruning: which blocks stay.
        tolerance: a loss this much above its average before the pruning is a jump: 0.5 is
            50 %.
        group: the process group to reduce over; the default one when ``None``.

    Raises:
        ValueError: no learned pattern in the modules, or a tolerance that is not above 0.
    """

    def __init__(
        self,
        modules: torch.nn.Module | Iterable[torch.nn.Module],
        schedule: SparsitySchedule,
        pruning: Pruning | None = None,
        *,
        tolerance: float = 0.5,
        group: Any = None,
    ) -> None:
        roots = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
        found = [m for root in roots for m in root.modules() if isinstance(m, LearnedPattern)]
        if not found:
            raise ValueError("modules: expected at least one LearnedPattern, got none")
        if not tolerance > 0.0:
            raise ValueError(f"tolerance: expected a number above 0, got {tolerance}")
        self.patterns = list(dict.fromkeys(found))
        self.schedule = schedule
        self.pruning = pruning or Pruning()
        self.tolerance = tolerance
        self.group = group
        self.steps = 0
        self.sparsity = 0.0
        self.reverts = 0
        self._setbacks = 0
        self._loss: float | None = None
        self._before: tuple[list[torch.Tensor], float] | None = None

    def step(self, loss: float | torch.Tensor | None = None) -> bool:
        """Count a step; prune or revert where it is due.

        Args:
            loss: of this step; without it nothing is ever reverted.  Reading it waits for the
                device.

        Returns:
            Whether the patterns changed.
        """
        self.steps += 1
        reverted = loss is not None and self._watch(loss)
        if reverted or not self.schedule.due(self.steps):
            return reverted
        self._setbacks = 0 if self._before is not None else self._setbacks
        further = self.schedule.sparsity(self.steps) - self.sparsity  # less of it after setbacks
        self.prune(self.sparsity + further * 0.5**self._setbacks)
        return True

    @torch.no_grad()
    def prune(self, sparsity: float) -> None:
        """Prune all patterns to a sparsity now."""
        self._before = ([p.keep.clone() for p in self.patterns], self.sparsity)
        importance = [x.importance(self.group) for x in self.patterns]
        masks = self.pruning.masks(importance, [x.visible for x in self.patterns], sparsity)
        for pattern, mask in zip(self.patterns, masks, strict=True):
            pattern.set_mask(mask)
        self.sparsity = sparsity

    def sparsity_loss(self) -> torch.Tensor:
        """The auxiliary loss of all gates towards the schedule's sparsity; 0 without gates."""
        target = self.schedule.sparsity(self.steps)
        losses = [
            p.gates.sparsity_loss(p.visible, target) for p in self.patterns if p.gates is not None
        ]
        return torch.stack(losses).mean() if losses else self.patterns[0].keep.new_zeros(()).float()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state; patterns and importance are in the modules' own."""
        masks, sparsity = self._before or (None, None)
        return {
            "steps": self.steps,
            "sparsity": self.sparsity,
            "reverts": self.reverts,
            "setbacks": self._setbacks,
            "loss": self._loss,
            "masks_before": masks,
            "sparsity_before": sparsity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            ValueError: a state of other patterns.
        """
        due = [p.keep.shape for p in self.patterns]
        given = [mask.shape for mask in state["masks_before"] or ()]
        if given and given != due:
            raise ValueError(
                f"masks_before: expected masks of shapes {[list(x) for x in due]}, "
                f"got {[list(x) for x in given]}"
            )
        self.steps, self.sparsity = state["steps"], state["sparsity"]
        self.reverts, self._setbacks = state["reverts"], state["setbacks"]
        self._loss, masks = state["loss"], state["masks_before"]
        self._before = None if masks is None else (list(masks), state["sparsity_before"])

    def _watch(self, given: float | torch.Tensor) -> bool:
        """Bring the earlier patterns back if the loss jumped since the last pruning."""
        device = self.patterns[0].keep.device
        value = torch.as_tensor(given, dtype=torch.float32, device=device).detach()
        loss = over_ranks(value, "mean", self.group).item()
        jumped = self._loss is not None and not (
            loss <= self._loss + self.tolerance * abs(self._loss)  # losses may be negative
        )
        if jumped and self._before is not None:
            masks, self.sparsity = self._before
            for pattern, mask in zip(self.patterns, masks, strict=True):
                pattern.set_mask(mask.to(pattern.keep.device))
            self._before = None
            self._setbacks += 1
            self.reverts += 1
            return True
        if math.isfinite(loss):
            before = loss if self._loss is None else self._loss
            self._loss = _SMOOTHING * before + (1.0 - _SMOOTHING) * loss
        return False
