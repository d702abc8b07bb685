"""One softmax from parts of its keys, each with the log-sum-exp of its logits."""

from __future__ import annotations

import torch


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
