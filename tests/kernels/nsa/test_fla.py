"""Equality with flash-linear-attention's plain NSA functions, where that package is installed."""

from __future__ import annotations

import pytest
import torch

from sparsek_kernels.nsa.api import nsa_attention, nsa_compress
from tests.kernels.nsa import reference as ref

naive = pytest.importorskip("fla.ops.nsa.naive", reason="pip install fla-core==0.6.0 einops")


def test_same_selection_and_output_without_overlap() -> None:
    torch.manual_seed(1)
    tokens, heads, dim, block, top_n = 250, 2, 32, 16, 5
    q = torch.randn(1, tokens, 16 * heads, dim)
    k, v = (torch.randn(1, tokens, heads, dim) for _ in range(2))
    gates = [torch.rand(1, tokens, 16 * heads) for _ in range(2)]
    scale = dim**-0.5
    k_cmp, v_cmp = nsa_compress(k, v, cmp_block_size=block, cmp_stride=block)
    # Its pooled tensors end with the unfinished block, which no query sees.
    unfinished = [x[:, tokens // block * block :].mean(1, keepdim=True) for x in (k, v)]
    pooled = [torch.cat(pair, 1) for pair in zip((k_cmp, v_cmp), unfinished, strict=True)]
    out_cmp, _ = naive.naive_nsa_compression(q, *pooled, block, scale)
    theirs = naive.naive_nsa_topk(q, pooled[0], top_n, block, scale)
    out_slc = naive.naive_nsa_selection(q, k, v, theirs, block, scale)
    expected = gates[0][..., None] * out_cmp + gates[1][..., None] * out_slc

    rules = {"cmp_block_size": block, "cmp_stride": block, "sel_block_size": block, "top_n": top_n}
    inputs = (q, k, v, *gates, torch.zeros_like(gates[0]))
    out, ours = nsa_attention(*inputs, return_block_indices=True, window_size=1, **rules)
    oracle = ref.nsa_reference(*(x.double() for x in inputs), window_size=1, **rules)
    ranked = theirs.masked_fill(theirs < 0, tokens).sort(-1).values
    ranked = ranked.masked_fill(ranked == tokens, -1).int()
    assert torch.equal(ours, ranked)
    assert torch.equal(oracle.block_indices, ranked)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(oracle.out.float(), expected, rtol=1e-5, atol=1e-5)
