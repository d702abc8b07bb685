"""The kernels on a GPU at real sizes: the grid of shapes, strides, offsets, reproducibility."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from sparsek_kernels import block_sparse_attention
from sparsek_kernels.block_sparse import launch_bwd_sm90, launch_sm90
from sparsek_kernels.block_sparse.config import (
    LaunchConfig,
    ProblemShape,
    hopper_backward,
    hopper_stages,
    select_config,
)
from sparsek_kernels.block_sparse.structure import BlockStructure
from sparsek_kernels.common.device import device_arch
from tests.kernels.block_sparse.cases import Case, check, kernels, make, structure_of_mask
from tests.kernels.block_sparse.reference import block_sparse_attention_reference

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

GRID = [
    # head sizes, in every dtype
    *(
        Case(333, 333, 4, 1, dim, block=block, dtype=dtype, causal=True)
        for dim in (32, 64, 80, 96, 128, 192, 256)
        for block, dtype in ((64, BF16), (128, FP16), (32, FP32))
    ),
    # block sizes, powers of two and others
    *(
        Case(500, 500, 4, 2, dim, 2, block=block, dtype=BF16, causal=causal)
        for block in (16, 32, 48, 64, 80, 96, 112, 128)
        for dim in (64, 128)
        for causal in (False, True)
    ),
    # groups and how patterns share them
    *(
        Case(400, 400, heads, kv_heads, 128, block=block, patterns=patterns, dtype=BF16)
        for heads, kv_heads, patterns in (
            (3, 1, 1), (7, 1, 7), (8, 1, 1), (16, 2, 2), (16, 1, 4), (8, 8, 2), (6, 2, 3),
        )
        for block in (16, 64)
    ),
    # lengths around the tile edges, two sequences
    *(
        Case(n, n, 4, 2, dim, 2, block=64, dtype=BF16, causal=True, patterns=2)
        for n in (1, 63, 64, 65, 1000)
        for dim in (64, 128)
    ),
    # fewer and more queries than keys
    *(
        Case(nq, nk, 6, 2, dim, 2, block=block, dtype=BF16, causal=causal)
        for nq, nk in ((300, 1000), (500, 130), (1, 777))
        for dim, block in ((64, 32), (128, 128))
        for causal in (False, True)
    ),
    # padding and dropout, with fewer and more queries than keys, shared and own patterns
    *(
        Case(nq, nk, 8, 2, dim, 2, block=block, patterns=patterns, dtype=dtype, causal=causal,
             padded=padded, dropout=dropout)
        for nq, nk, causal, dim, block, patterns, dtype in (
            (333, 333, True, 32, 16, 8, BF16), (200, 500, False, 64, 64, 2, FP16),
            (500, 200, True, 128, 64, 8, BF16), (333, 333, True, 128, 128, 1, BF16),
            (200, 500, True, 80, 112, 2, FP32), (500, 200, False, 256, 32, 1, BF16),
        )
        for padded, dropout in (("qk", 0.0), ("", 0.2), ("qk", 0.5))
    ),
    # everything, nothing, little
    *(
        Case(700, 700, 4, 2, 128, block=128, density=density, dtype=BF16, causal=True)
        for density in (0.0, 0.05, 1.0)
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(case: Case) -> None:
    check(case, "cuda")


HOPPER = [
    # blocks of 128 of one head, blocks of 64 of two; the last pair of an odd group is half empty
    *(
        Case(nq, 768, heads, kv_heads, dim, 2, block, patterns, dtype=dtype, causal=causal)
        for dim, dtype in ((64, FP16), (128, BF16))
        for block, heads, kv_heads, patterns, nq, causal in (
            (128, 8, 2, 8, 768, True),
            (128, 6, 2, 1, 300, False),
            (64, 8, 2, 2, 768, True),
            (64, 6, 2, 1, 1000, True),
            (64, 7, 1, 1, 1, False),
        )
    ),
    *(
        Case(1024, 1024, 8, 2, 128, block=block, density=density, dtype=BF16, causal=True)
        for block in (64, 128)
        for density in (0.0, 0.05, 1.0)
    ),
    Case(8192, 8192, 8, 2, 128, 1, 64, 2, density=0.1, dtype=BF16, causal=True),
]  # fmt: skip


def configuration(case: Case, with_hopper: bool) -> LaunchConfig:
    """What is chosen for a case, with or without the Hopper kernels."""
    shape = ProblemShape(case.heads, case.kv_heads, case.dim, case.block, case.patterns, case.nk)
    config = select_config(shape, case.dtype, device_arch(torch.device("cuda")))
    stages, backward = (
        (hopper_stages(shape), hopper_backward(shape)) if with_hopper else (None, None)
    )
    return dataclasses.replace(config, hopper_stages=stages, hopper_backward=backward)


@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_hopper_kernels(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_arch(torch.device("cuda")) != 90:
        pytest.skip("needs a Hopper GPU")
    launches: list[str] = []
    for module, name in ((launch_sm90, "forward"), (launch_bwd_sm90, "backward")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, name=name, real=real: launches.append(name) or real(*a)
        )
    check(case, "cuda", configuration(case, with_hopper=True))
    assert launches == ["forward", "backward"]


@pytest.mark.parametrize("least_entries", [1, 3])
@pytest.mark.parametrize("case", HOPPER[::3], ids=str)
def test_columns_in_parts(case: Case, least_entries: int) -> None:
    if device_arch(torch.device("cuda")) != 90:
        pytest.skip("needs a Hopper GPU")
    config = configuration(case, with_hopper=True)
    assert config.hopper_backward is not None
    cut = {"least_entries": least_entries, "shares": 64}
    parts = dataclasses.replace(config.hopper_backward, **cut)
    check(case, "cuda", dataclasses.replace(config, hopper_backward=parts))


@pytest.mark.parametrize("case", HOPPER[::4], ids=str)
def test_portable_kernels_at_the_same_shapes(case: Case) -> None:
    check(case, "cuda", configuration(case, with_hopper=False))


@pytest.mark.parametrize(
    "more", [{"key_mask": True}, {"query_mask": True}, {"dropout_p": 0.1}], ids=str
)
def test_padding_and_dropout_leave_the_hopper_kernel(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device_arch(torch.device("cuda")) != 90:
        pytest.skip("needs a Hopper GPU")
    launches: list[int] = []
    real = launch_sm90.forward
    monkeypatch.setattr(launch_sm90, "forward", lambda *a: launches.append(1) or real(*a))
    t = make(Case(1024, 1024, 8, 2, 128, block=128, dtype=BF16), "cuda")
    block_sparse_attention(t.q, t.k, t.v, t.structure)
    assert launches == [1]
    mask = torch.ones(1, 1024, dtype=torch.bool, device="cuda")
    more = {name: mask if value is True else value for name, value in more.items()}
    block_sparse_attention(t.q, t.k, t.v, t.structure, **more)
    assert launches == [1]


def test_dropout_is_the_same_on_every_device() -> None:
    t = make(Case(200, 200, 4, 2, 64, 2, block=64, dropout=0.4))
    options = {"dropout_p": 0.4, "rng_state": t.rng_state}
    want = block_sparse_attention(t.q, t.k, t.v, t.structure, **options)
    s = BlockStructure(64, (4, 4), *(x.cuda() for x in t.structure.indices[:2]))
    options = {"dropout_p": 0.4, "rng_state": t.rng_state.cuda()}
    found = block_sparse_attention(t.q.cuda(), t.k.cuda(), t.v.cuda(), s, **options)
    torch.testing.assert_close(found.cpu(), want, atol=1e-4, rtol=1e-4)


def test_all_blocks_equal_dense_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 640, h, 128, device="cuda", dtype=BF16) for h in (8, 2, 2))
    everything = torch.ones(1, 5, 5, dtype=torch.bool, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = block_sparse_attention(*leaves, structure_of_mask(everything, 128), causal=True)
    assert isinstance(out, torch.Tensor)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, dense, atol=1e-2, rtol=2e-2)
    dout = torch.randn_like(out)
    for found, want in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(dense, leaves, dout),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, want, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("block", [16, 128])
def test_bitwise_reproducible(block: int) -> None:
    case = Case(4000, 4000, 8, 2, 128, block=block, dtype=BF16, causal=True)
    t = make(case, "cuda")
    first = kernels(case, t)
    for _ in range(4):
        again = kernels(case, t)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("layout", ["bhnd", "last_dim", "slice", "expanded"])
def test_strides(layout: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 400, h, 64, device="cuda", dtype=BF16) for h in (4, 2, 2))
    if layout == "bhnd":
        moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    elif layout == "last_dim":
        moved = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    elif layout == "slice":
        moved = [torch.cat([x, x], 3)[..., 3:67].copy_(x) for x in (q, k, v)]
    else:
        k, v = k[:, :, :1].expand(-1, -1, 2, -1), v[:1].expand(2, -1, -1, -1)
        moved = [q.clone(), k, v]
        k, v = k.contiguous(), v.contiguous()
    pattern = structure_of_mask(torch.rand(2, 7, 7, device="cuda") < 0.5, 64)
    outs = []
    for tensors in ((q, k, v), moved):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = block_sparse_attention(*leaves, pattern, causal=True)
        assert isinstance(out, torch.Tensor)
        outs.append((out, *torch.autograd.grad(out.float().pow(2).sum(), leaves)))
    for want, found in zip(*outs, strict=True):
        torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)


def test_more_than_two_to_the_31_elements() -> None:
    tokens, heads, dim, block = 540_672, 32, 128, 128
    assert tokens * heads * dim > 2**31
    rows = tokens // block
    crow = torch.arange(rows + 1, dtype=torch.int32, device="cuda")[None]
    pattern = _Diagonal(block, crow, crow[0, :-1].clone())
    torch.manual_seed(0)
    q = torch.randn(1, tokens, heads, dim, device="cuda", dtype=BF16)
    k, v = (torch.randn(1, tokens, 1, dim, device="cuda", dtype=BF16) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = block_sparse_attention(*leaves, pattern, causal=True)
    assert isinstance(out, torch.Tensor)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    # The last block attends itself alone.
    last = [x.detach()[:, -block:] for x in leaves]
    one = torch.tensor([[0, 1]], dtype=torch.int32, device="cuda"), crow[0, :1]
    want = block_sparse_attention_reference(*last, *one, block, causal=True, dout=dout[:, -block:])
    for found, exact in zip((out, *grads), (want[0], *want[2:]), strict=True):
        torch.testing.assert_close(found[:, -block:].double(), exact, atol=5e-2, rtol=2e-2)


class _Diagonal:
    """A pattern by attributes alone."""

    def __init__(self, block_size: int, crow: torch.Tensor, col: torch.Tensor) -> None:
        self.block_size = block_size
        self.crow_indices = crow
        self.col_indices = col


def test_captured_in_a_graph() -> None:
    case = Case(512, 512, 8, 2, 64, block=64, dtype=FP16)
    t = make(case, "cuda")
    want = block_sparse_attention(t.q, t.k, t.v, t.structure)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_sparse_attention(t.q, t.k, t.v, t.structure)
    t.q.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert isinstance(want, torch.Tensor)
    assert isinstance(out, torch.Tensor)
    assert not torch.equal(out, want)
    torch.testing.assert_close(out, block_sparse_attention(t.q, t.k, t.v, t.structure))


def test_compiles_without_graph_breaks() -> None:
    t = make(Case(300, 300, 4, 2, 64, block=32, dtype=BF16, padded="k", dropout=0.3), "cuda")
    leaves = [x.contiguous().requires_grad_() for x in (t.q, t.k, t.v)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = block_sparse_attention(
            q, k, v, t.structure, causal=True, key_mask=t.key_mask, dropout_p=0.3,
            rng_state=t.rng_state,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out.float().pow(2).sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(run(*leaves), leaves)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
