"""A learned mask: a gate for every block, trained with the model (Gumbel-softmax)."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch.distributions import RelaxedBernoulli

from sparsek_kernels import block_sparse_attention
from sparsek_kernels.block_sparse.structure import BlockStructure
from sparsek_kernels.checks import MAX_HEAD_DIM, check_scale

_LEAST = 1e-4
"""A closed gate: its blocks weigh this much, so that it may open again."""


class BlockGates(torch.nn.Module):
    """A gate in ``[0, 1]`` for each block: drawn while training, its probability afterwards.

    Two-way Gumbel-softmax (Jang et al., arXiv 1611.01144; Maddison et al., arXiv 1611.00712) over
    keeping and leaving out.  :meth:`attend` weighs the keys of a block by its gate.

    Args:
        shape: ``(P, R, C)``: patterns, query blocks and key blocks.
        temperature: above 0; lower draws gates nearer to 0 and 1, with noisier gradients.
        initial: logit of keeping a block at the start.
    """

    def __init__(
        self, shape: tuple[int, int, int], *, temperature: float = 0.5, initial: float = 2.0
    ) -> None:
        super().__init__()
        if not temperature > 0.0:
            raise ValueError(f"temperature: expected a number above 0, got {temperature}")
        self.temperature = temperature
        self.logits = torch.nn.Parameter(torch.full(shape, float(initial)))

    def forward(self) -> torch.Tensor:
        """``[P, R, C]`` gates: a draw while training, else the probabilities."""
        if not self.training:
            return self.probabilities()
        temperature = torch.as_tensor(self.temperature)
        drawn = RelaxedBernoulli(temperature, logits=self.logits, validate_args=False)
        gates: torch.Tensor = drawn.rsample()
        return gates

    def probabilities(self) -> torch.Tensor:
        """``[P, R, C]``: how likely each block is kept."""
        return torch.sigmoid(self.logits)

    def sparsity_loss(self, visible: torch.Tensor, sparsity: float) -> torch.Tensor:
        """The auxiliary loss: the square of how far the expected share kept is from the target.

        Args:
            visible: ``[R, C]`` bool, the blocks that causality leaves.
            sparsity: share of them to leave out.
        """
        kept = self.probabilities()[:, visible].mean(1)
        return (kept - (1.0 - sparsity)).square().mean()


def gated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: BlockStructure,
    gates: torch.Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Attention whose weights are multiplied by the gate of their block, then normalised.

    The logarithm of a gate is added to the scores of its block.  It travels in the head dimension:
    queries carry the logarithms of their row of blocks, keys the number of their column.

    Args:
        q: ``[B, N, Hq, D]``.
        k: ``[B, M, Hkv, D]``.
        v: ``[B, M, Hkv, D]``.
        pattern: the blocks to look at.
        gates: ``[P, R, C]`` from 0 to 1; P divides Hq.
        causal: whether a query is limited to keys up to its own position.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.

    Returns:
        ``[B, N, Hq, D]``, differentiable in q, k, v and the gates.

    Raises:
        NotImplementedError: D and the key blocks together are more than 256.
    """
    num_heads, dim = q.shape[2:]
    columns, size = gates.shape[2], pattern.block_size
    scale = check_scale(softmax_scale, dim)
    if dim + columns > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"gates: expected at most {MAX_HEAD_DIM - dim} key blocks with head_dim {dim}, got "
            f"{columns}; take larger blocks, or prune by importance"
        )
    logs = gates.clamp(min=_LEAST).log()  # [P, R, C]
    logs = logs.repeat_interleave(num_heads // logs.shape[0], 0).transpose(0, 1)  # [R, Hq, C]
    logs = logs.repeat_interleave(size, 0)[: q.shape[1]]  # [N, Hq, C]
    block = torch.arange(k.shape[1], device=k.device) // size
    column = block[:, None, None] == torch.arange(columns, device=k.device)  # [M, 1, C]
    wide_q, wide_k = (
        torch.cat([x, more.to(x.dtype).expand(*x.shape[:3], columns)], 3)
        for x, more in ((q, logs / scale), (k, column))
    )
    out = block_sparse_attention(
        wide_q, wide_k, F.pad(v, (0, columns)), pattern, causal=causal, softmax_scale=scale
    )
    return cast(torch.Tensor, out)[..., :dim]
