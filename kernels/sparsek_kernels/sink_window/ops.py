"""``torch.library`` operators of sink-window attention."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.common.operators import Passes, attention_operators, new_lse, runs_kernels
from sparsek_kernels.sink_window import torch_path
from sparsek_kernels.sink_window.problem import SinkWindowProblem
from sparsek_kernels.sink_window.spec import AttentionSpec

_REST = (
    "Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt num_sink, SymInt? window_size, bool causal, float softmax_scale"
)


def _problem(*inputs: Any) -> SinkWindowProblem:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *scalars = inputs
    return SinkWindowProblem(q, k, v, AttentionSpec(*scalars), sinks, cu_seqlens_q, cu_seqlens_k)


def _passes(x: torch.Tensor) -> Passes:
    if runs_kernels(x):
        from sparsek_kernels.sink_window import launch

        return launch.forward, launch.backward
    return torch_path.forward, torch_path.backward


sink_flash_fwd, sink_flash_bwd = attention_operators("sink_flash", _REST, _problem, _passes, 4)


def forward_into(problem: SinkWindowProblem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write ``out`` and, where given, ``lse``."""
    with torch.cuda.device_of(out):
        _passes(out)[0](problem, out, lse)


@torch.library.custom_op(
    "sparsek::sink_flash_fwd_out",
    mutates_args=("out",),
    schema=f"(Tensor(a!) out, Tensor q, Tensor k, Tensor v, {_REST}) -> Tensor",
)
def sink_flash_fwd_out(out: torch.Tensor, *inputs: Any) -> torch.Tensor:
    """Write the output into ``out`` and return the log-sum-exp ``[B, Hq, N]``."""
    problem, lse = _problem(*inputs), new_lse(out)
    forward_into(problem, out, lse)
    return lse


sink_flash_fwd_out.register_fake(lambda out, *_: new_lse(out))
