"""What pages keep for InfLLM-v2's scores on a GPU: the mean of every complete cell of 16 keys.

Vector ``n`` of a page and KV head is the mean of its tokens ``16 n`` to ``16 n + 15``, ``D``
numbers of bfloat16.  It is written when the last of them is there, from the keys in the page, so
that the order of writes leaves no trace.  Half the sum of two neighbours is the mean of 32 keys
that InfLLM-v2 scores.

The means take the place of records, and two bytes for a channel of 16 tokens.
"""

from __future__ import annotations

import torch

from sparsek_kernels.paged.policy import CELL_SIZE


def view_means(k_summary: torch.Tensor, page_size: int, head_dim: int) -> torch.Tensor:
    """View of the means, ``[..., page_size / 16, D]`` bfloat16."""
    cells = page_size // CELL_SIZE
    used = k_summary[..., : 2 * cells * head_dim]
    means: torch.Tensor = used.view(torch.bfloat16).unflatten(-1, (cells, head_dim))
    return means
