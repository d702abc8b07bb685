"""The torch paths give the same results inside and outside of autocast, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_kernels import block_sparse_attention, nsa_attention, sink_flash_attention

Tensors = tuple[torch.Tensor, ...]


def sink_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = sink_flash_attention(q, k, v, num_sink=4, window_size=64)
    assert isinstance(out, torch.Tensor)
    return out


def nsa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    gates = (q[..., 0].sigmoid(), q[..., 1].sigmoid(), q[..., 2].sigmoid())
    out = nsa_attention(q, k, v, *gates)
    assert isinstance(out, torch.Tensor)
    return out


def block_sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    pattern = BlockSparsePattern.local((13, 13), 16, window=2, sinks=1)
    out = block_sparse_attention(q, k, v, pattern, causal=True)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("attention", [sink_window, nsa, block_sparse])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(
    attention: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = tuple(
        torch.randn(1, 200, heads, 32, generator=generator).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    )

    def run(autocast: bool) -> Tensors:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = attention(*leaves)
            return (out, *torch.autograd.grad(out.float().square().sum(), leaves))

    for plain, cast in zip(run(False), run(True), strict=True):
        assert cast.dtype == dtype
        torch.testing.assert_close(cast, plain, rtol=1e-6, atol=1e-6)
