"""The learnable compression of blocks of tokens (arXiv 2502.11089, equation 7)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from sparsek_kernels.nsa.compress.mlp import PhiWeights


class CompressionMLP(nn.Module):
    """The learnable map of equation 7: an encoding of the place inside a block, then an MLP.

    Parameters: ``position [l, D]``, ``w1 [l * D, F]``, ``b1 [F]``, ``w2 [F, D]``, ``b2 [D]``.

    Args:
        cmp_block_size: tokens of a block, l.
        head_dim: elements of a head, D.
        hidden_size: width of the hidden layer, F.
        device: where the parameters live.
        dtype: their dtype.
    """

    def __init__(
        self,
        cmp_block_size: int,
        head_dim: int,
        hidden_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        wide = cmp_block_size * head_dim

        def make(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.position = make(cmp_block_size, head_dim)
        self.w1 = make(wide, hidden_size)
        self.b1 = make(hidden_size)
        self.w2 = make(hidden_size, head_dim)
        self.b2 = make(head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights: variance-preserving matrices, small encoding, zero biases.

        All places of a block start with one matrix, so that what keys learn at one place holds at
        the others.  With ``F >= 2 D`` the map starts as the mean of a block, exactly: a hidden unit
        takes each element of it and another one its negative, and ``gelu(x) - gelu(-x) = x``.
        """
        nn.init.normal_(self.position, std=0.02)
        for weight in (self.w1, self.w2):
            nn.init.normal_(weight, std=weight.shape[0] ** -0.5)
        places, size = self.position.shape
        with torch.no_grad():
            if self.w1.shape[1] >= 2 * size:
                mirrored = torch.eye(size, device=self.w1.device).repeat(1, 2)
                mirrored[:, size:] *= -1
                self.w1[:size, : 2 * size] = mirrored / places
                self.w2.zero_()
                self.w2[: 2 * size] = mirrored.t()
            self.w1.copy_(self.w1[:size].repeat(places, 1))
        for bias in (self.b1, self.b2):
            nn.init.zeros_(bias)

    def weights(self, dtype: torch.dtype) -> PhiWeights:
        """The parameters in the dtype of the tokens they meet (they differ under autocast)."""
        named = (self.position, self.w1, self.b1, self.w2, self.b2)
        return PhiWeights(*(shared_by_heads(x).to(dtype) for x in named))


def shared_by_heads(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter that all heads use; where ranks share the heads, their gradients are summed."""
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    local = DTensor.from_local(parameter.to_local(), mesh, run_check=False)
    found: torch.Tensor = local.to_local(grad_placements=[Partial()] * mesh.ndim)
    return found
