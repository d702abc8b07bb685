"""``torch.library`` operators of sink-window attention, with fakes and autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sparsek_kernels.sink_window.checks import KERNEL_DTYPES
from sparsek_kernels.sink_window.spec import AttentionSpec
from sparsek_kernels.sink_window.torch_path import torch_backward, torch_forward

if TYPE_CHECKING:
    from sparsek_kernels.common.launching import CompiledLaunch


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of the log-sum-exp for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def runs_kernels(q: torch.Tensor) -> bool:
    """Whether Triton kernels take these inputs (else torch operations do)."""
    return q.is_cuda and q.dtype in KERNEL_DTYPES


def empty_outputs(
    q: torch.Tensor, with_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Uninitialised output ``[B, N, Hq, D]`` and log-sum-exp ``[B, Hq, N]``, contiguous."""
    lse = None
    if with_lse:
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype(q.dtype))
    return q.new_empty(q.shape), lse


def forward_into(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    spec: AttentionSpec,
) -> CompiledLaunch | None:
    """Run the forward pass for checked arguments, writing ``out`` and, if given, ``lse``.

    Returns the launch where it can be replayed.
    """
    if runs_kernels(q):
        from sparsek_kernels.sink_window.launch import launch_forward

        with torch.cuda.device(q.device):
            return launch_forward(out, lse, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, spec)
    if lse is None:
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype(q.dtype))
    torch_forward(q, k, v, spec, sinks, cu_seqlens_q, cu_seqlens_k, out, lse)
    return None


@torch.library.custom_op("sparsek::sink_flash_fwd", mutates_args=())
def sink_flash_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    num_sink: int,
    window_size: int | None,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[B, N, Hq, D]`` and log-sum-exp ``[B, Hq, N]``."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype(q.dtype))
    spec = AttentionSpec(num_sink, window_size, causal, softmax_scale)
    forward_into(out, lse, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, spec)
    return out, lse


@sink_flash_fwd.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    num_sink: int,
    window_size: int | None,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype(q.dtype))
    return out, lse


@torch.library.custom_op("sparsek::sink_flash_fwd_out", mutates_args=("out",))
def sink_flash_fwd_out(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    num_sink: int,
    window_size: int | None,
    causal: bool,
    softmax_scale: float,
) -> torch.Tensor:
    """Write the output into ``out`` and return the log-sum-exp ``[B, Hq, N]``."""
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype(q.dtype))
    spec = AttentionSpec(num_sink, window_size, causal, softmax_scale)
    forward_into(out, lse, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, spec)
    return lse


@sink_flash_fwd_out.register_fake
def _(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    num_sink: int,
    window_size: int | None,
    causal: bool,
    softmax_scale: float,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype(q.dtype))


@torch.library.custom_op("sparsek::sink_flash_bwd", mutates_args=())
def sink_flash_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    num_sink: int,
    window_size: int | None,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and sinks; the last is empty when there are no sinks."""
    spec = AttentionSpec(num_sink, window_size, causal, softmax_scale)
    if runs_kernels(q):
        from sparsek_kernels.sink_window.launch import launch_backward

        with torch.cuda.device(q.device):
            found = launch_backward(
                dout, dlse, q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k, spec
            )
    else:
        found = torch_backward(
            dout, dlse, q, k, v, out, lse, spec, sinks, cu_seqlens_q, cu_seqlens_k
        )
    dq, dk, dv, dsinks = found
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@sink_flash_bwd.register_fake
def _(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    num_sink: int,
    window_size: int | None,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dsinks = q.new_empty(0)
    if sinks is not None:
        dsinks = torch.empty(sinks.shape, dtype=sinks.dtype, device=sinks.device)
    return dq, dk, dv, dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *scalars = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k)
    ctx.scalars = scalars
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 10
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsinks = sink_flash_bwd(
        dout, dlse, q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k, *ctx.scalars
    )
    return (dq, dk, dv, None if sinks is None else dsinks, *(None,) * 6)


sink_flash_fwd.register_autograd(_backward, setup_context=_setup_context)
