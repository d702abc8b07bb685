"""``torch.library`` operators of native sparse attention, with fakes and autograd."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch

from sparsek_kernels.common.device import plain
from sparsek_kernels.common.operators import (
    Direct,
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

Tensors = tuple[torch.Tensor, ...]
_spec = lru_cache(maxsize=64)(NSASpec)  # its checks take longer than a look-up


def _passes(x: torch.Tensor) -> Any:
    """``launches`` where kernels serve the device and dtype of ``x``, else ``torch_path``."""
    if runs_kernels(x):
        from sparsek_kernels.nsa import launches

        return launches
    return torch_path


def _replayed(
    read: Sequence[torch.Tensor | None], options: Hashable, compute: Callable[[], Tensors]
) -> Tensors:
    """What ``compute()`` returns on the device of the tensors; kernels' launches are replayed."""
    first = next(x for x in read if x is not None)
    with torch.cuda.device_of(first):
        if not (first.is_cuda and runs_kernels(first)):
            return compute()
        from sparsek_kernels.common.tape import replayed

        return replayed(read, options, compute)


def _unwatched(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient may pass the dispatcher by, which refuses to differentiate it again."""
    return not torch.is_grad_enabled() and plain(*tensors)


def _new_indices(q: torch.Tensor, k_cmp: torch.Tensor, top_n: int) -> torch.Tensor:
    shape = (q.shape[0], q.shape[1], k_cmp.shape[2], top_n)
    return torch.empty(shape, dtype=torch.int32, device=q.device)


def _new_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Uninitialised ``[B, rows, Hkv, D]`` beside ``x [B, M, Hkv, D]``."""
    return x.new_empty((x.shape[0], rows, *x.shape[2:]))


def _new_means(
    xs: Sequence[torch.Tensor], cu_seqlens: torch.Tensor | None, spec: Sequence[int]
) -> list[torch.Tensor]:
    return [_new_rows(x, compressed_rows(cu_seqlens, x.shape[1], spec[0], spec[1])) for x in xs]


# --- mean pooling -------------------------------------------------------------------------------


def _mean_pool(
    xs: Sequence[torch.Tensor], cu_seqlens: torch.Tensor | None, spec: Sequence[int]
) -> list[torch.Tensor]:
    """Means of the compressed blocks of each ``[B, M, Hkv, D]``: ``[B, C, Hkv, D]``."""

    def compute() -> Tensors:
        outs = _new_means(xs, cu_seqlens, spec)
        _passes(xs[0]).mean_pool_forward(xs, outs, cu_seqlens, _spec(*spec))
        return tuple(outs)

    return [*_replayed((*xs, cu_seqlens), ("means", *spec), compute)]


mean_pool = torch.library.custom_op("sparsek::nsa_mean_pool", _mean_pool, mutates_args=())
mean_pool.register_fake(_new_means)


def _mean_pool_bwd(
    douts: Sequence[torch.Tensor],
    num_tokens: int,
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
) -> list[torch.Tensor]:
    """Gradients of the pooled tensors' inputs, ``[B, num_tokens, Hkv, D]``."""

    def compute() -> Tensors:
        dxs = [_new_rows(dout, num_tokens) for dout in douts]
        _passes(douts[0]).mean_pool_backward(douts, dxs, cu_seqlens, _spec(*spec))
        return tuple(dxs)

    options = ("means backward", num_tokens, *spec)
    return [*_replayed((*douts, cu_seqlens), options, compute)]


mean_pool_bwd = torch.library.custom_op(
    "sparsek::nsa_mean_pool_bwd", _mean_pool_bwd, mutates_args=()
)


@mean_pool_bwd.register_fake
def _(douts: Sequence[torch.Tensor], num_tokens: Any, *_: Any) -> list[torch.Tensor]:
    return [_new_rows(dout, num_tokens) for dout in douts]


def _mean_pool_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    xs, cu_seqlens, spec = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.num_tokens, ctx.spec = xs[0].shape[1], spec


def _mean_pool_backward(ctx: Any, douts: list[torch.Tensor]) -> tuple[Any, ...]:
    (cu_seqlens,) = ctx.saved_tensors
    compute = _mean_pool_bwd if _unwatched(*douts, cu_seqlens) else mean_pool_bwd
    return compute(douts, ctx.num_tokens, cu_seqlens, ctx.spec), None, None


mean_pool.register_autograd(_mean_pool_backward, setup_context=_mean_pool_context)
mean_pool_directly = Direct(_mean_pool, _mean_pool_context, _mean_pool_backward)


# --- compressed attention -----------------------------------------------------------------------

_COMPRESSED = "SymInt seq_len, Tensor? cu_seqlens, SymInt[] spec, float softmax_scale"


def _compressed_problem(*inputs: Any) -> CompressedProblem:
    q, k_cmp, v_cmp, seq_len, cu_seqlens, spec, softmax_scale = inputs
    return CompressedProblem(q, k_cmp, v_cmp, seq_len, cu_seqlens, _spec(*spec), softmax_scale)


def _compressed_passes(x: torch.Tensor) -> Passes:
    passes = _passes(x)
    return passes.compressed_forward, passes.compressed_backward


compressed_fwd, compressed_bwd = attention_operators(
    "nsa_compressed", _COMPRESSED, _compressed_problem, _compressed_passes
)


# --- selection ----------------------------------------------------------------------------------


def compressed_select_directly(
    q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor, *rest: Any
) -> Tensors:
    """``compressed_fwd``, and ``select`` with its log-sum-exps; not differentiable."""
    problem = _compressed_problem(q, k_cmp, v_cmp, *rest)

    def compute() -> Tensors:
        out, lse, found = new_like(q), new_lse(q), _new_indices(q, k_cmp, problem.spec.top_n)
        _passes(q).attend_and_select(problem, out, lse, found)
        return out, lse, found

    seq_len, cu_seqlens, spec, softmax_scale = rest
    options = ("compressed", seq_len, tuple(spec), softmax_scale)
    return _replayed((q, k_cmp, v_cmp, cu_seqlens), options, compute)


compressed_select = torch.library.custom_op(
    "sparsek::nsa_compressed_select",
    compressed_select_directly,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k_cmp, Tensor v_cmp, {_COMPRESSED}) -> (Tensor, Tensor, Tensor)",
)


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


