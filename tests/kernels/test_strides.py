"""Small tensors beside q, k and v may have any strides, as the large ones may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_kernels import (
    block_sparse_attention,
    compressed_attention,
    nsa_attention,
    nsa_compress,
    selected_attention,
    sink_flash_attention,
)
from sparsek_kernels.block_sparse import ops as block_sparse_ops
from sparsek_kernels.nsa import ops as nsa_ops
from sparsek_kernels.sink_window import ops as sink_window_ops

Place = Callable[[torch.Tensor], torch.Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where kernels are interpreted
BLOCKS = {"cmp_block_size": 8, "cmp_stride": 4}


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with others between them."""
    return torch.stack([x, torch.full_like(x, 7)], dim=-1)[..., 0]


def sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> object:
    logits = torch.linspace(-1, 1, q.shape[2], device=DEVICE)
    return sink_flash_attention(q, k, v, sinks=place(logits))


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> object:
    cu = place(torch.tensor([0, 10, 24], dtype=torch.int32, device=DEVICE))
    return sink_flash_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)


def packed_nsa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> object:
    cu = place(torch.tensor([0, 10, 24], dtype=torch.int32, device=DEVICE))
    gates = [place(torch.full(q.shape[:3], 0.5, device=DEVICE)) for _ in range(3)]
    sizes = {"sel_block_size": 8, "top_n": 3, "window_size": 5, **BLOCKS}
    return nsa_attention(q, k, v, *gates, cu_seqlens=cu, **sizes)


def packed_compressed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> object:
    cu = place(torch.tensor([0, 10, 24], dtype=torch.int32, device=DEVICE))
    pair = nsa_compress(k, v, cu_seqlens=cu, **BLOCKS)
    return compressed_attention(q, *pair, cu_seqlens=cu, **BLOCKS)[0]


def packed_selected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> object:
    cu = place(torch.tensor([0, 10, 24], dtype=torch.int32, device=DEVICE))
    first = torch.zeros(*q.shape[:2], k.shape[2], 2, dtype=torch.int32, device=DEVICE)
    first[..., 1] = -1
    return selected_attention(q, k, v, place(first), sel_block_size=8, cu_seqlens=cu)


def dropout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> object:
    pattern = BlockSparsePattern.local((2, 2), 16, window=2, sinks=1).to(DEVICE)
    state = place(torch.tensor([5, 9], device=DEVICE))
    return block_sparse_attention(q, k, v, pattern, dropout_p=0.3, rng_state=state)


@pytest.mark.parametrize(
    "attention", [sinks, packed, packed_nsa, packed_compressed, packed_selected, dropout]
)
def test_kernels_read_small_tensors_of_any_strides(
    attention: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in (block_sparse_ops, nsa_ops, sink_window_ops):
        monkeypatch.setattr(family, "runs_kernels", lambda x: True)
    leaves = [torch.randn(1, 24, heads, 16, device=DEVICE) for heads in (4, 2, 2)]
    leaves = [x.requires_grad_() for x in leaves]

    def run(place: Place) -> tuple[torch.Tensor, ...]:
        out = attention(*leaves, place)
        return (out, *torch.autograd.grad(out.sin().sum(), leaves))

    for strided, wanted in zip(run(spread), run(lambda x: x), strict=True):
        assert torch.equal(strided, wanted)
