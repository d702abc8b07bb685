"""``torch.library`` operators of sink-window attention."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.common.operators import (
    Passes,
    attention_operators,
    new_like,
    new_lse,
    runs_kernels,
)
from sparsek_kernels.common.precision import compute_dtype
from sparsek_kernels.sink_window import torch_path
from sparsek_kernels.sink_window.problem import KeyTerms, SinkWindowProblem
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


def _new_terms(k: torch.Tensor, rows: int) -> torch.Tensor:
    batch, _, *rest = k.shape
    return k.new_empty((2, batch, rows, *rest), dtype=compute_dtype(k.dtype))


@torch.library.custom_op(
    "sparsek::sink_flash_bwd_terms",
    mutates_args=(),
    schema=(
        "(Tensor slots, SymInt rows, Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, "
        f"Tensor out, Tensor lse, {_REST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def sink_flash_bwd_terms(
    slots: torch.Tensor,
    rows: int,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """:data:`sink_flash_bwd`, and rows of ``dk`` and ``dv`` unrounded: ``[2, B, rows, Hkv, D]``.

    Args:
        slots: ``[M]`` int32, the place of each key's row there, -1 for none; all places are taken.
    """
    terms = KeyTerms(slots, _new_terms(k, rows))
    with torch.cuda.device_of(q):
        found = _passes(q)[1](
            _problem(q, k, v, *rest), out, lse.contiguous(), dout, dlse, terms=terms
        )
    return *(q.new_empty(0) if x is None else x for x in found), terms.grads


@sink_flash_bwd_terms.register_fake
def _(slots: Any, rows: int, dout: Any, dlse: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    _, _, sinks, *_ = rest
    dsinks = q.new_empty(0) if sinks is None else new_like(sinks)
    return new_like(q), new_like(k), new_like(v), dsinks, _new_terms(k, rows)
