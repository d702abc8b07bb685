"""Decoding over a cache whose pages several ranks hold between them.

Every rank has some pages of each sequence, all ranks have the same queries.  What blocks are ranked
by is completed by an exchange between the ranks, so that all of them choose the blocks that one
rank with all pages would choose.  Each then attends its own pages::

    out, lse = attend_shard(q, k_cache, v_cache, batch, policy, ranks=ranks, ...)
    merged = merge_shards(outputs of all ranks, their log-sum-exps)
"""

from __future__ import annotations

import torch

from sparsek_kernels.checks import check_scale
from sparsek_kernels.paged.api import check_segment, default_indexers
from sparsek_kernels.paged.attend import attend
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.checks import check_cache, fit_both
from sparsek_kernels.paged.index.base import Indexer, Indexers
from sparsek_kernels.paged.operands import PagedOperands, Ranks
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy


def attend_shard(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy | StepPolicy,
    *,
    ranks: Ranks,
    softmax_scale: float | None = None,
    k_summary: torch.Tensor | None = None,
    index: Indexer | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of decoded tokens over the pages that this rank holds, with its log-sum-exp.

    All ranks call it together, with the same queries and sequences.

    Args:
        q: ``[T, Hq, D]``, fp16/bf16/fp32, the same on every rank.
        k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``, any strides.
        batch: decodes alone; -1 in its ``block_table`` stands for a page of another rank.
        policy: what a query attends (docs/selection.md).
        ranks: has ``largest(x)``, a tensor's elementwise maximum over the ranks, and ``gather(x)``,
            the tensors of all of them, ``[ranks, ...]``.
        softmax_scale: default ``D ** -0.5``.
        k_summary: ``[num_pages, Hkv, bytes]`` uint8, at least the indexer's ``page_bytes``; needed
            when blocks are selected.
        index: what chooses the blocks of decoded tokens; default: :func:`default_indexers`.

    Returns:
        ``[T, Hq, Dv]`` float32, 0 where no key is here, and the natural log-sum-exp of the logits,
        ``[T, Hq]`` float32, -inf there.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
        NotImplementedError: an indexer of whole sequences, or a layout that the kernels lack.
    """
    _, page_size, dim = check_cache(k_cache, v_cache)
    if batch.num_prefills:
        raise ValueError(f"batch: expected decodes alone, got {batch.num_prefills} prefills")
    rule = fit_both(StepPolicy.of(policy), page_size)
    segment = Segment(batch, rule.decode)
    indexers = default_indexers(rule) if index is None else Indexers(decode=index)
    index = indexers.of(segment)
    if index is not None and not index.shares_context:
        raise NotImplementedError(
            f"index: pages of several ranks are not served with {type(index).__name__}; keep whole "
            "sequences on a rank and call paged_attention"
        )
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    out = q.new_zeros((*q.shape[:2], v_cache.shape[-1]), dtype=torch.float32)
    scale = check_scale(softmax_scale, dim)
    operands = PagedOperands(q, k_cache, v_cache, out, scale, k_summary, lse=lse, ranks=ranks)
    check_segment(operands, segment, index)
    attend(operands, segment, None if index is None else index.select(operands, segment))
    return out, lse
