"""The FlashAttention that vLLM ships, for prefills that attend everything or one window.

A prompt within the budget has nothing to gain from selection and must lose nothing either: it
takes the fastest dense kernel on the machine, over the same pages.  Where vLLM has no
FlashAttention for a layer, SparseK's own dense path serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparsek_backend.vllm_backend import compat
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment


class FlashPrefill:
    """vLLM's FlashAttention over our pages."""

    def __init__(self, attend: Callable[..., Any], version: int) -> None:
        self._attend = attend
        self.version = version
        self._pages: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def serves(segment: Segment) -> bool:
        """Whether FlashAttention has the segment's mask; decodes keep to the paged kernels."""
        return segment.policy.is_band and not segment.decodes

    def __call__(self, operands: PagedOperands, segment: Segment) -> None:
        """Attend the queries of ``segment``; writes ``operands.out`` where it has queries.

        FlashAttention takes scratch for every row that it is given, so it is given no others.
        """
        batch, window = segment.batch, segment.policy.window_size
        q, out = operands.q, operands.out
        if batch.first_row or batch.num_prefill_tokens != q.shape[0]:  # views take microseconds
            rows = slice(batch.first_row, batch.first_row + batch.num_prefill_tokens)
            q, out = q[rows], out[rows]
        keys, values = self._views(operands)
        offsets = batch.derived("own offsets", lambda: batch.cu_seqlens_q - batch.first_row)
        self._attend(
            q=q,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=offsets,
            max_seqlen_q=batch.max_query_len,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=operands.softmax_scale,
            causal=True,
            window_size=[-1, -1] if window is None else [window - 1, 0],
            block_table=batch.block_table,
            fa_version=self.version,
            s_aux=operands.sinks,
        )

    def _views(self, operands: PagedOperands) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as ``[pages, page_size, Hkv, D]``, made once for a layer's pages."""
        k_cache, v_cache = operands.k_cache, operands.v_cache
        if not (self._pages and self._pages[0] is k_cache and self._pages[1] is v_cache):
            views = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
            self._pages = (k_cache, v_cache, *views)
        return self._pages[2], self._pages[3]


def find_flash(layer: Any) -> FlashPrefill | None:
    """Return FlashAttention for the dense prefills of a :class:`SparseKImpl`, or ``None``.

    Over an fp8 cache it would round the queries too.  Ranks that hold the context between them
    attend every prefill by the paged kernels.  Where results must not depend on the batch, prefills
    and decodes share one kernel.
    """
    if layer.batch_invariant or layer.has_fp8_cache or layer.dcp_world_size > 1:
        return None
    if layer.fallback_reason is not None or torch.get_default_dtype() == torch.float32:
        return None
    found = compat.flash_attention(layer.head_size, layer.sinks is not None)
    return None if found is None else FlashPrefill(*found)
