"""torch.compile(fullgraph=True) through xFormers with the pair, named or installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.xformers_op.cases import (
    BATCHED,
    DECODING,
    DEVICES,
    PACKED,
    ab,
    assert_close,
    fmha,
    inputs,
)

from sparsek_backend.xformers_op import BwOp, FwOp, install  # isort: skip


@pytest.mark.parametrize("op", [(FwOp, BwOp), (FwOp, None), None], ids=["pair", "forward", "none"])
@pytest.mark.parametrize(
    "name", ["none", "causal", "sink-window", "block-sparse-heads", "diagonal", "tensor"]
)
@pytest.mark.parametrize("device", DEVICES)
def test_full_graph(name: str, op: Any, device: str) -> None:
    if name == "tensor" and op is None and device == "cuda":
        pytest.skip("xFormers' own operator serves it, whose backward torch.compile does not take")
    if name in BATCHED:
        make, num_q, num_k = BATCHED[name]
    elif name in PACKED:
        make, lengths_q, lengths_k = PACKED[name]
        num_q, num_k = sum(lengths_q), sum(lengths_k)
    else:
        make, num_q, num_k = (lambda d: torch.randn(1, 3, 20, 24, device=d)), 20, 24
    tensors = [x.requires_grad_() for x in inputs(num_q, num_k, device=device)]
    bias = make(tensors[0].device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fmha.memory_efficient_attention(q, k, v, bias, op=op)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")
    with install():
        wanted, found = attend(*tensors), compiled(*tensors)
        grads = torch.autograd.grad(found.sin().sum(), tensors)
        wanted_grads = torch.autograd.grad(wanted.sin().sum(), tensors)
    assert_close("out", found, wanted, 1e-6)
    for grad, want in zip(grads, wanted_grads, strict=True):
        assert_close("grad", grad, want, 1e-5)


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("device", DEVICES)
def test_full_graph_of_decoding(name: str, device: str) -> None:
    make, num_q, rows = DECODING[name]
    q, k, v = inputs(num_q, rows, device=device)
    bias = make(q.device)

    def attend(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fmha.memory_efficient_attention(q, k, v, bias, op=(FwOp, None))
        return out

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(q), attend(q))


@pytest.mark.parametrize("device", DEVICES)
def test_full_graph_of_inference_with_a_tensor_bias(device: str) -> None:
    q, k, v = inputs(20, 24, device=device)
    bias = torch.randn(1, 3, 20, 24, device=device)

    def attend(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fmha.memory_efficient_attention(q, k, v, bias, op=(FwOp, None))
        return out

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(q), attend(q))


@pytest.mark.parametrize("p", [0.0, 0.3], ids=["no-dropout", "dropout"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
def test_operators_of_the_torch_path(has_bias: bool, p: float) -> None:
    q, k, v = inputs(9, 12, value_dim=24)
    bias = torch.randn(1, 3, 9, 12) if has_bias else None
    seed = torch.tensor(3) if p else None
    mask = (True, 3, 5, 1, p, 0.25)
    forward = (q, k, v, bias, seed, 0, *mask)
    out, _ = torch.ops.sparsek.biased_attention_fwd(*forward)
    backward = (torch.ones_like(out), q, k, v, bias, seed, 0, *mask, has_bias)
    torch.library.opcheck(torch.ops.sparsek.biased_attention_fwd, forward)
    torch.library.opcheck(torch.ops.sparsek.biased_attention_bwd, backward)


def test_checkpointing_recomputes_the_same() -> None:
    from torch.utils.checkpoint import checkpoint

    tensors = [x.requires_grad_() for x in inputs(33, 33)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fmha.memory_efficient_attention(
            q, k, v, ab.LowerTriangularMask(), op=(FwOp, BwOp)
        )
        return out

    for reentrant in (False, True):
        out = checkpoint(attend, *tensors, use_reentrant=reentrant)
        found = torch.autograd.grad(out.sum(), tensors) if not reentrant else None
        if found is None:
            out.sum().backward()
            found = tuple(x.grad for x in tensors)
        wanted = torch.autograd.grad(attend(*tensors).sum(), tensors)
        for grad, want in zip(found, wanted, strict=True):
            assert torch.equal(grad, want)
