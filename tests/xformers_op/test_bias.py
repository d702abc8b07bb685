"""Tensor biases of any size, layout and dtype, with gradients and dropout, against fp64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.xformers_op.cases import DEVICES, TOLERANCE, ab, assert_close, fmha, inputs

from sparsek_backend.xformers_op import BwOp, FwOp, SparseKAttention, dense  # isort: skip

pytestmark = pytest.mark.parametrize("device", DEVICES)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CAUSAL = ab.LowerTriangularMaskWithTensorBias


def _attend(q: Any, k: Any, v: Any, bias: Any, p: float = 0.0) -> torch.Tensor:
    torch.manual_seed(11)
    out: torch.Tensor = fmha.memory_efficient_attention(q, k, v, bias, p, op=(FwOp, BwOp))
    return out


def _whole_rows(dtype: torch.dtype, device: str) -> torch.Tensor:
    """A bias ``[1, 3, 8, 40]`` of zeros with rows of one value, from the lowest to the highest."""
    limit = torch.finfo(dtype).max
    values = [-limit, -1e9, -1e6, -1e4, 1e4, 1e6, 1e9, limit]
    rows = torch.tensor(values, dtype=torch.float64).clamp(-limit, limit).to(dtype)
    return rows.to(device)[None, None, :, None].expand(1, 3, 8, 40).contiguous()


@pytest.mark.parametrize("wrap", [lambda bias: bias, CAUSAL], ids=["tensor", "causal"])
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_whole_rows_add_up_to_one(
    dtype: torch.dtype, bias_dtype: torch.dtype, wrap: Callable[[Any], Any], device: str
) -> None:
    q, k, v = (x.to(dtype) for x in inputs(8, 40, device=device))
    bias = wrap(_whole_rows(bias_dtype, device))
    v = torch.ones_like(v)
    without = _attend(q, k, v, bias)
    v.requires_grad_()
    found = _attend(q, k, v, bias)
    for out in (without, found):
        assert (out.double() - 1.0).abs().max() < TOLERANCE[dtype]
    upstream = torch.randn(found.shape, device=device).to(dtype)
    dv = torch.autograd.grad(found, v, upstream)[0]
    wanted = upstream.double().sum(1)  # a row hands its whole gradient to the values
    assert (dv.double().sum(1) - wanted).abs().max() < 20 * TOLERANCE[dtype]


def _in_base_two(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """SDPA as torch's kernel on a GPU has it: of logits times log2(e), in fp32."""
    assert attn_mask.shape[:2] == (1, 1), "a bias is not copied for each batch entry and head"
    logits = ((q @ k.mT).float() * scale + attn_mask) * math.log2(math.e)
    weights = (logits - logits.amax(-1, keepdim=True)).exp2()
    return (weights / weights.sum(-1, keepdim=True)).to(v.dtype) @ v


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_biases_do_not_overflow_in_base_two(
    dtype: torch.dtype, bias_dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(10, 40, batch=2, dtype=dtype, device=device)
    limit = torch.finfo(bias_dtype).max
    mixed = torch.zeros(1, 1, 2, 40, dtype=bias_dtype, device=device)
    mixed[..., 10:], mixed[..., 1, :10] = -limit, limit  # only the first ten keys have weights
    bias = torch.cat([_whole_rows(bias_dtype, device)[:, :1], mixed], 2).expand(2, 3, 10, 40)
    v.fill_(1.0)
    v[:, 10:, :, 1] = 0.0
    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", _in_base_two)
    out = _attend(q, k, v, bias).double()
    assert (out[..., 0] - 1.0).abs().max() < TOLERANCE[dtype]
    assert (out[:, -2:, :, 1] - 1.0).abs().max() < TOLERANCE[dtype]


def test_a_bias_without_keys(device: str) -> None:
    q, k, v = inputs(3, 0, device=device)
    assert torch.equal(_attend(q, k, v, torch.zeros(1, 3, 3, 0, device=device)), q * 0.0)


def _eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """``[B, N, H, Dv]`` in the inputs' precision; ``kept`` has the factors of dropout."""
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * q.shape[-1] ** -0.5 + bias
    empty = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return torch.einsum("bhnm,bmhd->bnhd", weights * kept, v)


def _random_bias(shape: tuple[int, ...], dtype: torch.dtype, draw: random.Random) -> torch.Tensor:
    """A bias as callers make them: broadcast, transposed, with large rows and hidden keys."""
    broadcast = tuple(1 if draw.random() < 0.3 else n for n in shape)
    bias = torch.randn(broadcast)
    for _ in range(draw.randrange(4)):
        row = draw.randrange(broadcast[-2])
        value = draw.choice([float("-inf"), -1e9, -1e4, -300.0, 300.0, 1e4, 1e9])
        if draw.random() < 0.5:
            bias[..., row, :] = 0.0
        bias[..., row, :] += value
    if draw.random() < 0.5:
        bias[torch.rand(broadcast) < 0.3] = draw.choice([float("-inf"), -1e9, -1e4])
    limit = torch.finfo(dtype).max
    bias = torch.where(bias.isneginf(), bias, bias.clamp(-limit, limit)).to(dtype).expand(shape)
    return bias.mT.contiguous().mT if draw.random() < 0.3 else bias


@pytest.mark.parametrize("seed", range(40))
def test_random_biases(seed: int, device: str) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype, bias_dtype = draw.choice(DTYPES), draw.choice(DTYPES)
    heads = draw.choice([(), (1,), (3,), (2, 2)])
    batch, num_q, num_k = draw.randrange(1, 4), draw.randrange(1, 30), draw.randrange(1, 50)
    p = draw.choice([0.0, 0.0, 0.4])
    bias = _random_bias((batch, *heads, num_q, num_k), bias_dtype, draw).to(device)
    causal = bool(heads) and draw.random() < 0.4
    options: dict[str, Any] = {"batch": batch, "heads": heads, "device": device, "seed": seed}
    qkv = inputs(num_q, num_k, value_dim=draw.choice([16, 24]), dtype=dtype, **options)
    leaves = [x.requires_grad_() for x in (*qkv, bias.detach())]
    attended = CAUSAL(bias.detach()) if causal else leaves[3]

    # With one value for each key, the output is what dropout leaves of the weights.
    ones = torch.eye(num_k, device=device)[None].expand(batch, -1, -1)
    ones = ones.reshape(batch, num_k, *(1 for _ in heads), num_k)
    ones = ones.expand(batch, num_k, *heads, num_k)
    kept = torch.ones((), device=device, dtype=torch.float64)
    if p:
        with torch.no_grad():
            left = _attend(*(x.float() for x in leaves[:2]), ones, attended, p)
        kept = (left.reshape(batch, num_q, -1, num_k).transpose(1, 2) > 0).double() / (1.0 - p)

    found = _attend(*leaves[:3], attended, p)
    upstream = torch.randn(found.shape).to(dtype).to(device)
    wants = leaves[:3] if causal else leaves
    results = [found, *torch.autograd.grad(found, wants, upstream)]
    if not p:
        with torch.no_grad():
            results.append(_attend(*leaves[:3], attended))

    def expected(precision: torch.dtype) -> list[torch.Tensor]:
        twins = [x.detach().to(precision).requires_grad_() for x in leaves]
        q, k, v = (x.reshape(batch, x.shape[1], -1, x.shape[-1]) for x in twins[:3])
        shape = (batch, q.shape[2], num_q, num_k)
        mask = twins[3].reshape(shape)
        if causal:
            mask = mask + ab.LowerTriangularMask().materialize(shape, precision, device)
        out = _eager(q, k, v, mask, kept.to(precision)).reshape(found.shape)
        grads = torch.autograd.grad(out, twins[: len(wants)], upstream.to(precision))
        return [out, *grads, *([] if p else [out])]

    names = ("out", "dq", "dk", "dv", *(["dbias"] if wants is leaves else []), "out alone")
    for name, mine, plain, exact in zip(
        names, results, expected(torch.float32), expected(torch.float64), strict=False
    ):
        rounded = plain.to(mine.dtype).double()
        scale = max(1.0, exact.abs().max().item())
        allowed = 2 * (rounded - exact).abs().max().item() + 4 * TOLERANCE[dtype] * scale
        error = (mine.double() - exact).abs().max().item()
        assert error <= allowed, f"{name}: {error:.3g} > {allowed:.3g}"


def test_a_bias_wider_than_the_inputs_keeps_its_values(device: str) -> None:
    """In half precision a bias of -1e9 is -inf, and 1000.3 is 1000."""
    q, k, v = inputs(8, 40, dtype=torch.float16, device=device)
    bias = 1000.0 + torch.rand(1, 3, 8, 40, device=device)
    wanted = _eager(*(x.double() for x in (q, k, v)), bias.double(), torch.ones((), device=device))
    assert (_attend(q, k, v, bias).double() - wanted).abs().max() < TOLERANCE[torch.float16]
    ones = torch.ones_like(v)
    module = SparseKAttention()
    for value in (-1e9, 1e9):
        assert torch.equal(_attend(q, k, ones, torch.full_like(bias, value)), ones[:, :8])
        assert torch.equal(module(q, k, ones, torch.full_like(bias, value)), ones[:, :8])


@pytest.mark.parametrize("wrap", [torch.nn.Parameter, CAUSAL], ids=["tensor", "causal"])
def test_inference_takes_a_bias_that_is_trained(wrap: Callable[[Any], Any], device: str) -> None:
    q, k, v = inputs(8, 40, device=device)
    bias = torch.zeros(1, 3, 8, 40, device=device, requires_grad=True)
    with pytest.raises((ValueError, NotImplementedError), match="passes no gradient"):
        _attend(q, k, v, wrap(bias))
    with torch.no_grad():
        found, wanted = (_attend(q, k, v, wrap(x)) for x in (bias, bias.detach()))
    assert_close("out", found, wanted, 2e-5)
