"""One sink-window attention call, as launchers and the torch path take it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sparsek_kernels.common.device import device_arch
from sparsek_kernels.common.operators import make_contiguous, pointers
from sparsek_kernels.sink_window.config import LaunchConfig, ProblemShape, select_config
from sparsek_kernels.sink_window.spec import AttentionSpec

_WIDEST = 1 << 30  # more keys than a sequence has


@dataclass(frozen=True, eq=False)
class SinkWindowProblem:
    """Checked inputs of one call: tensors as of ``sink_flash_attention``, mask and scale.

    ``sinks`` and offsets are made contiguous.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spec: AttentionSpec
    sinks: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None

    def __post_init__(self) -> None:
        make_contiguous(self, "sinks", "cu_seqlens_q", "cu_seqlens_k")

    @cached_property
    def shape(self) -> ProblemShape:
        """Sizes and mask, from which the launch configuration follows."""
        batch, num_q, num_heads, head_dim = self.q.shape
        cu_seqlens = self.cu_seqlens_q
        return ProblemShape(
            batch=batch,
            num_q=num_q,
            num_k=self.k.shape[1],
            num_heads=num_heads,
            num_kv_heads=self.k.shape[2],
            head_dim=head_dim,
            num_sink=min(self.spec.num_sink, self.k.shape[1]),
            window_size=self.spec.window_size,
            causal=self.spec.causal,
            num_seqs=None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        )

    @property
    def varlen(self) -> bool:
        """Whether sequences are packed."""
        return self.cu_seqlens_q is not None

    @property
    def offsets(self) -> tuple[torch.Tensor, ...]:
        """Offsets of packed queries and of packed keys, as kernels take them."""
        return pointers(self.q, self.cu_seqlens_q, self.cu_seqlens_k)

    @property
    def window(self) -> tuple[int, int]:
        """Sinks and window, as kernels take them: they add positions to it, in 32 bits."""
        return self.shape.num_sink, min(self.spec.window_size or 0, _WIDEST)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Queries, keys and query heads."""
        return self.shape.num_q, self.shape.num_k, self.shape.num_heads

    def launch_config(self) -> LaunchConfig:
        """The table's configuration for these inputs on their GPU."""
        return select_config(self.shape, self.q.dtype, device_arch(self.q.device))
