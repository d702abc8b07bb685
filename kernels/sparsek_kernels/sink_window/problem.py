"""One sink-window attention call, as launchers and the torch path take it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from sparsek_kernels.common.device import device_arch
from sparsek_kernels.common.operators import make_contiguous, pointers
from sparsek_kernels.sink_window.config import LaunchConfig, ProblemShape, select_config
from sparsek_kernels.sink_window.spec import AttentionSpec

_WIDEST = 1 << 30  # more keys than a sequence has


@dataclass(frozen=True, eq=False)
class KeyTerms:
    """Rows of ``dk`` and ``dv`` that a backward pass also gives unrounded: terms of sums.

    Args:
        slots: ``[M]`` int32, the place of each key's row among them, -1 for none; a place is one
            key's.
        grads: ``[2, B, rows, Hkv, D]``, of k and of v, in fp32 (fp64 where k is), to be filled.
    """

    slots: torch.Tensor
    grads: torch.Tensor

    def of(self, seqs: slice, kv_heads: slice = slice(None)) -> KeyTerms:
        """The same of some entries of the batch and some KV heads."""
        return replace(self, grads=self.grads[:, seqs, :, kv_heads])

    def fill(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Take the rows of ``dk`` and ``dv`` ``[B, M, Hkv, D]``."""
        keys = (self.slots >= 0).nonzero()[:, 0]
        for grads, x in zip(self.grads, (dk, dv), strict=True):
            grads[:, self.slots[keys].long()] = x[:, keys].to(grads.dtype)


def term_arguments(
    terms: KeyTerms | None, stand_in: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], torch.Tensor]:
    """Gradients, strides and slots as kernels take them."""
    if terms is None:
        return (stand_in, stand_in), (0, 0, 0), stand_in
    dk, dv = terms.grads
    return (dk, dv), dk.stride()[:3], terms.slots


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
