"""The gated sum of the three branches as one ``torch.library`` operator, with its gradient."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.nsa.ops import runs_kernels
from sparsek_kernels.nsa.torch_path import compute_dtype


@torch.library.custom_op("sparsek::nsa_gate", mutates_args=())
def gate(
    out_cmp: torch.Tensor,
    out_slc: torch.Tensor,
    out_swa: torch.Tensor,
    g_cmp: torch.Tensor,
    g_slc: torch.Tensor,
    g_swa: torch.Tensor,
) -> torch.Tensor:
    """Gated sum of three branches: outputs ``[B, N, Hq, D]``, gates ``[B, N, Hq]``."""
    out = torch.empty(out_cmp.shape, dtype=out_cmp.dtype, device=out_cmp.device)
    if runs_kernels(out_cmp):
        from sparsek_kernels.nsa.launch_gate import forward

        forward(out, (out_cmp, out_slc, out_swa), (g_cmp, g_slc, g_swa))
        return out
    compute = compute_dtype(out.dtype)
    total = torch.zeros(out.shape, dtype=compute, device=out.device)
    for branch, weight in ((out_cmp, g_cmp), (out_slc, g_slc), (out_swa, g_swa)):
        total += branch.to(compute) * weight.to(compute)[..., None]
    return out.copy_(total)


@gate.register_fake
def _(
    out_cmp: torch.Tensor,
    out_slc: torch.Tensor,
    out_swa: torch.Tensor,
    g_cmp: torch.Tensor,
    g_slc: torch.Tensor,
    g_swa: torch.Tensor,
) -> torch.Tensor:
    return torch.empty(out_cmp.shape, dtype=out_cmp.dtype, device=out_cmp.device)


@torch.library.custom_op("sparsek::nsa_gate_bwd", mutates_args=())
def gate_bwd(
    dout: torch.Tensor,
    out_cmp: torch.Tensor,
    out_slc: torch.Tensor,
    out_swa: torch.Tensor,
    g_cmp: torch.Tensor,
    g_slc: torch.Tensor,
    g_swa: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the three outputs and of the three gates."""
    branches, weights = (out_cmp, out_slc, out_swa), (g_cmp, g_slc, g_swa)
    found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (*branches, *weights)]
    if runs_kernels(out_cmp):
        from sparsek_kernels.nsa.launch_gate import backward

        backward(found, dout, branches, weights)
    else:
        compute = compute_dtype(out_cmp.dtype)
        upstream = dout.to(compute)
        for i in range(3):
            found[i].copy_(upstream * weights[i].to(compute)[..., None])
            found[3 + i].copy_((upstream * branches[i].to(compute)).sum(-1))
    return found[0], found[1], found[2], found[3], found[4], found[5]


@gate_bwd.register_fake
def _(
    dout: torch.Tensor,
    out_cmp: torch.Tensor,
    out_slc: torch.Tensor,
    out_swa: torch.Tensor,
    g_cmp: torch.Tensor,
    g_slc: torch.Tensor,
    g_swa: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    made = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (out_cmp, out_slc, out_swa, g_cmp, g_slc, g_swa)
    ]
    return made[0], made[1], made[2], made[3], made[4], made[5]


def _gate_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gate_backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    grads: tuple[Any, ...] = gate_bwd(dout, *ctx.saved_tensors)
    return grads


gate.register_autograd(_gate_backward, setup_context=_gate_context)
