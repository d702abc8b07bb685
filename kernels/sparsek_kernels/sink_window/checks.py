"""Argument checks of ``sink_flash_attention``: each error says what was due and what came."""

from __future__ import annotations

import warnings

import torch

from sparsek_kernels.checks import (
    DTYPES,
    check_int,
    check_offsets,
    check_qkv,
    check_scale,
    check_tensor,
)
from sparsek_kernels.sink_window.spec import AttentionSpec


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
    num_sink: int,
    window_size: int | None,
    causal: bool,
    sinks: torch.Tensor | None,
    softmax_scale: float | None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> AttentionSpec:
    """The mask and scale of one call, after its arguments were checked.

    Warns:
        UserWarning: sinks without a window, which have no effect.
    """
    check_qkv(q, k, v)
    check_int("num_sink", num_sink, 0)
    if window_size is not None:
        check_int("window_size", window_size, 1)
        if not causal:
            raise ValueError(f"window_size: expected None with causal=False, got {window_size}")
    elif num_sink and not torch.compiler.is_compiling():
        warnings.warn(
            f"num_sink: expected 0 without window_size, got {num_sink}; every key is attended, "
            "sinks or not: give a window_size for sinks and a window",
            stacklevel=3,
        )
    scale = check_scale(softmax_scale, q.shape[3])
    if sinks is not None:
        check_tensor("sinks", sinks, (q.shape[2],), DTYPES, q.device)
    _check_varlen(q, k, cu_seqlens_q, cu_seqlens_k)
    if out is not None:
        check_tensor("out", out, q.shape, (q.dtype,), q.device)
        tracked = [x for x in (q, k, v, sinks) if x is not None and x.requires_grad]
        if tracked and torch.is_grad_enabled():
            raise ValueError("out: expected None when a gradient is required, got a tensor")
        if not torch.compiler.is_compiling():
            for name, x in (("q", q), ("k", k), ("v", v)):
                if 0 != out.data_ptr() == x.data_ptr():  # 0: no elements, or no memory
                    raise ValueError(f"out: expected memory of its own, got that of {name}")
    window = None if window_size is None or not causal else window_size
    return AttentionSpec(num_sink if window is not None else 0, window, causal, scale)
