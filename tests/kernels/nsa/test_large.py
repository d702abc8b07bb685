"""NSA on tensors of more than 2**31 elements: no offset wraps."""

from __future__ import annotations

import pytest
import torch

from sparsek_kernels import nsa_attention, nsa_select

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LAST = 64


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative root-mean-square error."""
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads"),
    [(1, 2**18 + 1111, 64, 4), (260, 4113, 16, 16)],
    ids=["long-sequence", "large-batch"],
)
def test_offsets_past_31_bits(batch: int, length: int, heads: int, kv_heads: int) -> None:
    """The last queries of the last sequence, forward and backward, against fp64."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q = draw(batch, length, heads, 128)
    assert q.numel() > 2**31
    k, v = draw(batch, length, kv_heads, 128), draw(batch, length, kv_heads, 128)
    gates = [torch.sigmoid(draw(batch, length, heads)) for _ in range(3)]
    leaves = [x.requires_grad_() for x in (q, k, v, *gates)]
    out, indices = nsa_attention(*leaves, return_block_indices=True)
    dout = torch.zeros_like(out)
    dout[-1, -LAST:] = draw(LAST, heads, 128)
    grads = torch.autograd.grad(out, leaves, dout)

    exact = [x.detach()[-1:, -LAST:].double() for x in (q, *gates)]
    exact[1:1] = [x.detach()[-1:].double() for x in (k, v)]
    exact = [x.requires_grad_() for x in exact]
    wanted = nsa_attention(*exact, block_indices=indices[-1:, -LAST:])
    wanted_grads = torch.autograd.grad(wanted, exact, dout[-1:, -LAST:].double())
    assert distance(out[-1:, -LAST:], wanted) < 1e-2
    for name, found, need in zip(
        ("dq", "dk", "dv", "dg_cmp", "dg_slc", "dg_swa"), grads, wanted_grads, strict=True
    ):
        rows = need.shape[1]
        assert distance(found[-1:, -rows:], need) < 1e-2, name
        assert torch.count_nonzero(found[:-1]) == 0, name
        assert torch.count_nonzero(found[-1, :-rows]) == 0, name
    means = exact[1].detach().unfold(1, 32, 16).mean(-1).bfloat16().double()  # as the kernels
    chosen = nsa_select(exact[0].detach(), means, seq_len=length)
    agree = (chosen[..., None] == indices[-1:, -LAST:, :, None]).any(-1)
    assert agree.double().mean() > 0.99
