"""Oracle of InfLLM-v2's selection (arXiv 2509.24663), query by query, in float64.

As OpenBMB's kernels compute it: 32 keys are averaged every 16 tokens, each query head takes the
softmax over the averages that end at or before the query, heads that share a KV head are added up,
and a block's score is the largest over the averages whose tokens lie in it (five of them, for
blocks of 64).  Initial blocks and the window's rank above all others.

Their kernels for GPUs approximate the softmax's denominator by averages of 128 keys; this is the
rule itself.
"""

from __future__ import annotations

import torch

from sparsek_kernels.paged.policy import SelectionPolicy

KERNEL_SIZE, KERNEL_STRIDE = 32, 16
"""Tokens of an average, and tokens between the first ones of two."""


def kernel_shares_reference(
    q: torch.Tensor, k: torch.Tensor, position: int, softmax_scale: float
) -> torch.Tensor:
    """Attention of one query to the averages that it may see, summed over each GQA group.

    Args:
        q: ``[Hq, D]``, the query at ``position``.
        k: ``[N, Hkv, D]``.

    Returns:
        ``[Hkv, averages]`` float64.
    """
    starts = range(0, position + 1 - KERNEL_SIZE + 1, KERNEL_STRIDE)
    means = [k[start : start + KERNEL_SIZE].double().mean(0) for start in starts]
    heads = q.double().unflatten(0, (k.shape[1], -1))
    logits = torch.einsum("hgd,nhd->hgn", heads, torch.stack(means)) * softmax_scale
    return logits.softmax(-1).sum(1)


def block_ranks_reference(
    q: torch.Tensor, k: torch.Tensor, position: int, policy: SelectionPolicy, softmax_scale: float
) -> torch.Tensor:
    """Scores of the blocks up to the query's own: ``[Hkv, blocks]``, inf for forced blocks."""
    size = policy.sel_block_size
    shares = kernel_shares_reference(q, k, position, softmax_scale)
    own = position // size
    ranks = torch.full((k.shape[1], own + 1), float("-inf"), dtype=torch.float64)
    for block in range(own + 1):
        if block < policy.sink_blocks or block >= own - policy.reach_blocks:
            ranks[:, block] = float("inf")
            continue
        for average in range(shares.shape[1]):
            first = average * KERNEL_STRIDE
            if first < (block + 1) * size and first + KERNEL_SIZE > block * size:
                ranks[:, block] = torch.maximum(ranks[:, block], shares[:, average])
    return ranks


def select_infllm_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> list[list[int]] | None:
    """Blocks that InfLLM-v2 chooses beyond those that it forces.

    Args:
        q: ``[1, Hq, D]``, the query at ``positions``.
        k: ``[N, Hkv, D]``.  Where the model has ``use_nope``, neither has its position's rotation.

    Returns:
        For each KV head, ascending block indices; ``None`` where the query sees everything.
    """
    (position,) = positions
    if policy.sees_all(position):
        return None
    ranks = block_ranks_reference(q[0], k, position, policy, softmax_scale)
    chosen = []
    for row in ranks:
        order = sorted(range(len(row)), key=lambda block: (-float(row[block]), block))
        attended = order[: policy.budget_blocks]
        chosen.append(sorted(block for block in attended if row[block] != float("inf")))
    return chosen
