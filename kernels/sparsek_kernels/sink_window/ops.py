"""``torch.library`` operators of sink-window attention, with fakes and autograd."""

from __future__ import annotations

import torch

from sparsek_kernels.common.operators import new_like, new_lse, register_gradient, runs_kernels
from sparsek_kernels.sink_window import torch_path
from sparsek_kernels.sink_window.problem import SinkWindowProblem
from sparsek_kernels.sink_window.spec import AttentionSpec


def forward_into(problem: SinkWindowProblem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write ``out`` and, where given, ``lse``."""
    if runs_kernels(problem.q):
        from sparsek_kernels.sink_window import launch

        with torch.cuda.device(problem.q.device):
            launch.forward(problem, out, lse)
        return
    torch_path.forward(problem, out, new_lse(problem.q) if lse is None else lse)


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
    out, lse = new_like(q), new_lse(q)
    spec = AttentionSpec(num_sink, window_size, causal, softmax_scale)
    forward_into(SinkWindowProblem(q, k, v, spec, sinks, cu_seqlens_q, cu_seqlens_k), out, lse)
    return out, lse


@sink_flash_fwd.register_fake
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return new_like(q), new_lse(q)


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
    lse = new_lse(q)
    spec = AttentionSpec(num_sink, window_size, causal, softmax_scale)
    forward_into(SinkWindowProblem(q, k, v, spec, sinks, cu_seqlens_q, cu_seqlens_k), out, lse)
    return lse


@sink_flash_fwd_out.register_fake
def _(out: torch.Tensor, q: torch.Tensor, *_: object) -> torch.Tensor:
    return new_lse(q)


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
    problem = SinkWindowProblem(q, k, v, spec, sinks, cu_seqlens_q, cu_seqlens_k)
    if runs_kernels(q):
        from sparsek_kernels.sink_window import launch

        with torch.cuda.device(q.device):
            dq, dk, dv, dsinks = launch.backward(problem, out, lse, dout, dlse)
    else:
        dq, dk, dv, dsinks = torch_path.backward(problem, out, lse, dout, dlse)
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
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dsinks = q.new_empty(0) if sinks is None else new_like(sinks)
    return new_like(q), new_like(k), new_like(v), dsinks


register_gradient(sink_flash_fwd, sink_flash_bwd)
