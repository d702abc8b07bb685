"""Block sizes and sparsities that go together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """Block size and sparsity to begin with.

    Args:
        block_size: tokens along a side of a block.
        sparsity: share of the visible blocks that is left out.
    """

    block_size: int
    sparsity: float


PRESETS = {
    "default": Preset(32, 0.90),
    "large_graph": Preset(64, 0.95),
    "high_accuracy": Preset(16, 0.80),
}
