"""Block-sparse attention patterns: build, learn, prune, save, show, execute.

``sparsek_kernels.block_sparse_attention(q, k, v, pattern)`` executes one; docs/patterns.md shows
each name in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsek_backend.patterns.learn import learn_pattern
from sparsek_backend.patterns.masks import (
    bigbird_pattern,
    dilated_pattern,
    longformer_pattern,
    random_pattern,
)
from sparsek_backend.patterns.model_file import ModelPatterns
from sparsek_backend.patterns.pattern import BlockSparsePattern

if TYPE_CHECKING:
    from sparsek_backend.patterns.models import attend_patterns as attend_patterns
    from sparsek_backend.patterns.models import learn_model_patterns as learn_model_patterns
    from sparsek_backend.patterns.models import learned_patterns as learned_patterns

__all__ = [
    "BlockSparsePattern",
    "ModelPatterns",
    "attend_patterns",
    "bigbird_pattern",
    "dilated_pattern",
    "learn_model_patterns",
    "learn_pattern",
    "learned_patterns",
    "longformer_pattern",
    "random_pattern",
]


def __getattr__(name: str) -> object:
    """Import the functions for Transformers models when they are asked for."""
    if name in ("attend_patterns", "learn_model_patterns", "learned_patterns"):
        from sparsek_backend.patterns import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
