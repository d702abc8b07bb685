"""Transforms of torch.func: what operators have no rule for is refused, not left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sparsek_kernels import compressed_attention, nsa_compress, selected_attention
from tests.kernels.test_autocast import block_sparse, nsa, sink_window

Attention = Callable[..., torch.Tensor]


def selected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    first = torch.zeros(*q.shape[:2], k.shape[2], 1, dtype=torch.int32, device=q.device)
    out = selected_attention(q, k, v, first)
    assert isinstance(out, torch.Tensor)
    return out


def compressed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return compressed_attention(q, *nsa_compress(k, v))[0]


def _inputs(device: str = "cpu") -> list[torch.Tensor]:
    return [torch.randn(1, 200, heads, 32, device=device) for heads in (4, 2, 2)]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("attention", [sink_window, nsa, block_sparse, selected, compressed])
def test_forward_mode_is_refused(attention: Attention, which: int) -> None:
    given = _inputs()

    def of_one(x: torch.Tensor) -> torch.Tensor:
        return attention(*given[:which], x, *given[which + 1 :])

    tangent = torch.ones_like(given[which])
    with pytest.raises(NotImplementedError, match=r"^[qkv].*: forward-mode differentiation"):
        torch.func.jvp(of_one, (given[which],), (tangent,))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_vmap_of_repeated_calls(device: str) -> None:
    q, k, v = _inputs(device)
    many = torch.stack([q, -q, 2 * q])
    wanted = torch.stack([sink_window(x, k, v) for x in many])  # which a GPU then repeats
    assert torch.equal(torch.vmap(lambda x: sink_window(x, k, v))(many), wanted)
