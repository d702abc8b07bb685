"""``torch.library`` operators of native sparse attention, with fakes and autograd."""

from __future__ import annotations

from collections.abc import Sequence
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
from sparsek_kernels.nsa import torch_path
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.gate.branches import PerBranch
from sparsek_kernels.nsa.problem import GatedGradients, GatedProblem
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.sequences import compressed_rows
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.sink_window import ops as sink_window_ops


def _passes(x: torch.Tensor) -> Any:
    """``launches`` where kernels serve the device and dtype of ``x``, else ``torch_path``."""
    if runs_kernels(x):
        from sparsek_kernels.nsa import launches

        return launches
    return torch_path


def _new_indices(q: torch.Tensor, k_cmp: torch.Tensor, top_n: int) -> torch.Tensor:
    shape = (q.shape[0], q.shape[1], k_cmp.shape[2], top_n)
    return torch.empty(shape, dtype=torch.int32, device=q.device)


def _new_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Uninitialised ``[B, rows, Hkv, D]`` beside ``x [B, M, Hkv, D]``."""
    return x.new_empty((x.shape[0], rows, *x.shape[2:]))


def _new_means(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, spec: Sequence[int]
) -> torch.Tensor:
    return _new_rows(x, compressed_rows(cu_seqlens, x.shape[1], spec[0], spec[1]))


# --- mean pooling -------------------------------------------------------------------------------


@torch.library.custom_op("sparsek::nsa_mean_pool", mutates_args=())
def mean_pool(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, spec: Sequence[int]
) -> torch.Tensor:
    """Means of the compressed blocks of ``x [B, M, Hkv, D]``: ``[B, C, Hkv, D]``."""
    out = _new_means(x, cu_seqlens, spec)
    with torch.cuda.device_of(x):
        _passes(x).mean_pool_forward(x, out, cu_seqlens, NSASpec(*spec))
    return out


mean_pool.register_fake(_new_means)


@torch.library.custom_op("sparsek::nsa_mean_pool_bwd", mutates_args=())
def mean_pool_bwd(
    dout: torch.Tensor, num_tokens: int, cu_seqlens: torch.Tensor | None, spec: Sequence[int]
) -> torch.Tensor:
    """Gradient of the pooled tensor's input, ``[B, num_tokens, Hkv, D]``."""
    dx = _new_rows(dout, num_tokens)
    with torch.cuda.device_of(dout):
        _passes(dout).mean_pool_backward(dout, dx, cu_seqlens, NSASpec(*spec))
    return dx


mean_pool_bwd.register_fake(lambda dout, num_tokens, *_: _new_rows(dout, num_tokens))


def _mean_pool_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, cu_seqlens, spec = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.num_tokens, ctx.spec = x.shape[1], spec


def _mean_pool_backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    (cu_seqlens,) = ctx.saved_tensors
    return mean_pool_bwd(dout, ctx.num_tokens, cu_seqlens, ctx.spec), None, None


mean_pool.register_autograd(_mean_pool_backward, setup_context=_mean_pool_context)


# --- compressed attention -----------------------------------------------------------------------

_COMPRESSED = "SymInt seq_len, Tensor? cu_seqlens, SymInt[] spec, float softmax_scale"


def _compressed_problem(*inputs: Any) -> CompressedProblem:
    q, k_cmp, v_cmp, seq_len, cu_seqlens, spec, softmax_scale = inputs
    return CompressedProblem(q, k_cmp, v_cmp, seq_len, cu_seqlens, NSASpec(*spec), softmax_scale)


def _compressed_passes(x: torch.Tensor) -> Passes:
    passes = _passes(x)
    return passes.compressed_forward, passes.compressed_backward


compressed_fwd, compressed_bwd = attention_operators(
    "nsa_compressed", _COMPRESSED, _compressed_problem, _compressed_passes
)


# --- selection ----------------------------------------------------------------------------------


