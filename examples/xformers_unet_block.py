"""The attention block of a diffusion UNet on SparseK's operators, trained for one step.

    pip install '.[xformers]'
    python examples/xformers_unet_block.py

The block is written as in diffusers: self-attention over pixels, cross-attention over text, then a
feed-forward part, and `attention_op` says who computes attention.
"""

from __future__ import annotations

from typing import Any

import torch
import xformers.ops
from torch import nn

from sparsek_backend.xformers_op import BwOp, FwOp


class Attention(nn.Module):
    """Attention of `channels` wide queries over keys of `context_channels`."""

    def __init__(self, channels: int, context_channels: int, heads: int, op: Any) -> None:
        super().__init__()
        self.heads, self.op = heads, op
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k = nn.Linear(context_channels, channels, bias=False)
        self.to_v = nn.Linear(context_channels, channels, bias=False)
        self.to_out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Attend `context` from `x`; both are [batch, tokens, channels]."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1))
            for part in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        attended = xformers.ops.memory_efficient_attention(q, k, v, op=self.op)
        return self.to_out(attended.flatten(2))


class TransformerBlock(nn.Module):
    """Self-attention over pixels, cross-attention over text, feed-forward."""

    def __init__(self, channels: int, text_channels: int, heads: int, attention_op: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))
        self.self_attention = Attention(channels, channels, heads, attention_op)
        self.cross_attention = Attention(channels, text_channels, heads, attention_op)
        self.feed_forward = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Transform a feature map [batch, channels, height, width] that `text` conditions."""
        x = image.flatten(2).transpose(1, 2)
        normed = self.norms[0](x)
        x = x + self.self_attention(normed, normed)
        x = x + self.cross_attention(self.norms[1](x), text)
        x = x + self.feed_forward(self.norms[2](x))
        return x.transpose(1, 2).unflatten(2, image.shape[2:])


def main() -> float:
    """Train one step with SparseK's operators; return the largest difference to PyTorch's."""
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.float16) if cuda else ("cpu", torch.float32)
    block = TransformerBlock(128, 96, heads=4, attention_op=(FwOp, BwOp)).to(device, dtype)
    image = torch.randn(2, 128, 16, 16, device=device, dtype=dtype)
    text = torch.randn(2, 77, 96, device=device, dtype=dtype)

    denoised = block(image, text)
    denoised.square().mean().backward()
    assert all(weight.grad is not None for weight in block.parameters())

    memory_efficient = xformers.ops.memory_efficient_attention
    xformers.ops.memory_efficient_attention = lambda q, k, v, op: (
        nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    ).transpose(1, 2)
    try:
        expected = block(image, text)
    finally:
        xformers.ops.memory_efficient_attention = memory_efficient
    error = (denoised - expected).abs().max().item()
    print(f"{device}: one step trained; largest difference to PyTorch's attention {error:.1e}")
    return error


if __name__ == "__main__":
    main()
