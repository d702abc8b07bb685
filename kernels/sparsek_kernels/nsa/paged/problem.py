"""One call of native sparse attention over pages: its tensors and its sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.nsa.paged.cache import NSAPages
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.paged.batch import PagedBatch


@dataclass(frozen=True)
class PagedProblem:
    """The new tokens of a batch and the pages that they attend.

    Args:
        q: ``[T, Hq, D]``; the decodes' tokens come first.
        pages: one layer's cache, which holds the tokens and the blocks that they complete.
        batch: the requests.
        spec: block sizes and counts.
        softmax_scale: factor of ``q . k``.
    """

    q: torch.Tensor
    pages: NSAPages
    batch: PagedBatch
    spec: NSASpec
    softmax_scale: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self.q.shape[1]) // self.pages.num_kv_heads