@torch.library.custom_op(
    "sparsek::nsa_compressed_select",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k_cmp, Tensor v_cmp, {_COMPRESSED}) -> (Tensor, Tensor, Tensor)",
)
def compressed_select(
    q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``compressed_fwd``, and ``select`` with its log-sum-exps; not differentiable."""
    problem = _compressed_problem(q, k_cmp, v_cmp, *rest)
    out, lse, found = new_like(q), new_lse(q), _new_indices(q, k_cmp, problem.spec.top_n)
    with torch.cuda.device_of(q):
        _passes(q).attend_and_select(problem, out, lse, found)
    return out, lse, found


@compressed_select.register_fake
def _(
    q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: Any, seq_len: Any, cu: Any, spec: Any, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return new_like(q), new_lse(q), _new_indices(q, k_cmp, spec[3])


@torch.library.custom_op(
    "sparsek::nsa_select",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k_cmp, Tensor lse, {_COMPRESSED}) -> Tensor",
)
def select(q: torch.Tensor, k_cmp: torch.Tensor, lse: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Chosen blocks ``[B, N, Hkv, top_n]`` int32, ascending, ``-1`` after the last."""
    problem = _compressed_problem(q, k_cmp, k_cmp, *rest)
    found = _new_indices(q, k_cmp, problem.spec.top_n)
    with torch.cuda.device_of(q):
        _passes(q).select_forward(problem, lse, found)
    return found


@select.register_fake
def _(
    q: torch.Tensor, k_cmp: torch.Tensor, lse: Any, seq_len: Any, cu: Any, spec: Any, *_: object
) -> torch.Tensor:
    return _new_indices(q, k_cmp, spec[3])


# --- selected attention -------------------------------------------------------------------------

_SELECTED = "Tensor block_indices, Tensor? cu_seqlens, SymInt sel_block_size, float softmax_scale"


def _selected_passes(x: torch.Tensor) -> Passes:
    passes = _passes(x)
    return passes.selected_forward, passes.selected_backward


selected_fwd, selected_bwd = attention_operators(
    "nsa_selected", _SELECTED, SelectedProblem, _selected_passes
)


# --- the gated sum ------------------------------------------------------------------------------


@torch.library.custom_op(
    "sparsek::nsa_selected_gated",
    mutates_args=(),
    schema="(Tensor out_cmp, Tensor out_swa, Tensor[] gates, Tensor q, Tensor k, Tensor v, "
    f"{_SELECTED}) -> Tensor",
)
def selected_gated(
    out_cmp: torch.Tensor, out_swa: torch.Tensor, gates: Sequence[torch.Tensor], *inputs: Any
) -> torch.Tensor:
    """Gated sum ``[B, N, Hq, D]`` of the selected branch and two outputs; not differentiable."""
    out = new_like(out_cmp)
    with torch.cuda.device_of(out):
        _passes(out).selected_gated(SelectedProblem(*inputs), out, (out_cmp, out_swa), gates)
    return out


selected_gated.register_fake(lambda out_cmp, *_: new_like(out_cmp))


_BRANCHES = (
    "Tensor[] outs, Tensor[] lses, Tensor[] gates, Tensor q, Tensor[] keys, Tensor[] values, "
    "Tensor block_indices, SymInt seq_len, Tensor? cu_seqlens, SymInt[] spec, SymInt window_size, "
    "float softmax_scale"
)


@torch.library.custom_op(
    "sparsek::nsa_branches", mutates_args=(), schema=f"({_BRANCHES}) -> Tensor"
)
def branches(
    outs: Sequence[torch.Tensor], lses: Any, gates: Sequence[torch.Tensor], *_: Any
) -> torch.Tensor:
    """Gated sum of three branches, in the order compressed, selected, sliding.

    ``outs [B, N, Hq, D]`` and ``lses [B, Hq, N]`` are results of the branches' operators,
    contiguous and without gradients of their own; ``gates [B, N, Hq]``, ``q``, ``keys`` and
    ``values`` receive the gradients.
    """
    out = new_like(outs[0])
    with torch.cuda.device_of(out):
        _passes(out).gated_forward(out, outs, gates)
    return out


branches.register_fake(lambda outs, *_: new_like(outs[0]))


def _branch_gradients(problem: GatedProblem, dout: torch.Tensor) -> GatedGradients:
    """Gradients of the gated sum, of each branch by itself."""
    outs, lses, gates = problem.outs, problem.lses, problem.gates
    douts, dgates = PerBranch(*map(new_like, outs)), PerBranch(*map(new_like, gates))
    passes = _passes(dout)
    passes.gated_backward(douts, dgates, dout, outs, gates)
    dq_cmp, dk_cmp, dv_cmp = passes.compressed_backward(
        problem.compressed, outs.cmp, lses.cmp, douts.cmp, None
    )
    dq_slc, dk, dv = passes.selected_backward(problem.selected, outs.slc, lses.slc, douts.slc, None)
    window, cu_seqlens = problem.sliding, problem.cu_seqlens
    dq_swa, dk_swa, dv_swa, _ = sink_window_ops.sink_flash_bwd(
        douts.swa, None, window.q, window.k, window.v, outs.swa, lses.swa, None,
        cu_seqlens, cu_seqlens, 0, problem.window_size, True, problem.softmax_scale,
    )  # fmt: skip
    dtype = problem.q.dtype
    dq = dq_cmp.to(compute_dtype(dtype)).add_(dq_slc).add_(dq_swa).to(dtype)
    return GatedGradients(dq, PerBranch(dk_cmp, dk, dk_swa), PerBranch(dv_cmp, dv, dv_swa), dgates)


@torch.library.custom_op(
    "sparsek::nsa_branches_bwd",
    mutates_args=(),
    schema=f"(Tensor dout, {_BRANCHES}) -> (Tensor, Tensor[], Tensor[], Tensor[])",
)
def branches_bwd(
    dout: torch.Tensor, *inputs: Any
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of q, keys, values and gates."""
    outs, lses, gates, q, keys, values, block_indices, seq_len, cu_seqlens, spec, *rest = inputs
    outs, lses, gates, keys, values = (PerBranch(*x) for x in (outs, lses, gates, keys, values))
    problem = GatedProblem(
        outs, lses, gates, q, keys, values, block_indices, seq_len, cu_seqlens, NSASpec(*spec),
        *rest,
    )  # fmt: skip
    found = None
    with torch.cuda.device_of(q):
        if runs_kernels(q):
            from sparsek_kernels.nsa.backward import backward

            found = backward(problem, dout)
        grads = found or _branch_gradients(problem, dout)
    return grads.q, list(grads.keys), list(grads.values), list(grads.gates)


@branches_bwd.register_fake
def _(
    dout: Any, outs: Any, lses: Any, *inputs: Any
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    gates, q, keys, values, *_ = inputs
    dkeys, dvalues, dgates = ([new_like(x) for x in leaves] for leaves in (keys, values, gates))
    return new_like(q), dkeys, dvalues, dgates


def _branches_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    outs, lses, gates, q, keys, values, block_indices, seq_len, cu_seqlens, *scalars = inputs
    ctx.save_for_backward(q, block_indices, cu_seqlens, *outs, *lses, *gates, *keys, *values)
    ctx.seq_len, ctx.scalars = seq_len, scalars


def _branches_backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    q, block_indices, cu_seqlens, *lists = ctx.saved_tensors
    outs, lses, gates, keys, values = (lists[i : i + 3] for i in range(0, 15, 3))
    dq, dkeys, dvalues, dgates = branches_bwd(
        dout, outs, lses, gates, q, keys, values, block_indices, ctx.seq_len, cu_seqlens,
        *ctx.scalars,
    )  # fmt: skip
    nothing = [None] * 3
    return nothing, nothing, dgates, dq, dkeys, dvalues, *[None] * 6


branches.register_autograd(_branches_backward, setup_context=_branches_context)
