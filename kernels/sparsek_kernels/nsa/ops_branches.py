"""The gated sum of the three branches as ``torch.library`` operators.

``nsa_branches`` takes the branches' outputs and what they were computed from, and its gradient is
that of the whole attention: one backward pass for three branches.  ``nsa_selected_gated``, for
calls that need no gradient, computes the selected branch and adds the others on the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparsek_kernels.nsa import ops
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.nsa.torch_path import compute_dtype
from sparsek_kernels.sink_window.ops import sink_flash_bwd

Tensors = Sequence[torch.Tensor]


def _gated_sum(outs: Tensors, gates: Tensors) -> torch.Tensor:
    out = torch.empty(outs[0].shape, dtype=outs[0].dtype, device=outs[0].device)
    if ops.runs_kernels(out):
        from sparsek_kernels.nsa.gate.launch import forward

        forward(out, outs, gates)
        return out
    compute = compute_dtype(out.dtype)
    total = torch.zeros(out.shape, dtype=compute, device=out.device)
    for branch, weight in zip(outs, gates, strict=True):
        total += branch.to(compute) * weight.to(compute)[..., None]
    return out.copy_(total)


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
    selected = (q, k, v, block_indices, cu_seqlens, sel_block_size, softmax_scale)
    if ops.runs_kernels(q):
        from sparsek_kernels.nsa.selected.launch_fwd import forward_gated

        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        forward_gated(SelectedProblem(*selected), out, (out_cmp, out_swa), gates)
        return out
    out_slc, _ = ops.selected_fwd(*selected)
    return _gated_sum((out_cmp, out_slc, out_swa), gates)


@selected_gated.register_fake
def _(
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
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _gate_gradients(
    dout: torch.Tensor, branches: Tensors, gates: Tensors
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of the three outputs and of the three gates."""
    new = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (*branches, *gates)]
    if ops.runs_kernels(dout):
        from sparsek_kernels.nsa.gate.launch import backward

        backward(new, dout, branches, gates)
    else:
        compute = compute_dtype(dout.dtype)
        upstream = dout.to(compute)
        for i in range(3):
            new[i].copy_(upstream * gates[i].to(compute)[..., None])
            new[3 + i].copy_((upstream * branches[i].to(compute)).sum(-1))
    return new[:3], new[3:]


@torch.library.custom_op("sparsek::nsa_branches", mutates_args=())
def branches(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    block_indices: torch.Tensor,
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
    return _gated_sum(outs, gates)


@branches.register_fake
def _(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    block_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
    window_size: int,
    softmax_scale: float,
) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


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
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
    window_size: int,
    softmax_scale: float,
) -> list[torch.Tensor]:
    """Gradients of q, then of keys, values and gates in their order."""
    if ops.runs_kernels(q):
        from sparsek_kernels.nsa.backward import backward

        found = backward(
            *(dout, q, keys, values, gates, outs, lses, block_indices, cu_seqlens),
            *(NSASpec(*spec), window_size, softmax_scale),
        )
        if found is not None:
            return list(found)
    douts, dgates = _gate_gradients(dout, outs, gates)
    length = keys[1].shape[1]
    cmp, slc, swa = ((douts[i], None, q, keys[i], values[i], outs[i], lses[i]) for i in range(3))
    dq_cmp, dk_cmp, dv_cmp = ops.compressed_bwd(*cmp, length, cu_seqlens, spec, softmax_scale)
    dq_slc, dk, dv = ops.selected_bwd(*slc, block_indices, cu_seqlens, spec[2], softmax_scale)
    dq_swa, dk_swa, dv_swa, _ = sink_flash_bwd(
        *swa, None, cu_seqlens, cu_seqlens, 0, window_size, True, softmax_scale
    )
    dq = dq_cmp.to(compute_dtype(q.dtype)).add_(dq_slc).add_(dq_swa).to(q.dtype)
    return [dq, dk_cmp, dk, dk_swa, dv_cmp, dv, dv_swa, *dgates]


@branches_bwd.register_fake
def _(
    dout: torch.Tensor,
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    block_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    spec: Sequence[int],
    window_size: int,
    softmax_scale: float,
) -> list[torch.Tensor]:
    leaves = (q, *keys, *values, *gates)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in leaves]


def _context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    outs, lses, gates, q, keys, values, block_indices, cu_seqlens, *scalars = inputs
    ctx.save_for_backward(*outs, *lses, *gates, q, *keys, *values, block_indices, cu_seqlens)
    ctx.scalars = scalars


def _backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    lists = (saved[0:3], saved[3:6], saved[6:9], saved[9], saved[10:13], saved[13:16])
    dq, *rest = branches_bwd(dout, *lists, *saved[16:], *ctx.scalars)
    nothing = [None] * 3
    return nothing, nothing, rest[6:], dq, rest[:3], rest[3:6], None, None, None, None, None


branches.register_autograd(_backward, setup_context=_context)
