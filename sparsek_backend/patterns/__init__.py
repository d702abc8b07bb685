"""Block-sparse attention patterns: build, learn, prune, save, show.

``sparsek_kernels.block_sparse_attention(q, k, v, pattern)`` executes them; docs/patterns.md shows
each name in use.
"""

from __future__ import annotations

from sparsek_backend.patterns.learn import BlockMass, learn_model_patterns, learn_pattern
from sparsek_backend.patterns.pattern import BlockSparsePattern

__all__ = ["BlockMass", "BlockSparsePattern", "learn_model_patterns", "learn_pattern"]
