"""Inputs, biases and the dense fp64 reference of the xFormers tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch

pytest.importorskip("xformers", reason="xFormers is not installed (the xformers extra)")

from xformers.ops import fmha

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.xformers_op import BlockSparseMask, BwOp, FwOp, SinkWindowMask

ab = fmha.attn_bias
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

LENGTHS_Q = [5, 1, 40, 18]
LENGTHS_K = [9, 3, 40, 12]
LONGER_K = [9, 3, 44, 24]
Make = Callable[[torch.device], Any]


def _diagonal(q: list[int], k: list[int], device: torch.device) -> Any:
    return ab.BlockDiagonalMask.from_seqlens(q, k, device=device)


def _blocks(rows: int, cols: int, device: torch.device, causal: bool, patterns: int = 1) -> Any:
    """Half of the blocks of 16, the same every time; the first row and column see nothing."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(patterns, rows, cols, generator=generator) < 0.5
    mask[:, 0], mask[:, :, 0] = False, False
    return BlockSparseMask(BlockSparsePattern.from_mask(mask.to(device), 16), causal)


BATCHED: dict[str, tuple[Make, int, int]] = {
    "none": (lambda d: None, 50, 70),
    "causal": (lambda d: ab.LowerTriangularMask(), 64, 64),
    "causal-fewer-keys": (lambda d: ab.LowerTriangularMask(), 70, 33),
    "causal-more-keys": (lambda d: ab.LowerTriangularMask(), 33, 70),
    "bottom-right": (lambda d: ab.LowerTriangularFromBottomRightMask(), 33, 70),
    "bottom-right-local": (
        lambda d: ab.LowerTriangularFromBottomRightLocalAttentionMask(7),
        33,
        70,
    ),
    "left-window": (lambda d: ab.LocalAttentionFromBottomRightMask(6, 0), 33, 70),
    "sink-window": (lambda d: SinkWindowMask(3, 8), 33, 70),
    "sink-window-empty": (lambda d: SinkWindowMask(0, 1), 65, 65),
    "block-sparse": (lambda d: _blocks(3, 5, d, False), 33, 70),
    "block-sparse-causal": (lambda d: _blocks(3, 5, d, True), 33, 70),
    "block-sparse-heads": (lambda d: _blocks(3, 5, d, True, patterns=3), 33, 70),
}
"""name -> (bias, queries, keys), for any batch size."""

PACKED: dict[str, tuple[Make, list[int], list[int]]] = {
    "diagonal": (lambda d: _diagonal(LENGTHS_Q, LENGTHS_K, d), LENGTHS_Q, LENGTHS_K),
    "diagonal-causal-same": (
        lambda d: _diagonal(LENGTHS_Q, LENGTHS_Q, d).make_causal(),
        LENGTHS_Q,
        LENGTHS_Q,
    ),
    "diagonal-causal": (
        lambda d: _diagonal(LENGTHS_Q, LENGTHS_K, d).make_causal(),
        LENGTHS_Q,
        LENGTHS_K,
    ),
    "diagonal-bottom-right": (
        lambda d: _diagonal(LENGTHS_Q, LONGER_K, d).make_causal_from_bottomright(),
        LENGTHS_Q,
        LONGER_K,
    ),
    "diagonal-local": (
        lambda d: _diagonal(LENGTHS_Q, LENGTHS_K, d).make_local_attention(8),
        LENGTHS_Q,
        LENGTHS_K,
    ),
    "diagonal-local-bottom-right": (
        lambda d: _diagonal(LENGTHS_Q, LONGER_K, d).make_local_attention_from_bottomright(4),
        LENGTHS_Q,
        LONGER_K,
    ),
}
"""name -> (bias, query lengths, key lengths): biases with gradients, batch size 1."""

_TABLE = [[3, 0], [1, 5], [4, 2], [7, 6]]
_FEW_KEYS = [30, 0, 3, 1]


def _padded(kind: str, q: list[int], k: Sequence[int] = (30, 64, 17, 41)) -> Make:
    return lambda d: getattr(ab, kind).from_seqlens(q, 64, list(k), device=d)


def _gappy(kind: str) -> Make:
    return lambda d: getattr(ab, kind).from_seqlens(
        LENGTHS_Q, [0, 40, 90, 200, 256], [30, 45, 77, 41], device=d
    )


def _paged(kind: str, q: list[int], k: Sequence[int] = (30, 60, 17, 41)) -> Make:
    def make(device: torch.device) -> Any:
        return getattr(ab, kind).from_seqlens(
            q,
            list(k),
            torch.tensor(_TABLE, dtype=torch.int32, device=device),
            32,
            device=device,
        )

    return make


