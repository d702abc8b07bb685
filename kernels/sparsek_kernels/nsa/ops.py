"""``torch.library`` operators of native sparse attention, with fakes and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparsek_kernels.common.operators import new_like, new_lse, register_attention, runs_kernels
from sparsek_kernels.common.precision import compute_dtype
from sparsek_kernels.nsa import torch_path
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.gate.branches import PerBranch
from sparsek_kernels.nsa.problem import GatedGradients, GatedProblem
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.sequences import compressed_rows
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.sink_window import ops as sink_window_ops

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _passes(x: torch.Tensor) -> Any:
    """``launches`` where kernels serve the device and dtype of ``x``, else ``torch_path``."""
    if runs_kernels(x):
        from sparsek_kernels.nsa import launches

        return launches
    return torch_path


def _new_indices(q: torch.Tensor, k_cmp: torch.Tensor, spec: Sequence[int]) -> torch.Tensor:
    shape = (q.shape[0], q.shape[1], k_cmp.shape[2], spec[3])
    return torch.empty(shape, dtype=torch.int32, device=q.device)


# --- mean pooling -------------------------------------------------------------------------------


@torch.library.custom_op("sparsek::nsa_mean_pool", mutates_args=())
def mean_pool(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, spec: Sequence[int]
) -> torch.Tensor:
    """Means of the compressed blocks of ``x [B, M, Hkv, D]``: ``[B, C, Hkv, D]``."""
    rules = NSASpec(*spec)
    rows = compressed_rows(cu_seqlens, x.shape[1], rules.cmp_block_size, rules.cmp_stride)
    out = x.new_empty((x.shape[0], rows, *x.shape[2:]))
    _passes(x).mean_pool_forward(x, out, cu_seqlens, rules)
    return out


@mean_pool.register_fake
def _(x: torch.Tensor, cu_seqlens: torch.Tensor | None, spec: Sequence[int]) -> torch.Tensor:
    rows = compressed_rows(cu_seqlens, x.shape[1], spec[0], spec[1])
    return x.new_empty((x.shape[0], rows, *x.shape[2:]))


@torch.library.custom_op("sparsek::nsa_mean_pool_bwd", mutates_args=())
def mean_pool_bwd(
    dout: torch.Tensor, num_tokens: int, cu_seqlens: torch.Tensor | None, spec: Sequence[int]
) -> torch.Tensor:
    """Gradient of the pooled tensor's input, ``[B, num_tokens, Hkv, D]``."""
    dx = dout.new_empty((dout.shape[0], num_tokens, *dout.shape[2:]))
    _passes(dout).mean_pool_backward(dout, dx, cu_seqlens, NSASpec(*spec))
    return dx


@mean_pool_bwd.register_fake
def _(dout: torch.Tensor, num_tokens: int, *_: object) -> torch.Tensor:
    return dout.new_empty((dout.shape[0], num_tokens, *dout.shape[2:]))


def _mean_pool_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, cu_seqlens, spec = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.num_tokens, ctx.spec = x.shape[1], spec


def _mean_pool_backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    (cu_seqlens,) = ctx.saved_tensors
    return mean_pool_bwd(dout, ctx.num_tokens, cu_seqlens, ctx.spec), None, None


mean_pool.register_autograd(_mean_pool_backward, setup_context=_mean_pool_context)


# --- compressed attention -----------------------------------------------------------------------


