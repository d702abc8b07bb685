"""How sparsity grows while a model trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sparsek_kernels.checks import check_int

Shape = Literal["cubic", "linear", "constant"]


@dataclass(frozen=True)
class SparsitySchedule:
    """Sparsity by step: dense up to ``begin``, growing up to ``end``, then final.

    Args:
        final: share of the visible blocks left out at last, from 0 to below 1.
        begin: steps at the start in which nothing is pruned.
        end: step at which ``final`` is reached.
        every: steps between prunings, which go on after ``end``, so that blocks may return.
        initial: sparsity of the first pruning.
        shape: ``cubic`` (Zhu and Gupta, arXiv 1710.01878: fast at first), ``linear``, or
            ``constant``: ``final`` from ``begin`` on.
    """

    final: float
    begin: int = 0
    end: int = 1000
    every: int = 100
    initial: float = 0.0
    shape: Shape = "cubic"

    def __post_init__(self) -> None:
        for name in ("final", "initial"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(
                    f"{name}: expected a number from 0 to below 1, got {getattr(self, name)}"
                )
        check_int("begin", self.begin, 0)
        check_int("every", self.every, 1)
        check_int("end", self.end, self.begin)
        if self.shape not in get_args(Shape):
            raise ValueError(f"shape: expected cubic, linear or constant, got {self.shape!r}")

    def due(self, step: int) -> bool:
        """Whether patterns are pruned after ``step`` steps."""
        regular = (step - self.begin) % self.every == 0
        return step >= max(self.begin, 1) and (regular or step == self.end)

    def sparsity(self, step: int) -> float:
        """Share of the visible blocks to leave out after ``step`` steps."""
        if step < self.begin:
            return 0.0
        if self.shape == "constant" or step >= self.end:
            return self.final
        left = 1.0 - (step - self.begin) / (self.end - self.begin)
        left = left**3 if self.shape == "cubic" else left
        return self.final + (self.initial - self.final) * left
