"""Block-sparse attention with a bias of low rank on its scores."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from sparsek_kernels import block_sparse_attention
from sparsek_kernels.block_sparse.structure import BlockStructure
from sparsek_kernels.checks import MAX_HEAD_DIM


def biased_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: BlockStructure,
    query_bias: torch.Tensor,
    key_bias: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Attention over listed blocks with scores ``scale q_i . k_j + query_bias_i . key_bias_j``.

    The biases travel in the head dimension, so the block-sparse operator computes them, with
    their gradients.

    Args:
        q: ``[B, N, Hq, D]``.
        k: ``[B, M, Hkv, D]``.
        v: ``[B, M, Hkv, D]``.
        pattern: the listed blocks.
        query_bias: ``[N, Hq, E]`` or ``[B, N, Hq, E]``; heads may be 1.
        key_bias: ``[M, Hkv, E]`` or ``[B, M, Hkv, E]``; heads may be 1.
        causal: whether a query is limited to keys up to its own position.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.

    Returns:
        ``[B, N, Hq, D]``, differentiable in all tensors.

    Raises:
        NotImplementedError: D and E together are more than 256.
    """
    dim, rank = q.shape[3], query_bias.shape[-1]
    if dim + rank > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"query_bias: expected at most {MAX_HEAD_DIM - dim} elements with head_dim {dim}, got "
            f"{rank}; take larger blocks or smaller heads"
        )
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    wide = [
        torch.cat([x, bias.to(x.dtype).expand(*x.shape[:3], rank)], 3)
        for x, bias in ((q, query_bias / scale), (k, key_bias))
    ]
    out = block_sparse_attention(
        wide[0], wide[1], F.pad(v, (0, rank)), pattern, causal=causal, softmax_scale=scale
    )
    return cast(torch.Tensor, out)[..., :dim]
