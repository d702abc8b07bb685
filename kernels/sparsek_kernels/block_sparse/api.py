"""Public function of block-sparse attention: checks and dispatch only."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.block_sparse import ops
from sparsek_kernels.block_sparse.checks import check_arguments, check_options


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over the listed blocks of a pattern; differentiable in q, k and v.

    Query ``i`` sees key ``j`` when the pattern lists block ``(i // block_size, j // block_size)``
    and, with ``causal``, ``j <= i + M - N`` (bottom-right aligned).  A query that sees no key
    gives zeros.  Work is proportional to the number of listed blocks; under causality those that
    lie wholly in the future are skipped.

    The P patterns serve ``Hq / P`` consecutive query heads each, for any P that divides Hq.  P = 1
    is one pattern for all heads, P = Hkv one for each GQA group, P = Hq one for each head.  Small
    blocks are fastest where a group shares its pattern: one program then serves several heads.

    Dropout drops weights after the softmax and multiplies the others by ``1 / (1 - dropout_p)``.
    What is dropped depends on ``rng_state`` and on the place of a weight (batch entry, query head,
    query, key), not on the GPU, the pattern or the tiles; forward and backward agree.

    CUDA tensors run Triton kernels that give the same bits every time.  CPU tensors, and
    fp64 anywhere, run the same arithmetic in torch operations.  The kernels for Hopper
    take neither masks nor dropout; such calls run the portable ones.

    Args:
        q: ``[B, N, Hq, D]``, fp16, bf16, fp32 or fp64, any strides, D from 1 to 256.
        k: ``[B, M, Hkv, D]``, Hq a multiple of Hkv.
        v: ``[B, M, Hkv, D]``.
        pattern: a ``sparsek_backend.patterns.BlockSparsePattern``, a :class:`BlockStructure`, or
            any object with ``block_size`` (16 to 128, a multiple of 16), ``crow_indices`` and
            ``col_indices`` as described there, of ``ceil(N / block_size)`` rows (not under
            ``torch.compile``, which takes the first two).
        causal: whether a query is limited to keys up to its own position.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        key_mask: ``[B, M]`` bool, False for padding, which no query sees; it may hold anything.
        query_mask: ``[B, N]`` bool, False for padding, which gives zeros and has no gradient.
        dropout_p: probability that a weight is dropped, at least 0 and below 1, in steps of
            ``2 ** -16``.
        rng_state: ``[2]`` int64 on the device of q, seed and offset; the seed counts with 64 bits,
            the offset with its lowest 32.  Drawn from torch's generator by default, so that
            ``torch.manual_seed`` decides.
        return_lse: also return the log-sum-exp.

    Returns:
        The output ``[B, N, Hq, D]`` and, with ``return_lse``, the natural logarithm of the softmax
        denominator, before dropout, ``[B, Hq, N]`` in fp32 (``-inf`` where it is empty).  Both are
        differentiable.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device or value; the message names the argument.

    Source:
        Child et al., "Generating Long Sequences with Sparse Transformers" (arXiv 1904.10509),
        section 5; Dao, "FlashAttention-2" (arXiv 2307.08691), algorithms 1 and 2.
    """
    structure, scale = check_arguments(q, k, v, pattern, softmax_scale)
    state = check_options(q, k, key_mask, query_mask, dropout_p, rng_state)
    out, lse = ops.block_sparse_fwd(
        q, k, v, *structure.indices, structure.block_size, causal, scale,
        key_mask, query_mask, state, dropout_p,
    )  # fmt: skip
    return (out, lse) if return_lse else out