def _new_index(*inputs: Any) -> torch.Tensor:
    """Room for the index of selected attention, which kernels have."""
    q = inputs[0]
    return SelectedProblem(*inputs).new_index() if runs_kernels(q) else q.new_empty(0).int()


selected_fwd, selected_bwd = attention_operators(
    "nsa_selected", _SELECTED, SelectedProblem, _selected_passes, keeps=_new_index
)


# --- the gated sum ------------------------------------------------------------------------------


def selected_gated_directly(
    out_cmp: torch.Tensor, out_swa: torch.Tensor, gates: Sequence[torch.Tensor], *inputs: Any
) -> torch.Tensor:
    """Gated sum ``[B, N, Hq, D]`` of the selected branch and two outputs; not differentiable."""

    def compute() -> Tensors:
        out = new_like(out_cmp)
        _passes(out).selected_gated(SelectedProblem(*inputs), out, (out_cmp, out_swa), gates)
        return (out,)

    q, k, v, block_indices, cu_seqlens, *sizes = inputs
    read = (out_cmp, out_swa, *gates, q, k, v, block_indices, cu_seqlens)
    (out,) = _replayed(read, ("gated", *sizes), compute)
    return out


selected_gated = torch.library.custom_op(
    "sparsek::nsa_selected_gated",
    selected_gated_directly,
    mutates_args=(),
    schema="(Tensor out_cmp, Tensor out_swa, Tensor[] gates, Tensor q, Tensor k, Tensor v, "
    f"{_SELECTED}) -> Tensor",
)
selected_gated.register_fake(lambda out_cmp, *_: new_like(out_cmp))


_BRANCHES = (
    "Tensor[] outs, Tensor[] lses, Tensor[] gates, Tensor q, Tensor[] keys, Tensor[] values, "
    "Tensor block_indices, SymInt seq_len, Tensor? cu_seqlens, SymInt[] spec, SymInt window_size, "
    "float softmax_scale"
)


def _selected_branch(*inputs: Any) -> tuple[SelectedProblem, torch.Tensor]:
    """The selected branch of a call of ``branches``, and room for its index, which it has."""
    *_, q, keys, values, block_indices, _, cu_seqlens, spec, _, softmax_scale = inputs
    selected = (q, keys[1], values[1], block_indices, cu_seqlens, spec[2], softmax_scale)
    index = _new_index(*selected)
    return SelectedProblem(*selected, index), index


