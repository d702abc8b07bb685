"""``torch.library`` operators of native sparse attention, with fakes and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparsek_kernels.nsa import torch_path
from sparsek_kernels.nsa.checks import KERNEL_DTYPES
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.sequences import compressed_rows
from sparsek_kernels.nsa.spec import NSASpec


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether Triton kernels take these inputs (else torch operations do)."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES


def spec_list(spec: NSASpec) -> list[int]:
    """The fields of ``spec`` in order, as operators take them."""
    return [
        spec.cmp_block_size,
        spec.cmp_stride,
        spec.sel_block_size,
        spec.top_n,
        spec.num_init_blocks,
        spec.num_local_blocks,
    ]


def _new_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _new_lse(q: torch.Tensor) -> torch.Tensor:
    dtype = torch_path.compute_dtype(q.dtype)
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)


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
    if runs_kernels(x):
        from sparsek_kernels.nsa.compress.launch import mean_pool_forward

        mean_pool_forward(x, out, cu_seqlens, rules)
    else:
        torch_path.mean_pool_forward(x, out, cu_seqlens, rules)
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
    if runs_kernels(dout):
        from sparsek_kernels.nsa.compress.launch import mean_pool_backward

        mean_pool_backward(dout, dx, cu_seqlens, NSASpec(*spec))
    else:
        torch_path.mean_pool_backward(dout, dx, cu_seqlens, NSASpec(*spec))
    return dx


@mean_pool_bwd.register_fake
def _(dout: torch.Tensor, num_tokens: int, *_: Any) -> torch.Tensor:
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
    out, lse = _new_like(q), _new_lse(q)
    if runs_kernels(q):
        from sparsek_kernels.nsa.compressed.launch import forward

        forward(problem, out, lse)
    else:
        torch_path.compressed_forward(problem, out, lse)
    return out, lse


@compressed_fwd.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_like(q), _new_lse(q)


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
    if runs_kernels(q):
        from sparsek_kernels.nsa.compressed.launch import backward

        return backward(problem, dout, dlse, out, lse)
    return torch_path.compressed_backward(problem, dout, dlse, out, lse)


@compressed_bwd.register_fake
def _(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _new_like(q), _new_like(k_cmp), _new_like(v_cmp)


def _compressed_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k_cmp, v_cmp, seq_len, cu_seqlens, spec, scale = inputs
    ctx.save_for_backward(q, k_cmp, v_cmp, *output, cu_seqlens)
    ctx.seq_len, ctx.spec, ctx.scale = seq_len, spec, scale
    ctx.set_materialize_grads(False)


def _compressed_backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[Any, ...]:
    q, k_cmp, v_cmp, out, lse, cu_seqlens = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 7
    dout = torch.zeros_like(out) if dout is None else dout
    grads = compressed_bwd(
        dout, dlse, q, k_cmp, v_cmp, out, lse, ctx.seq_len, cu_seqlens, ctx.spec, ctx.scale
    )
    return (*grads, None, None, None, None)


compressed_fwd.register_autograd(_compressed_backward, setup_context=_compressed_context)


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
    out, lse, found = _new_like(q), _new_lse(q), _new_indices(q, k_cmp, spec)
    if runs_kernels(q):
        from sparsek_kernels.nsa.select.launch_fused import attend_and_select

        attend_and_select(problem, out, lse, found)
    else:
        torch_path.compressed_forward(problem, out, lse)
        torch_path.select_forward(problem, lse, found)
    return out, lse, found


@compressed_select.register_fake
def _(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _new_like(q), _new_lse(q), _new_indices(q, k_cmp, spec)


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
    if runs_kernels(q):
        from sparsek_kernels.nsa.select.launch import select as launch

        launch(problem, lse, found)
    else:
        torch_path.select_forward(problem, lse, found)
    return found


@select.register_fake
def _(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
    *_: Any,
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
    out, lse = _new_like(q), _new_lse(q)
    if runs_kernels(q):
        from sparsek_kernels.nsa.selected.launch_fwd import forward

        forward(problem, out, lse)
    else:
        torch_path.selected_forward(problem, out, lse)
    return out, lse


@selected_fwd.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_like(q), _new_lse(q)


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
    if runs_kernels(q):
        from sparsek_kernels.nsa.selected.launch_bwd import backward

        return backward(problem, dout, dlse, out, lse)
    return torch_path.selected_backward(problem, dout, dlse, out, lse)


@selected_bwd.register_fake
def _(
    dout: Any, dlse: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _new_like(q), _new_like(k), _new_like(v)


def _selected_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, block_indices, cu_seqlens, sel_block_size, scale = inputs
    ctx.save_for_backward(q, k, v, *output, block_indices, cu_seqlens)
    ctx.sel_block_size, ctx.scale = sel_block_size, scale
    ctx.set_materialize_grads(False)


def _selected_backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[Any, ...]:
    q, k, v, out, lse, block_indices, cu_seqlens = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 7
    dout = torch.zeros_like(out) if dout is None else dout
    grads = selected_bwd(
        dout, dlse, q, k, v, out, lse, block_indices, cu_seqlens, ctx.sel_block_size, ctx.scale
    )
    return (*grads, None, None, None, None)


selected_fwd.register_autograd(_selected_backward, setup_context=_selected_context)
