"""Learning patterns while a model trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsek_backend.patterns.masses import sampled_block_masses, visible_blocks
from sparsek_backend.patterns.training.gates import BlockGates, gated_attention
from sparsek_backend.patterns.training.heads import WindowErrors, fit_windows, window_sizes
from sparsek_backend.patterns.training.layer import SparseAttentionLayer
from sparsek_backend.patterns.training.learned import ImportanceOptions, LearnedPattern
from sparsek_backend.patterns.training.pruning import Pruning, overlap
from sparsek_backend.patterns.training.schedule import SparsitySchedule
from sparsek_backend.patterns.training.scheduler import PatternScheduler
from sparsek_backend.patterns.training.tracker import ImportanceTracker

if TYPE_CHECKING:
    from sparsek_backend.patterns.training.callback import PatternCallback as PatternCallback

__all__ = [
    "BlockGates",
    "ImportanceOptions",
    "ImportanceTracker",
    "LearnedPattern",
    "PatternCallback",
    "PatternScheduler",
    "Pruning",
    "SparseAttentionLayer",
    "SparsitySchedule",
    "WindowErrors",
    "fit_windows",
    "gated_attention",
    "overlap",
    "sampled_block_masses",
    "visible_blocks",
    "window_sizes",
]


def __getattr__(name: str) -> object:
    """Import the callback, which needs Transformers, when it is asked for."""
    if name == "PatternCallback":
        from sparsek_backend.patterns.training.callback import PatternCallback

        return PatternCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
