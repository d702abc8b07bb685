"""Gradients of the gated sum on Hopper: one backward pass for the three branches.

With ``o = sum_b g_b o_b``, ``p_b = exp(s_b - lse_b)`` and ``dg_b = sum_d do o_b``, the gradient of
the scores of branch ``b`` is

    ds_b = g_b p_b (do . v - dg_b),    g_b p_b = exp(s_b - (lse_b - ln g_b))

so every branch takes ``do``, ``dg_b`` in place of its row sums, and a log-sum-exp with the gate
folded in.  ``g_b do`` is never formed.  The three branches add to one fp32 gradient of q.
"""

from __future__ import annotations

import torch

from sparsek_kernels.common.alignment import describable
from sparsek_kernels.common.operators import new_like
from sparsek_kernels.nsa.compressed import launch_sm90 as launch_compressed
from sparsek_kernels.nsa.gate.branches import PerBranch
from sparsek_kernels.nsa.gate.launch import gate_rows
from sparsek_kernels.nsa.problem import GatedGradients, GatedProblem
from sparsek_kernels.nsa.selected import launch_bwd as launch_selected
from sparsek_kernels.sink_window import launch_sm90 as launch_sliding


def backward(problem: GatedProblem, dout: torch.Tensor) -> GatedGradients | None:
    """Gradients of q, keys, values and gates, or ``None`` where these kernels do not run.

    Bitwise reproducible.
    """
    keys, values, sliding = problem.keys, problem.values, problem.sliding
    tile = problem.compressed.config.compressed_bwd_hopper
    sliding_config = sliding.launch_config()
    sliding_tile = sliding_config.hopper_backward
    if tile is None or sliding_tile is None:
        return None
    if 0 in (keys.cmp.numel(), problem.block_indices.numel()):
        return None
    if not describable(problem.q, keys.cmp, values.cmp, keys.swa, values.swa):
        return None
    if not describable(dout):
        dout = dout.contiguous()
    dgates, delta, folded = gate_rows(dout, problem.outs, problem.gates, problem.lses)
    # The window first: it fills what the others add to.
    dq_acc = launch_sliding.new_accumulator(sliding, sliding_tile)
    dk_swa, dv_swa = new_like(keys.swa), new_like(values.swa)
    together = sliding_config.backward_together
    launch_sliding.backward(
        sliding, sliding_tile, together, dq_acc, dk_swa, dv_swa, dout, folded.swa, delta.swa
    )
    dk_cmp, dv_cmp = launch_compressed.accumulate(
        problem.compressed, tile, dq_acc, dout, folded.cmp, delta.cmp
    )
    dq, dk, dv = launch_selected.backward_rows(
        problem.selected, dout, folded.slc, delta.slc, dq_acc
    )
    return GatedGradients(dq, PerBranch(dk_cmp, dk, dk_swa), PerBranch(dv_cmp, dv, dv_swa), dgates)
