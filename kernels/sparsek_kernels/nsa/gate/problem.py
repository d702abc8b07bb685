"""The gated sum of the three branches, with everything that its gradients are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.sink_window.problem import SinkWindowProblem
from sparsek_kernels.sink_window.spec import AttentionSpec


class PerBranch(NamedTuple):
    """A tensor of the compressed, of the selected and of the sliding branch."""

    cmp: torch.Tensor
    slc: torch.Tensor
    swa: torch.Tensor


class GatedGradients(NamedTuple):
    """Gradients of q, of the branches' keys and values, and of the gates."""

    q: torch.Tensor
    keys: PerBranch
    values: PerBranch
    gates: PerBranch


@dataclass(frozen=True)
class GatedProblem:
    """Native sparse attention once its branches are computed (arXiv 2502.11089, equation 5).

    Args:
        outs: results of the branches, ``[B, N, Hq, D]``, contiguous.
        lses: their log-sum-exps ``[B, Hq, N]``, contiguous.
        gates: weights of the branches, ``[B, N, Hq]``.
        q: ``[B, N, Hq, D]``.
        keys: ``[B, C, Hkv, D]``, ``[B, M, Hkv, D]`` and ``[B, M', Hkv, D]``.
        values: of the same shapes.
        block_indices: ``[B, N, Hkv, S]`` int32 blocks of the selected branch.
        cu_seqlens: ``[sequences + 1]`` int32 offsets of packed sequences.
        spec: block sizes and counts.
        window_size: latest tokens that the sliding branch sees.
        softmax_scale: factor of ``q . k``.
    """

    outs: PerBranch
    lses: PerBranch
    gates: PerBranch
    q: torch.Tensor
    keys: PerBranch
    values: PerBranch
    block_indices: torch.Tensor
    cu_seqlens: torch.Tensor | None
    spec: NSASpec
    window_size: int
    softmax_scale: float

    @cached_property
    def compressed(self) -> CompressedProblem:
        """The compressed branch."""
        return CompressedProblem(
            q=self.q,
            k_cmp=self.keys.cmp,
            v_cmp=self.values.cmp,
            seq_len=self.keys.slc.shape[1],
            cu_seqlens=self.cu_seqlens,
            spec=self.spec,
            softmax_scale=self.softmax_scale,
        )

    @cached_property
    def selected(self) -> SelectedProblem:
        """The selected branch."""
        return SelectedProblem(
            q=self.q,
            k=self.keys.slc,
            v=self.values.slc,
            block_indices=self.block_indices,
            cu_seqlens=self.cu_seqlens,
            sel_block_size=self.spec.sel_block_size,
            softmax_scale=self.softmax_scale,
        )

    @cached_property
    def sliding(self) -> SinkWindowProblem:
        """The sliding branch."""
        return SinkWindowProblem(
            q=self.q,
            k=self.keys.swa,
            v=self.values.swa,
            spec=AttentionSpec(0, self.window_size, True, self.softmax_scale),
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens,
        )
