"""One call of native sparse attention over pages: its tensors and its sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.nsa.paged.cache import Compression, NSAPages
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.paged.batch import PagedBatch


@dataclass(frozen=True)
class PagedProblem:
    """Checked inputs of one call, as ``nsa_paged_attention`` names them."""

    q: torch.Tensor
    pages: NSAPages
    batch: PagedBatch
    spec: NSASpec
    compression: Compression
    window_size: int
    softmax_scale: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self.q.shape[1]) // self.pages.num_kv_heads
