"""The backward passes of the three gated branches at once, on Hopper.

With ``o = sum_b g_b o_b``, ``p_b = exp(s_b - lse_b)`` and ``dg_b = sum_d do o_b``, the gradient of
the scores of branch ``b`` is

    ds_b = g_b p_b (do . v - dg_b),    g_b p_b = exp(s_b - (lse_b - ln g_b))

so every branch takes ``do`` itself, ``dg_b`` for its row sums, and a log-sum-exp with the gate
folded in; ``g_b do`` is never formed.  All three add to one fp32 gradient of q.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from sparsek_kernels.common.alignment import describable
from sparsek_kernels.nsa.compressed import launch_sm90 as launch_compressed
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.gate.kernels.gate import nsa_gate_rows_kernel
from sparsek_kernels.nsa.selected import launch_bwd as launch_selected_bwd
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.sink_window import launch_sm90 as launch_window
from sparsek_kernels.sink_window.problem import SinkWindowProblem
from sparsek_kernels.sink_window.spec import AttentionSpec


def gate_rows(
    dout: torch.Tensor,
    branches: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Gradients of the gates; the same ``[3, B, Hq, N]`` fp32; log-sum-exps with gates, likewise.

    ``branches [B, N, Hq, D]`` and ``lses [B, Hq, N]`` are contiguous.
    """
    batch, num_q, num_heads, head_dim = dout.shape
    dims = (3, batch, num_heads, num_q)
    dots = torch.empty(dims, dtype=torch.float32, device=dout.device)
    folded = torch.empty_like(dots)
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in gates]
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_t = 8  # tokens: 32 bytes of a statistic
    block_h = max(8192 // block_d // block_t, 1)
    tiles = triton.cdiv(num_q, block_t) * triton.cdiv(num_heads, block_h)
    nsa_gate_rows_kernel[(tiles, batch)](
        *grads,
        dots,
        folded,
        dout,
        *branches,
        *(x.contiguous() for x in gates),
        *lses,
        *dout.stride(),
        num_q,
        num_heads,
        batch * num_heads * num_q,
        HEAD_DIM=head_dim,
        BLOCK_T=block_t,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=8,
    )
    return grads, dots, folded


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
    branches: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    block_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
    window_size: int,
    scale: float,
) -> tuple[torch.Tensor, ...] | None:
    """Gradients of q, keys, values and gates, or ``None`` where these kernels do not run.

    Keys, values, gates, branches and log-sum-exps are in the order compressed, selected, sliding;
    the gradients are ``(dq, dk_cmp, dk, dk_swa, dv_cmp, dv, dv_swa, dg_cmp, dg_slc, dg_swa)``.
    Bitwise reproducible.
    """
    k_cmp, k, k_swa = keys
    v_cmp, v, v_swa = values
    compressed = CompressedProblem(q, k_cmp, v_cmp, k.shape[1], cu_seqlens, spec, scale)
    rules = AttentionSpec(0, window_size, True, scale)
    window = SinkWindowProblem(q, k_swa, v_swa, rules, None, cu_seqlens, cu_seqlens)
    window_config = window.launch_config()
    tile, window_tile = compressed.config.hopper_bwd, window_config.hopper_backward
    if tile is None or window_tile is None or 0 in (k_cmp.numel(), block_indices.numel()):
        return None
    if not describable(q, k_cmp, v_cmp, k_swa, v_swa):
        return None
    if not describable(dout):
        dout = dout.contiguous()
    dgates, dots, folded = gate_rows(dout, branches, gates, lses)
    # The window first: it fills what the others add to.
    dq_acc = launch_window.new_accumulator(window, window_tile)
    dk_swa, dv_swa = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k_swa, v_swa))
    together = window_config.backward_together
    launch_window.backward(
        window, window_tile, together, dq_acc, dk_swa, dv_swa, dout, folded[2], dots[2]
    )
    dk_cmp, dv_cmp = launch_compressed.accumulate(
        compressed, tile, dq_acc, dout, folded[0], dots[0]
    )
    selected = SelectedProblem(q, k, v, block_indices, cu_seqlens, spec.sel_block_size, scale)
    dq, dk, dv = launch_selected_bwd.backward_rows(selected, dout, folded[1], dots[1], dq_acc)
    return dq, dk_cmp, dk, dk_swa, dv_cmp, dv, dv_swa, *dgates
