"""Steps a pattern scheduler from the Trainer of Transformers."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_backend.extras import needing
from sparsek_backend.patterns.training.scheduler import PatternScheduler

with needing("the callback needs Transformers", extra="eval"):
    from transformers import TrainerCallback


class PatternCallback(TrainerCallback):  # type: ignore[misc]
    """Steps a :class:`PatternScheduler` after every optimiser step, with the losses in between.

    Sparsity and reverts are in the Trainer's logs.

    Args:
        scheduler: over the patterns that the model attends.
    """

    def __init__(self, scheduler: PatternScheduler) -> None:
        self.scheduler = scheduler
        self._losses: list[torch.Tensor] = []
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Follow the model to its device, where the Trainer moved it, and listen to its losses."""
        self.on_train_end(args, state, control)  # of a training that was interrupted
        model = kwargs["model"]
        for pattern in self.scheduler.patterns:
            pattern.to(model.device)
        self._hook = model.register_forward_hook(self._listen)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen no more."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._losses = None, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step the scheduler with the mean loss of the step."""
        losses, self._losses = self._losses, []
        self.scheduler.step(torch.stack(losses).mean() if losses else None)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add sparsity and reverts to what is logged."""
        logs = kwargs.get("logs")
        if logs is not None:
            logs["pattern_sparsity"] = self.scheduler.sparsity
            logs["pattern_reverts"] = self.scheduler.reverts

    def _listen(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        loss = getattr(output, "loss", None)
        if module.training and loss is not None:
            self._losses.append(loss.detach().float())
