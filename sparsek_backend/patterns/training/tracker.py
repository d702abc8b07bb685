"""Importance of blocks over the latest batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

from sparsek_kernels.checks import check_int

Reduction = Literal["mean", "max", "ema"]


class ImportanceTracker(torch.nn.Module):
    """Masses of batches, reduced to one importance for each block; kept in the state dict.

    Its tensors are no buffers: ``DistributedDataParallel`` would overwrite every rank's buffers
    with rank 0's, and with them what the other ranks saw.

    Args:
        shape: ``(P, R, C)``: patterns, query blocks and key blocks.
        reduction: ``mean`` or ``max`` over the latest ``window`` batches, or ``ema``, an
            exponential moving average over all.
        window: batches that ``mean`` and ``max`` look back.
        decay: of the moving average, from 0 to below 1; more looks further back.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        reduction: Reduction = "ema",
        window: int = 16,
        decay: float = 0.9,
    ) -> None:
        super().__init__()
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction: expected 'mean', 'max' or 'ema', got {reduction!r}")
        check_int("window", window, 1)
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay: expected a number from 0 to below 1, got {decay}")
        self.reduction: Reduction = reduction
        self.decay = decay
        kept = 1 if reduction == "ema" else window
        self.history = torch.zeros(kept, *shape)
        self.added = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def add(self, mass: torch.Tensor) -> None:
        """Count a batch, ``[P, R, C]``, unless it is not finite.  Does not wait for the device.

        Raises:
            ValueError: another shape.
        """
        if mass.shape != self.history.shape[1:]:
            raise ValueError(
                f"mass: expected shape {list(self.history.shape[1:])}, got {list(mass.shape)}"
            )
        place = (self.added % self.history.shape[0])[None]
        before, new = self.history.index_select(0, place), mass[None].float()
        if self.reduction == "ema":
            new = before.lerp(new, 1.0 - self.decay)
        # One overflow would stay in a moving average for ever.
        finite = mass.isfinite().all()
        self.history.index_copy_(0, place, torch.where(finite, new, before))
        self.added += finite

    def value(self, group: Any = None) -> torch.Tensor:
        """``[P, R, C]`` fp32 importance, of all ranks where training is data parallel.

        Ranks to which no batch was added, such as those that saw short inputs alone, do not count.

        Args:
            group: the process group to reduce over; the default one when ``None``.

        Raises:
            ValueError: no finite batch was added, on any rank.
        """
        share = over_ranks((self.added > 0).float(), "mean", group)  # of the ranks
        if not share:
            raise ValueError("tracker: expected at least one batch of finite masses, got none")
        added = max(int(self.added), 1)
        if self.reduction == "max":
            return over_ranks(self.history.amax(0), "max", group)
        if self.reduction == "ema":
            found = self.history[0] / (1.0 - self.decay**added)
        else:
            found = self.history.sum(0) / min(added, self.history.shape[0])
        return over_ranks(found, "mean", group) / share

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all batches."""
        self.history.zero_()
        self.added.zero_()

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> ImportanceTracker:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = fn(self.history)
        # Moved to another device, never cast to a lower precision.
        same = moved.dtype == self.history.dtype
        self.history = moved if same else self.history.to(moved.device)
        self.added = fn(self.added)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "history"] = self.history
        destination[prefix + "added"] = self.added

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, strict, missing, unexpected, errors = rest
        for name in ("history", "added"):
            ours, given = getattr(self, name), state_dict.get(prefix + name)
            if given is None:
                missing.extend([prefix + name] if strict else [])
            elif given.shape != ours.shape:
                errors.append(
                    f"{prefix}{name}: expected shape {list(ours.shape)}, got {list(given.shape)}"
                )
            else:
                with torch.no_grad():
                    ours.copy_(given)
        known = {prefix + "history", prefix + "added"}
        if strict:
            unexpected.extend(k for k in state_dict if k.startswith(prefix) and k not in known)


def over_ranks(value: torch.Tensor, how: Literal["mean", "max"], group: Any) -> torch.Tensor:
    """The mean or maximum of a tensor over the ranks; itself where there is one process."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return value
    value = value.clone()
    operation = distributed.ReduceOp.MAX if how == "max" else distributed.ReduceOp.SUM
    distributed.all_reduce(value, operation, group)
    return value / distributed.get_world_size(group) if how == "mean" else value