def _branches(
    outs: Sequence[torch.Tensor], lses: Any, gates: Sequence[torch.Tensor], *inputs: Any
) -> Tensors:
    """Gated sum of three branches, in the order compressed, selected, sliding.

    ``outs [B, N, Hq, D]`` and ``lses [B, Hq, N]`` are results of the compressed and the sliding
    branch's operators, contiguous and without gradients of their own; ``gates [B, N, Hq]``, ``q``,
    ``keys`` and ``values`` receive the gradients.  What follows the sum is for the backward pass:
    output and log-sum-exp of the selected branch, and its index where kernels run.
    """
    q, keys, values, block_indices, _, cu_seqlens, spec, _, softmax_scale = inputs

    def compute() -> Tensors:
        problem, index = _selected_branch(*inputs)
        out, out_slc, lse_slc = new_like(q), new_like(q), new_lse(q)
        _passes(q).selected_forward(problem, out_slc, lse_slc)
        _passes(q).gated_forward(out, (outs[0], out_slc, outs[1]), gates)
        return out, out_slc, lse_slc, index

    read = (*outs, *gates, q, keys[1], values[1], block_indices, cu_seqlens)
    return _replayed(read, ("branches", tuple(spec), softmax_scale), compute)


branches = torch.library.custom_op(
    "sparsek::nsa_branches",
    _branches,
    mutates_args=(),
    schema=f"({_BRANCHES}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@branches.register_fake
def _(outs: Any, lses: Any, gates: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
    problem, index = _selected_branch(*inputs)
    return new_like(problem.q), new_like(problem.q), new_lse(problem.q), index


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


def _branches_bwd(
    dout: torch.Tensor, index: torch.Tensor, *inputs: Any
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of q, keys, values and gates; ``outs`` and ``lses`` are of all three branches."""
    outs, lses, gates, q, keys, values, block_indices, seq_len, cu_seqlens, spec, *rest = inputs
    window_size, softmax_scale = rest

    def compute() -> Tensors:
        problem = GatedProblem(
            PerBranch(*outs), PerBranch(*lses), PerBranch(*gates), q, PerBranch(*keys),
            PerBranch(*values), block_indices, seq_len, cu_seqlens, _spec(*spec), window_size,
            softmax_scale, index,
        )  # fmt: skip
        found = None
        if runs_kernels(q):
            from sparsek_kernels.nsa.backward import backward

            found = backward(problem, dout)
        grads = found or _branch_gradients(problem, dout)
        return grads.q, *grads.keys, *grads.values, *grads.gates

    lists = (*outs, *lses, *gates, *keys, *values)
    options = ("backward", seq_len, tuple(spec), window_size, softmax_scale)
    found = _replayed((dout, index, q, *lists, block_indices, cu_seqlens), options, compute)
    return found[0], [*found[1:4]], [*found[4:7]], [*found[7:]]


branches_bwd = torch.library.custom_op(
    "sparsek::nsa_branches_bwd",
    _branches_bwd,
    mutates_args=(),
    schema=f"(Tensor dout, Tensor index, {_BRANCHES}) -> (Tensor, Tensor[], Tensor[], Tensor[])",
)


@branches_bwd.register_fake
def _(
    dout: Any, index: Any, outs: Any, lses: Any, *inputs: Any
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    gates, q, keys, values, *_ = inputs
    dkeys, dvalues, dgates = ([new_like(x) for x in leaves] for leaves in (keys, values, gates))
    return new_like(q), dkeys, dvalues, dgates


def _branches_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    outs, lses, gates, q, keys, values, block_indices, seq_len, cu_seqlens, *scalars = inputs
    _, out_slc, lse_slc, index = output
    outs, lses = (outs[0], out_slc, outs[1]), (lses[0], lse_slc, lses[1])
    ctx.save_for_backward(q, block_indices, cu_seqlens, index, *outs, *lses, *gates, *keys, *values)
    ctx.seq_len, ctx.scalars = seq_len, scalars
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _branches_backward(ctx: Any, dout: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    if dout is None:
        return ([None] * 2, [None] * 2, [None] * 3, None, [None] * 3, [None] * 3, *[None] * 6)
    saved = ctx.saved_tensors  # asked for once: hooks may bring them back
    q, block_indices, cu_seqlens, index, *lists = saved
    outs, lses, gates, keys, values = (lists[i : i + 3] for i in range(0, 15, 3))
    compute = _branches_bwd if _unwatched(dout, *saved) else branches_bwd
    dq, dkeys, dvalues, dgates = compute(
        dout, index, outs, lses, gates, q, keys, values, block_indices, ctx.seq_len, cu_seqlens,
        *ctx.scalars,
    )  # fmt: skip
    return [None] * 2, [None] * 2, dgates, dq, dkeys, dvalues, *[None] * 6


branches.register_autograd(_branches_backward, setup_context=_branches_context)
branches_directly = Direct(_branches, _branches_context, _branches_backward)