DECODING: dict[str, tuple[Make, int, int]] = {
    "padded": (_padded("BlockDiagonalPaddedKeysMask", [4, 1, 9, 2]), 16, 256),
    "padded-decode": (_padded("BlockDiagonalPaddedKeysMask", [1, 1, 1, 1]), 4, 256),
    "padded-causal": (
        _padded("BlockDiagonalCausalWithOffsetPaddedKeysMask", [4, 1, 9, 2]),
        16,
        256,
    ),
    "padded-local": (
        lambda d: ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask(
            _padded("BlockDiagonalPaddedKeysMask", [4, 1, 9, 2])(d).q_seqinfo,
            _padded("BlockDiagonalPaddedKeysMask", [4, 1, 9, 2])(d).k_seqinfo,
            5,
        ),
        16,
        256,
    ),
    "padded-decode-few-keys": (
        _padded("BlockDiagonalPaddedKeysMask", [1, 1, 1, 1], _FEW_KEYS),
        4,
        256,
    ),
    "padded-causal-few-keys": (
        _padded("BlockDiagonalCausalWithOffsetPaddedKeysMask", [4, 1, 9, 2], _FEW_KEYS),
        16,
        256,
    ),
    "gappy": (_gappy("BlockDiagonalGappyKeysMask"), 64, 256),
    "gappy-causal": (
        lambda d: ab.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
            [5, 1, 40, 18], [0, 40, 90, 200, 256], [30, 45, 77, 41], device=d
        ),
        64,
        256,
    ),
    "paged": (_paged("PagedBlockDiagonalPaddedKeysMask", [4, 1, 9, 2]), 16, 256),
    "paged-causal": (
        _paged("PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", [4, 1, 9, 2]),
        16,
        256,
    ),
    "paged-causal-decode": (
        _paged("PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", [1, 1, 1, 1]),
        4,
        256,
    ),
    "paged-causal-few-keys": (
        _paged("PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", [4, 1, 9, 2], _FEW_KEYS),
        16,
        256,
    ),
    "paged-gappy": (
        lambda d: ab.BlockDiagonalGappyKeysMask.from_seqlens(
            [4, 1, 9, 2], [3, 64, 148, 199, 256], [30, 60, 17, 41], device=d
        ).make_paged(
            torch.tensor(_TABLE, dtype=torch.int32, device=d),
            32,
            64,
            ab.PagedBlockDiagonalGappyKeysMask,
        ),
        16,
        256,
    ),
}
"""name -> (bias, queries, rows of the key tensor): biases for decoding, forward only."""


def inputs(
    num_q: int,
    num_k: int,
    *,
    batch: int = 1,
    heads: tuple[int, ...] = (3,),
    dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random query, key and value; ``heads`` is ``()``, ``(H,)`` or ``(G, H)``."""
    torch.manual_seed(seed)
    shapes = ((num_q, dim), (num_k, dim), (num_k, value_dim or dim))
    q, k, v = (torch.randn(batch, n, *heads, d).to(dtype).to(device) for n, d in shapes)
    return q, k, v


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention and log-sum-exp in fp64, differentiable, for any number of head axes."""
    heads = tuple(range(2, q.dim() - 1))
    last = q.dim() - 1
    order = (0, *heads, 1, last)
    qd, kd, vd = (x.double().permute(order) for x in (q, k, v))
    scores = qd @ kd.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if isinstance(bias, torch.Tensor):
        scores = scores + bias.double()
    elif bias is not None:
        head_axes = q.shape[2:-1] if isinstance(bias, BlockSparseMask) else (1,)
        shape = (1, *head_axes, q.shape[1], k.shape[1])
        mask = bias.materialize(shape, device=q.device).double()
        scores = scores + (mask.view(shape[-2:]) if mask.numel() == prod(shape[-2:]) else mask)
    empty = scores.isneginf().all(-1)  # without keys: no output, and no gradient instead of NaN
    lse = scores.masked_fill(empty[..., None], 0.0).logsumexp(-1).masked_fill(empty, float("-inf"))
    probs = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    back = (0, last - 1, *range(1, last - 1), last)
    return (probs @ vd).permute(back), lse


def assert_close(name: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Compare within ``tolerance`` of the reference's largest magnitude (at least 1)."""
    assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
    assert not found.isnan().any(), f"{name} has NaN"
    finite = wanted.isfinite()
    assert torch.equal(found.isfinite(), finite), f"{name}: infinities differ"
    error = (found.double() - wanted.double())[finite].abs()
    scale = max(1.0, wanted[finite].abs().max().item() if finite.any() else 1.0)
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= tolerance * scale, f"{name}: {worst:.3g} > {tolerance * scale:.3g}"


def check_pair(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Any,
    *,
    scale: float | None = None,
    op: Any = (FwOp, BwOp),
) -> None:
    """Output, log-sum-exp and gradients of the pair against :func:`reference`."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    twins = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    bias_leaf = isinstance(bias, torch.Tensor)
    if bias_leaf:
        bias = bias.detach().clone().requires_grad_()
        twin_bias = bias.detach().clone().requires_grad_()
        leaves, twins = [*leaves, bias], [*twins, twin_bias]
    tolerance = TOLERANCE[q.dtype]
    wanted, wanted_lse = reference(*twins[:3], twins[3] if bias_leaf else bias, scale)
    found = fmha.memory_efficient_attention(*leaves[:3], bias, scale=scale, op=op)
    assert found.dtype == q.dtype
    assert_close("out", found, wanted, tolerance)
    plain, lse = fmha.memory_efficient_attention_forward_requires_grad(
        q, k, v, bias.detach() if bias_leaf else bias, scale=scale, op=op[0]
    )
    assert_close("out again", plain, wanted, tolerance)
    assert lse.dtype == torch.float32
    assert_close("lse", lse.view(wanted_lse.shape), wanted_lse, tolerance)
    upstream = torch.randn(wanted.shape, dtype=torch.float64).to(q.dtype).to(q.device)
    grads = torch.autograd.grad(found, leaves, upstream)
    wanted_grads = torch.autograd.grad(wanted, twins, upstream.double())
    for name, grad, want in zip(("dq", "dk", "dv", "dbias"), grads, wanted_grads, strict=False):
        assert_close(name, grad, want, 4 * tolerance)
