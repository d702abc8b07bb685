"""The gated sum of the three branches, with the inputs of its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.gate.branches import PerBranch
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.sink_window.problem import SinkWindowProblem
from sparsek_kernels.sink_window.spec import AttentionSpec


class GatedGradients(NamedTuple):
    """Gradients of q, of the branches' keys and values, and of the gates."""

    q: torch.Tensor
    keys: PerBranch
    values: PerBranch
    gates: PerBranch


@dataclass(frozen=True, eq=False)
class GatedProblem:
    """Native sparse attention once its branches are computed (arXiv 2502.11089, equation 5).

    ``outs`` and ``lses`` are the branches' results, contiguous; ``index`` is what the selected
    branch left for its backward pass (``SelectedProblem``); the rest is as ``nsa_attention`` names
    it.
    """

    outs: PerBranch
    lses: PerBranch
    gates: PerBranch
    q: torch.Tensor
    keys: PerBranch
    values: PerBranch
    block_indices: torch.Tensor
    seq_len: int
    cu_seqlens: torch.Tensor | None
    spec: NSASpec
    window_size: int
    softmax_scale: float
    index: torch.Tensor | None = None

    @cached_property
    def compressed(self) -> CompressedProblem:
        """The compressed branch."""
        k, v = self.keys.cmp, self.values.cmp
        return CompressedProblem(
            self.q, k, v, self.seq_len, self.cu_seqlens, self.spec, self.softmax_scale
        )

    @cached_property
    def selected(self) -> SelectedProblem:
        """The selected branch."""
        k, v, block = self.keys.slc, self.values.slc, self.spec.sel_block_size
        return SelectedProblem(
            self.q, k, v, self.block_indices, self.cu_seqlens, block, self.softmax_scale,
            index=self.index,
        )  # fmt: skip

    @cached_property
    def sliding(self) -> SinkWindowProblem:
        """The sliding branch."""
        k, v, cu_seqlens = self.keys.swa, self.values.swa, self.cu_seqlens
        spec = AttentionSpec(0, self.window_size, True, self.softmax_scale)
        return SinkWindowProblem(self.q, k, v, spec, None, cu_seqlens, cu_seqlens)
