"""Argument checks of ``sink_flash_attention``: each failure names what came and what was due."""

from __future__ import annotations

import torch

from sparsek_kernels.checks import check_int, check_offsets, check_scale
from sparsek_kernels.sink_window.spec import AttentionSpec

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*KERNEL_DTYPES, torch.float64)
MAX_HEAD_DIM = 256


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name}: expected 4 dimensions [batch, tokens, heads, head_dim], "
                f"got shape {tuple(x.shape)}"
            )
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name}: expected float16, bfloat16, float32 or float64, got {x.dtype}"
            )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q, {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {x.device}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected batch size {q.shape[0]}, got {x.shape[0]}")
        if x.shape[3] != q.shape[3]:
            raise ValueError(f"{name}: expected head_dim {q.shape[3]}, got {x.shape[3]}")
    if k.shape != v.shape:
        raise ValueError(f"v: expected the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q: expected a number of heads divisible by the {k.shape[2]} heads of k, "
            f"got {q.shape[2]}"
        )
    if not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"q: expected head_dim from 1 to {MAX_HEAD_DIM}, got {q.shape[3]}")


def _check_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
) -> None:
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing}: expected a tensor beside the other cu_seqlens, got None")
    if q.shape[0] != 1:
        raise ValueError(f"q: expected batch size 1 with cu_seqlens, got {q.shape[0]}")
    check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[1], q.device)
    check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[1], q.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected {cu_seqlens_q.shape[0]} offsets as in cu_seqlens_q, "
            f"got {cu_seqlens_k.shape[0]}"
        )


def check_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    num_sink: int,
    window_size: int | None,
    causal: bool,
    sinks: torch.Tensor | None,
    softmax_scale: float | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    out: torch.Tensor | None,
) -> AttentionSpec:
    """Validate one call and return its mask as numbers.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or value.
    """
    _check_tensors(q, k, v)
    check_int("num_sink", num_sink, 0)
    if window_size is not None:
        check_int("window_size", window_size, 1)
        if not causal:
            raise ValueError(f"window_size: expected None with causal=False, got {window_size}")
    scale = check_scale(softmax_scale, q.shape[3])
    if sinks is not None:
        if sinks.shape != (q.shape[2],):
            raise ValueError(
                f"sinks: expected shape [{q.shape[2]}], one per head, got {tuple(sinks.shape)}"
            )
        if sinks.dtype not in DTYPES:
            raise TypeError(f"sinks: expected a floating dtype, got {sinks.dtype}")
        if sinks.device != q.device:
            raise ValueError(f"sinks: expected the device of q, {q.device}, got {sinks.device}")
    _check_varlen(q, k, cu_seqlens_q, cu_seqlens_k)
    if out is not None:
        if out.shape != q.shape:
            raise ValueError(f"out: expected shape {tuple(q.shape)}, got {tuple(out.shape)}")
        if out.dtype != q.dtype:
            raise TypeError(f"out: expected the dtype of q, {q.dtype}, got {out.dtype}")
        if out.device != q.device:
            raise ValueError(f"out: expected the device of q, {q.device}, got {out.device}")
        tracked = [x for x in (q, k, v, sinks) if x is not None and x.requires_grad]
        if tracked and torch.is_grad_enabled():
            raise ValueError("out: expected None when a gradient is required, got a tensor")
    window = None if window_size is None or not causal else window_size
    return AttentionSpec(num_sink if window is not None else 0, window, causal, scale)