@torch.library.custom_op("sparsek::nsa_compressed_fwd", mutates_args=())
def compressed_fwd(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[B, N, Hq, D]`` and log-sum-exp ``[B, Hq, N]`` of the compressed branch."""
    problem = CompressedProblem(q, k_cmp, v_cmp, seq_len, cu_seqlens, NSASpec(*spec), softmax_scale)
    out, lse = new_like(q), new_lse(q)
    _passes(q).compressed_forward(problem, out, lse)
    return out, lse


@torch.library.custom_op("sparsek::nsa_compressed_bwd", mutates_args=())
def compressed_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k_cmp and v_cmp."""
    problem = CompressedProblem(q, k_cmp, v_cmp, seq_len, cu_seqlens, NSASpec(*spec), softmax_scale)
    grads: Gradients = _passes(q).compressed_backward(problem, out, lse, dout, dlse)
    return grads


register_attention(compressed_fwd, compressed_bwd)


# --- selection ----------------------------------------------------------------------------------


@torch.library.custom_op("sparsek::nsa_compressed_select", mutates_args=())
def compressed_select(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``compressed_fwd``, and ``select`` with its log-sum-exps; not differentiable."""
    problem = CompressedProblem(q, k_cmp, v_cmp, seq_len, cu_seqlens, NSASpec(*spec), softmax_scale)
    out, lse, found = new_like(q), new_lse(q), _new_indices(q, k_cmp, spec)
    _passes(q).attend_and_select(problem, out, lse, found)
    return out, lse, found


@compressed_select.register_fake
def _(
    q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: Any, seq_len: Any, cu: Any, spec: Any, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return new_like(q), new_lse(q), _new_indices(q, k_cmp, spec)


@torch.library.custom_op("sparsek::nsa_select", mutates_args=())
def select(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
    softmax_scale: float,
) -> torch.Tensor:
    """Chosen blocks ``[B, N, Hkv, top_n]`` int32, ascending, ``-1`` after the last."""
    problem = CompressedProblem(q, k_cmp, k_cmp, seq_len, cu_seqlens, NSASpec(*spec), softmax_scale)
    found = _new_indices(q, k_cmp, spec)
    _passes(q).select_forward(problem, lse, found)
    return found


@select.register_fake
def _(
    q: torch.Tensor, k_cmp: torch.Tensor, lse: Any, seq_len: Any, cu: Any, spec: Any, *_: object
) -> torch.Tensor:
    return _new_indices(q, k_cmp, spec)


# --- selected attention -------------------------------------------------------------------------


@torch.library.custom_op("sparsek::nsa_selected_fwd", mutates_args=())
def selected_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sel_block_size: int,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[B, N, Hq, D]`` and log-sum-exp ``[B, Hq, N]`` of the selected branch."""
    problem = SelectedProblem(q, k, v, block_indices, cu_seqlens, sel_block_size, softmax_scale)
    out, lse = new_like(q), new_lse(q)
    _passes(q).selected_forward(problem, out, lse)
    return out, lse


@torch.library.custom_op("sparsek::nsa_selected_bwd", mutates_args=())
def selected_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sel_block_size: int,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    problem = SelectedProblem(q, k, v, block_indices, cu_seqlens, sel_block_size, softmax_scale)
    grads: Gradients = _passes(q).selected_backward(problem, out, lse, dout, dlse)
    return grads


register_attention(selected_fwd, selected_bwd)


# --- the gated sum ------------------------------------------------------------------------------


@torch.library.custom_op("sparsek::nsa_selected_gated", mutates_args=())
def selected_gated(
    out_cmp: torch.Tensor,
    out_swa: torch.Tensor,
    gates: Sequence[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sel_block_size: int,
    softmax_scale: float,
) -> torch.Tensor:
    """Gated sum ``[B, N, Hq, D]`` of the selected branch and two outputs; not differentiable."""
    problem = SelectedProblem(q, k, v, block_indices, cu_seqlens, sel_block_size, softmax_scale)
    out = new_like(q)
    _passes(q).selected_gated(problem, out, (out_cmp, out_swa), gates)
    return out


@selected_gated.register_fake
def _(out_cmp: torch.Tensor, *_: object) -> torch.Tensor:
    return new_like(out_cmp)


@torch.library.custom_op("sparsek::nsa_branches", mutates_args=())
def branches(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    block_indices: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
    window_size: int,
    softmax_scale: float,
) -> torch.Tensor:
    """Gated sum of three branches, in the order compressed, selected, sliding.

    ``outs [B, N, Hq, D]`` and ``lses [B, Hq, N]`` are results of the branches' operators,
    contiguous and without gradients of their own; ``gates [B, N, Hq]``, ``q``, ``keys`` and
    ``values`` receive the gradients.
    """
    out = new_like(outs[0])
    _passes(out).gated_forward(out, outs, gates)
    return out


@branches.register_fake
def _(outs: Sequence[torch.Tensor], *_: object) -> torch.Tensor:
    return new_like(outs[0])


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


@torch.library.custom_op("sparsek::nsa_branches_bwd", mutates_args=())
def branches_bwd(
    dout: torch.Tensor,
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    block_indices: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
    window_size: int,
    softmax_scale: float,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of q, keys, values and gates."""
    problem = GatedProblem(
        PerBranch(*outs), PerBranch(*lses), PerBranch(*gates), q, PerBranch(*keys),
        PerBranch(*values), block_indices, seq_len, cu_seqlens, NSASpec(*spec), window_size,
        softmax_scale,
    )  # fmt: skip
    found = None
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
