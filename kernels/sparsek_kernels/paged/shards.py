"""Decoding over a cache whose pages several ranks hold between them.

Every rank has some pages of each sequence, all ranks have the same queries.  Scores are completed
by an elementwise maximum over the ranks, so that all of them choose the blocks that one rank with
all pages would choose.  Each then attends its own pages::

    out, lse = attend_shard(q, k_cache, v_cache, batch, policy, largest=largest, ...)
    merged = merge_shards(outputs of all ranks, their log-sum-exps)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparsek_kernels.checks import check_heads, check_scale, check_tensor
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.checks import (
    check_batch,
    check_batch_layout,
    check_cache,
    check_cache_dtype,
    check_summary,
    check_triton_layout,
    fit_pages,
    given_summary,
)
from sparsek_kernels.paged.cpu.shards import attend_shard_eager
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SelectionPolicy


def attend_shard(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    largest: Callable[[torch.Tensor], torch.Tensor],
    softmax_scale: float | None = None,
    k_summary: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of decoded tokens over the pages that this rank holds, with its log-sum-exp.

    All ranks call it together, with the same queries and sequences.

    Args:
        q: ``[T, Hq, D]``, fp16/bf16/fp32, the same on every rank.
        k_cache, v_cache: ``[num_pages, Hkv, page_size, D]``, any strides.
        batch: decodes alone; -1 in its ``block_table`` stands for a page of another rank.
        policy: what a query attends (docs/selection.md).
        largest: returns a float32 tensor's elementwise maximum over the ranks.
        softmax_scale: default ``D ** -0.5``.
        k_summary: ``[num_pages, Hkv, summary_bytes(page_size, D)]`` uint8; needed when blocks are
            selected.

    Returns:
        ``[T, Hq, Dv]`` float32, 0 where no key is here, and the natural log-sum-exp of the logits,
        ``[T, Hq]`` float32, -inf there.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
        NotImplementedError: InfLLM-v2's scores, or a layout that the kernels lack.
    """
    heads, page_size, dim = check_cache(k_cache, v_cache)
    check_tensor("q", q, ("T", "Hq", dim), device=k_cache.device)
    check_heads(q.shape[1], heads)
    check_cache_dtype(k_cache, q.dtype, 1.0, 1.0)
    check_summary(k_summary, k_cache)
    if policy.ranking != "masses":
        raise NotImplementedError(
            f"policy: pages of several ranks are ranked by masses, got ranking={policy.ranking!r}; "
            "keep whole sequences on a rank and call paged_attention"
        )
    if batch.num_prefills:
        raise ValueError(f"batch: expected decodes alone, got {batch.num_prefills} prefills")
    rule = fit_pages(policy.per_token(), page_size)
    if rule.selects_blocks:
        given_summary(k_summary)
    check_batch(q, batch, k_cache, shared=True)
    out = q.new_empty((*q.shape[:2], v_cache.shape[-1]), dtype=torch.float32)
    scale = check_scale(softmax_scale, dim)
    operands = PagedOperands(q, k_cache, v_cache, out, scale, k_summary)
    if not q.is_cuda:
        return out, attend_shard_eager(operands, batch, rule, largest)
    from sparsek_kernels.paged.launch import shards as launch

    check_triton_layout(q=q, k_cache=k_cache, v_cache=v_cache, k_summary=k_summary)
    check_batch_layout(batch)
    return out, launch.attend_shard(operands, batch, rule, largest)


def merge_shards(
    outs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention over the keys of all ranks, ``[T, H, D]`` float32, from each rank's own.

    Args:
        outs: ``[ranks, T, H, D]`` float32.
        lses: ``[ranks, T, H]`` float32 natural log-sum-exps; -inf where a rank has no key.
        sinks: ``[H]`` learned logits that join the softmax denominator only.
    """
    total = lses.logsumexp(0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float())
    weights = torch.exp(lses - total).nan_to_num(0.0)  # of rows without any key: nothing
    return (outs * weights.unsqueeze(-1)).sum(0)
