"""Public NSA functions on the CPU against the oracle: outputs, selections and gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.nsa.api import (
    compressed_attention,
    nsa_attention,
    nsa_compress,
    nsa_select,
    selected_attention,
)
from sparsek_kernels.nsa.compress.mlp import PhiWeights
from sparsek_kernels.nsa.sequences import compressed_cu_seqlens
from tests.kernels.nsa import reference as ref

SMALL = {"cmp_block_size": 8, "cmp_stride": 4, "sel_block_size": 8, "top_n": 5}
CASES = {
    "defaults": (300, {"window_size": 64, "top_n": 4}),
    "group1": (90, {**SMALL, "heads": (3, 3)}),
    "group7": (70, {**SMALL, "heads": (7, 1)}),
    "group16": (65, {**SMALL, "heads": (16, 1)}),
    "no-overlap": (96, {**SMALL, "cmp_stride": 8, "heads": (8, 2)}),
    "wide-overlap": (64, {**SMALL, "cmp_stride": 2}),
    "larger-selection": (133, {**SMALL, "sel_block_size": 32, "top_n": 3}),
    "batch2": (63, {**SMALL, "batch": 2}),
    "shorter-than-a-block": (7, SMALL),
    "one-token": (1, SMALL),
    "fewer-blocks-than-n": (25, {**SMALL, "top_n": 16}),
    "last-queries": (100, {**SMALL, "num_q": 13}),
    "no-forced-blocks": (80, {**SMALL, "num_init_blocks": 0, "num_local_blocks": 0}),
    "packed": ([1, 40, 7, 0, 65, 8], SMALL),
}
MAKE = ("heads", "batch", "num_q", "dim", "dtype")


def build(problem: Any, name: str, **more: Any) -> Any:
    lengths, options = CASES[name]
    return problem(lengths, **{"window_size": 20, **options, **more})


@pytest.mark.parametrize("name", CASES)
def test_fp64_equals_the_oracle(problem: Any, name: str) -> None:
    case = build(problem, name)
    ours, theirs = case.leaves(), case.leaves()
    out, indices = nsa_attention(
        *ours, cu_seqlens=case.cu_seqlens, return_block_indices=True, **case.options
    )
    expected = ref.nsa_reference(*theirs, cu_seqlens=case.cu_seqlens, **case.options)
    assert torch.equal(indices, expected.block_indices)
    torch.testing.assert_close(out, expected.out, rtol=1e-9, atol=1e-11)
    out.backward(case.dout)
    expected.out.backward(case.dout)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_stays_within_twice_torchs_error(problem: Any, dtype: torch.dtype) -> None:
    case = problem(150, dtype=dtype, window_size=20, **SMALL)
    exact = ref.nsa_reference(*case.leaves(torch.float64), **case.options)
    plain = ref.nsa_reference(*case.leaves(), block_indices=exact.block_indices, **case.options)
    found = nsa_attention(*case.leaves(), block_indices=exact.block_indices, **case.options)
    assert found.dtype == dtype
    worst = (plain.out.double() - exact.out).abs().max()
    assert (found.double() - exact.out).abs().max() <= 2 * worst + 1e-6


def test_lse_and_its_gradient(problem: Any) -> None:
    case = problem(40, **SMALL)
    weight = torch.randn(1, 4, 40, dtype=torch.float64)
    q, k, v = case.leaves()[:3]
    k_cmp, v_cmp = nsa_compress(k, v, cmp_block_size=8, cmp_stride=4)
    _, lse_cmp = compressed_attention(q, k_cmp, v_cmp, cmp_block_size=8, cmp_stride=4)
    indices = nsa_select(q, k_cmp, **SMALL)
    _, lse_slc = selected_attention(q, k, v, indices, sel_block_size=8, return_lse=True)
    total = (weight[..., 7:] * (lse_cmp[..., 7:] + lse_slc[..., 7:])).sum()
    grads = torch.autograd.grad(total, (q, k))
    q2, k2 = (x.detach().requires_grad_() for x in (q, k))
    cmp2 = ref.compress_reference(k2[0], 8, 4)
    seen = ref.compressed_mask(40, 40, cmp2.shape[0], 8, 4)
    _, want_cmp, _ = ref.masked_attention(q2[0], cmp2, cmp2, seen, 0.25)
    mask = ref.selected_mask(indices[0], 40, 8, 2)
    _, want_slc, _ = ref.masked_attention(q2[0], k2[0], k2[0], mask, 0.25)
    expected = (weight[0, :, 7:] * (want_cmp[:, 7:] + want_slc[:, 7:])).sum()
    torch.testing.assert_close(total, expected)
    for x, y in zip(grads, torch.autograd.grad(expected, (q2, k2)), strict=True):
        torch.testing.assert_close(x, y)


def phi_weights(dim: int, block: int, hidden: int = 6) -> PhiWeights:
    shapes = ((block, dim), (block * dim, hidden), (hidden,), (hidden, dim), (dim,))
    return PhiWeights(
        *(torch.randn(shape, dtype=torch.float64).mul(0.3).requires_grad_() for shape in shapes)
    )


@pytest.mark.parametrize("lengths", [50, [7, 20, 0, 33], [3, 4]], ids=["fixed", "packed", "short"])
@pytest.mark.parametrize("learned", [False, True], ids=["mean", "phi"])
def test_compression_and_its_gradients(problem: Any, lengths: Any, learned: bool) -> None:
    case = problem(lengths, dim=5)
    weights = phi_weights(5, 8) if learned else None
    k = case.k.requires_grad_()
    found, values = nsa_compress(
        k, case.v, phi_k=weights, cmp_block_size=8, cmp_stride=4, cu_seqlens=case.cu_seqlens
    )
    again = k.detach().requires_grad_()
    edges = [0, case.k.shape[1]] if case.cu_seqlens is None else case.cu_seqlens.tolist()
    copies = None if weights is None else [w.detach().requires_grad_() for w in weights]
    phi = None if copies is None else (lambda x: ref.phi_reference(x, *copies))
    parts = [ref.compress_reference(again[0, lo:hi], 8, 4, phi) for lo, hi in pairwise(edges)]
    expected = torch.cat(parts)
    count = expected.shape[0]
    torch.testing.assert_close(found[0, :count], expected)
    assert found[0, count:].abs().sum() == 0
    assert values.shape == found.shape
    if case.cu_seqlens is not None:
        offsets = compressed_cu_seqlens(case.cu_seqlens, 8, 4).tolist()
        assert offsets == [0, *torch.tensor([len(p) for p in parts]).cumsum(0).tolist()]
    upstream = torch.randn_like(found)
    sources = [k, *(weights or ())]
    mirrored = [again, *(copies or ())]
    grads = torch.autograd.grad(found, sources, upstream)
    if count == 0:
        assert all(g.abs().sum() == 0 for g in grads)
        return
    for x, y in zip(
        grads, torch.autograd.grad(expected, mirrored, upstream[0, :count]), strict=True
    ):
        torch.testing.assert_close(x, y)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 60),
    sel=st.sampled_from([1, 3, 8]),
    slots=st.integers(1, 6),
    heads=st.sampled_from([(1, 1), (6, 2)]),
    seed=st.integers(0, 1000),
)
def test_any_selection(
    length: int, sel: int, slots: int, heads: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    blocks = -(-length // sel)
    ranked = torch.rand(1, length, heads[1], max(blocks, slots)).argsort(-1)[..., :slots]
    chosen = torch.where((ranked < blocks) & (torch.rand(ranked.shape) < 0.8), ranked, -1).int()
    q = torch.randn(1, length, heads[0], 4, dtype=torch.float64)
    k, v = (torch.randn(1, length, heads[1], 4, dtype=torch.float64) for _ in range(2))
    out, lse = selected_attention(q, k, v, chosen, sel_block_size=sel, return_lse=True, check=True)
    mask = ref.selected_mask(chosen[0], length, sel, heads[0] // heads[1])
    want, want_lse, _ = ref.masked_attention(q[0], k[0], v[0], mask, 0.5)
    torch.testing.assert_close(out[0], want)
    torch.testing.assert_close(lse[0], want_lse)


def test_selection_without_lse_is_the_same(problem: Any) -> None:
    case = problem(120, dtype=torch.float32, **SMALL)
    k_cmp, v_cmp = nsa_compress(case.k, case.v, cmp_block_size=8, cmp_stride=4)
    _, lse = compressed_attention(case.q, k_cmp, v_cmp, cmp_block_size=8, cmp_stride=4)
    given_lse = nsa_select(case.q, k_cmp, lse=lse, **SMALL)
    assert torch.equal(nsa_select(case.q, k_cmp, **SMALL), given_lse)


def test_equal_keys_tie_to_the_lower_block(problem: Any) -> None:
    case = problem(80, **SMALL)
    k_cmp = torch.zeros(1, 19, 2, 16, dtype=torch.float64)
    chosen = nsa_select(case.q, k_cmp, **{**SMALL, "cmp_stride": 4})
    # Inner blocks weigh the same; block 0, which no earlier block spills into, is forced.
    assert chosen[0, 79, 0].tolist() == [0, 1, 2, 8, 9]


def test_separate_keys_per_branch(problem: Any) -> None:
    case = problem(60, window_size=20, **SMALL)
    others = [torch.randn_like(case.k) for _ in range(4)]
    k_cmp, v_cmp = nsa_compress(*others[:2], cmp_block_size=8, cmp_stride=4)
    out, indices = nsa_attention(
        *(case.q, case.k, case.v, *case.gates),
        **{"k_cmp": k_cmp, "v_cmp": v_cmp, "k_swa": others[2], "v_swa": others[3]},
        return_block_indices=True,
        **case.options,
    )
    parts = [
        ref.nsa_reference(case.q, a, b, *case.gates, block_indices=indices, **case.options)
        for a, b in (others[:2], (case.k, case.v), others[2:])
    ]
    expected = sum(
        gate[..., None] * part
        for gate, part in zip(
            case.gates, (parts[0].out_cmp, parts[1].out_slc, parts[2].out_swa), strict=True
        )
    )
    torch.testing.assert_close(out, expected)


def test_strided_inputs_are_read_by_stride(problem: Any) -> None:
    case = problem(64, window_size=20, **SMALL)
    tensors = (case.q, case.k, case.v, *case.gates)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert not strided[0].is_contiguous()
    torch.testing.assert_close(
        nsa_attention(*strided, **case.options), nsa_attention(*tensors, **case.options)
    )


def test_without_gradients_the_output_is_the_same(problem: Any) -> None:
    case = problem(64, window_size=20, **SMALL)
    with_gradients = nsa_attention(*case.leaves(), **case.options)
    without = nsa_attention(case.q, case.k, case.v, *case.gates, **case.options)
    assert with_gradients.requires_grad
    assert not without.requires_grad
    torch.testing.assert_close(with_gradients.detach(), without)


def test_public_names_are_exported() -> None:
    import sparsek_kernels

    for name in ("nsa_attention", "nsa_compress", "nsa_select", "selected_attention"):
        assert callable(getattr(sparsek_kernels, name))


def test_selected_attention_of_no_sequences() -> None:
    q, k, v = (torch.randn(0, 8, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    out = selected_attention(q, k, v, torch.zeros(0, 8, 2, 3, dtype=torch.int32))
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.shape == x.shape
