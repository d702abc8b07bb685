"""A sketch for pages that nobody may read: its vectors outweigh any key's, up or down."""

from __future__ import annotations

import torch

from sparsek_kernels.paged import summary_bytes
from sparsek_kernels.paged.index.key_means.sketch import page_vectors, quantise


def worst_sketch(page_size: int, head_dim: int) -> torch.Tensor:
    """``[summary_bytes]`` uint8: the largest levels and scale, of either sign in turn."""
    vectors = torch.full((page_vectors(page_size), head_dim), 3e38)
    vectors[::2] *= -1.0
    found = torch.full((summary_bytes(page_size, head_dim),), 255, dtype=torch.uint8)
    rows = quantise(vectors).flatten()
    found[: rows.numel()] = rows
    return found
