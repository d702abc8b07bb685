"""The tensors of one call of paged attention, as one object from the api to every kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparsek_kernels.paged.seer.gates import Gates


@dataclass(frozen=True)
class PagedOperands:
    """Queries, one layer's cache and the output.

    Args:
        q: ``[T, Hq, D]``.
        k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``.
        out: ``[T, Hq, D]``, written.
        softmax_scale: factor of ``q . k``.
        k_summary: ``[num_pages, Hkv, summary_bytes]`` uint8 (sketch.py, or infllm/means.py or
            seer/gates.py for a ranking by these), or ``None`` where nothing is selected.
        sinks: ``[Hq]`` learned logits that join the softmax denominator only, or ``None``.
        k_scale, v_scale: factors of an fp8 cache; ``k_scale`` also of its sketch.
        lists: ``[rows, Hkv, scored_blocks]`` int32 of ``block_lists``, by which prefills choose
            blocks in place of scores; or ``None``.
        lse: ``[T, Hq]`` float32, contiguous, written, where several ranks hold the pages between
            them: the natural log-sum-exp of each row's logits; else ``None``.
        gates: of a ranking by them, else ``None``.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    softmax_scale: float
    k_summary: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    lists: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    gates: Gates | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k_cache.shape[1]

    def of_rows(self, rows: slice) -> PagedOperands:
        """The operands of some rows of ``q`` and ``out``."""
        if rows.indices(self.q.shape[0]) == (0, self.q.shape[0], 1):
            return self
        lse = None if self.lse is None else self.lse[rows]
        return replace(self, q=self.q[rows], out=self.out[rows], lse=lse)
