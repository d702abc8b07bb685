"""The operator pair against a dense reference, over biases, layouts and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.devices import spy_on_guards
from tests.xformers_op.cases import (
    BATCHED,
    DECODING,
    DEVICES,
    PACKED,
    TOLERANCE,
    ab,
    assert_close,
    check_pair,
    fmha,
    inputs,
    reference,
)

from sparsek_backend.xformers_op import BwOp, FwOp, SinkWindowMask, paged  # isort: skip
from sparsek_kernels.block_sparse import ops as block_sparse_ops  # isort: skip
from sparsek_kernels.fallback import fallback_counts  # isort: skip
from sparsek_kernels.sink_window import ops as sink_window_ops  # isort: skip

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_batched_biases(name: str, dtype: torch.dtype, device: str) -> None:
    make, num_q, num_k = BATCHED[name]
    q, k, v = inputs(num_q, num_k, batch=2, dtype=dtype, device=device)
    check_pair(q, k, v, make(q.device))


@pytest.mark.parametrize("name", PACKED)
def test_packed_biases(name: str, device: str) -> None:
    make, lengths_q, lengths_k = PACKED[name]
    q, k, v = inputs(sum(lengths_q), sum(lengths_k), device=device)
    check_pair(q, k, v, make(q.device))


@pytest.mark.parametrize("heads", [(), (2, 3)], ids=["BMK", "BMGHK"])
@pytest.mark.parametrize(
    "name", ["none", "causal", "causal-fewer-keys", "sink-window", "block-sparse-heads"]
)
def test_layouts(name: str, heads: tuple[int, ...], device: str) -> None:
    make, num_q, num_k = BATCHED[name]
    if not heads and name in ("sink-window", "block-sparse-heads"):
        pytest.skip("xFormers takes BMK with no bias, tensors and LowerTriangularMask only")
    q, k, v = inputs(num_q, num_k, batch=2, heads=heads, device=device)
    check_pair(q, k, v, make(q.device))


@pytest.mark.parametrize("name", ["padded-causal", "paged-causal"])
def test_what_paged_kernels_do_not_take_is_gathered(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, num_q, rows = DECODING[name]
    q, k, v = inputs(num_q, rows, device=device)
    bias = make(q.device)
    wanted = reference(q, k, v, bias)[0]
    monkeypatch.delattr(paged, "paged_attention")
    for index in range(3):
        given = [q, k, v]
        given[index] = given[index].mT.contiguous().mT  # rows that are not contiguous
        found = fmha.memory_efficient_attention_forward(*given, bias, op=FwOp)
        assert_close("out", found, wanted, 2e-5)


def test_pages_without_queries_give_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask
    bias = kind.from_seqlens([0, 0], 64, [30, 64], device=torch.device(device))
    q, k, v = inputs(0, 128, device=device)
    monkeypatch.delattr(paged, "paged_attention")
    assert fmha.memory_efficient_attention_forward(q, k, v, bias, op=FwOp).shape == q.shape


def test_pages_are_read_on_the_device_of_the_query(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, num_q, rows = DECODING["paged-causal"]
    q, k, v = inputs(num_q, rows, device=device)
    guarded = spy_on_guards(monkeypatch, paged, "paged_attention")
    fmha.memory_efficient_attention_forward(q, k, v, make(q.device), op=FwOp)
    assert guarded == [True]


@pytest.mark.parametrize(("dim", "value_dim"), [(16, 24), (24, 16), (1, 3), (80, 80)])
@pytest.mark.parametrize(
    "name", ["causal", "causal-fewer-keys", "sink-window", "block-sparse-causal"]
)
def test_head_dims(name: str, dim: int, value_dim: int, device: str) -> None:
    make, num_q, num_k = BATCHED[name]
    q, k, v = inputs(num_q, num_k, dim=dim, value_dim=value_dim, device=device)
    check_pair(q, k, v, make(q.device))


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)], ids=["BMK", "BMHK", "BMGHK"])
def test_tensor_bias(heads: tuple[int, ...], device: str) -> None:
    q, k, v = inputs(20, 33, batch=2, heads=heads, device=device)
    bias = torch.randn(2, *heads, 20, 33, device=device)
    bias[..., 3, :30] = float("-inf")
    before = fallback_counts().get("xFormers attention with a tensor bias", 0)
    check_pair(q, k, v, bias)
    assert fallback_counts()["xFormers attention with a tensor bias"] > before


def test_tensor_bias_without_gradient_masks_whole_rows(device: str) -> None:
    q, k, v = inputs(20, 33, device=device)
    bias = torch.zeros(1, 3, 20, 33, device=device)
    bias[0, 1, 4] = float("-inf")
    out = fmha.memory_efficient_attention_forward(q, k, v, bias, op=FwOp)
    assert_close("out", out, reference(q, k, v, bias)[0], 2e-5)
    assert (out[0, 4, 1] == 0).all()


@pytest.mark.parametrize(
    "lengths", [(512, 1024, 256, 768), (500, 1000, 1, 700)], ids=["whole", "odd"]
)
@pytest.mark.parametrize("kind", ["diagonal", "causal", "local"])
def test_packed_training_at_length(kind: str, lengths: tuple[int, ...], device: str) -> None:
    """Long enough for the kernels of large problems, with and without a tile to spare."""
    if device == "cpu":
        lengths = tuple(n // 8 for n in lengths)
    mask: Any = ab.BlockDiagonalMask.from_seqlens(lengths, device=torch.device(device))
    if kind == "causal":
        mask = mask.make_causal()
    elif kind == "local":
        mask = mask.make_local_attention(200)
    total = sum(lengths)
    q, k, v = inputs(total, total, heads=(8,), dim=128, dtype=torch.bfloat16, device=device)
    check_pair(q, k, v, mask)


def test_causal_mask_with_tensor_bias(device: str) -> None:
    q, k, v = inputs(20, 33, device=device)
    check_pair(q, k, v, ab.LowerTriangularMaskWithTensorBias(torch.randn(1, 3, 20, 33).to(device)))


def test_custom_scale(device: str) -> None:
    q, k, v = inputs(33, 70, device=device)
    check_pair(q, k, v, SinkWindowMask(2, 9), scale=0.03)


def test_op_without_a_backward_operator(device: str) -> None:
    q, k, v = inputs(33, 70, device=device)
    check_pair(q, k, v, SinkWindowMask(2, 9), op=(FwOp, None))


def test_a_window_with_more_queries_than_keys_is_served_by_torch(device: str) -> None:
    mask = ab.BlockDiagonalMask.from_seqlens([9, 20], [6, 24], device=torch.device(device))
    q, k, v = inputs(29, 30, device=device)
    reason = "an xFormers local mask with more queries than keys"
    before = fallback_counts().get(reason, 0)
    check_pair(q, k, v, mask.make_local_attention(5))
    assert fallback_counts()[reason] > before


@pytest.mark.parametrize("name", DECODING)
def test_decoding_biases(name: str, device: str) -> None:
    make, num_q, rows = DECODING[name]
    q, k, v = inputs(num_q, rows, device=device)
    bias = make(q.device)
    wanted, wanted_lse = reference(q, k, v, bias)
    poisoned = [x.clone() for x in (k, v)]
    whole = DECODING[name.removesuffix("-local")][0](q.device)  # a window hides keys in use
    unseen = whole.materialize((1, 1, num_q, rows), device=device)[0, 0].isneginf().all(0)
    for x in poisoned:
        x[:, unseen] = float("nan")
    assert_close(
        "out", fmha.memory_efficient_attention_forward(q, *poisoned, bias, op=FwOp), wanted, 2e-5
    )
    out, lse = fmha.memory_efficient_attention_partial(q, *poisoned, bias, op=FwOp)
    assert_close("partial", out, wanted, 2e-5)
    assert_close("lse", lse, wanted_lse, 2e-5)


@pytest.mark.parametrize(("dim", "value_dim"), [(16, 24), (32, 16), (3, 3), (8, 8), (80, 80)])
@pytest.mark.parametrize("name", ["padded-causal", "paged-causal", "paged-causal-decode"])
def test_decoding_head_dims(name: str, dim: int, value_dim: int, device: str) -> None:
    make, num_q, rows = DECODING[name]
    q, k, v = inputs(num_q, rows, dim=dim, value_dim=value_dim, device=device)
    bias = make(q.device)
    found = fmha.memory_efficient_attention_forward(q, k, v, bias, op=FwOp)
    assert_close("out", found, reference(q, k, v, bias)[0], 2e-5)


@pytest.mark.parametrize("name", ["padded-causal", "paged-causal-decode"])
def test_decoding_grouped_heads_without_copies(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.xformers_op import paged

    make, num_q, rows = DECODING[name]
    q, _, _ = inputs(num_q, rows, heads=(2, 3), device=device)
    k, v = inputs(rows, rows, heads=(2, 1), device=device)[1:]
    k, v = (x.expand(-1, -1, 2, 3, -1) for x in (k, v))
    seen: list[tuple[torch.Size, int]] = []
    real = paged.paged_attention

    def spy(query: Any, k_cache: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((k_cache.shape, k_cache.data_ptr()))
        return real(query, k_cache, *args, **kwargs)

    monkeypatch.setattr(paged, "paged_attention", spy)
    bias = make(q.device)
    out = fmha.memory_efficient_attention_forward(q, k, v, bias, op=FwOp)
    assert_close("out", out, reference(q, k, v, bias)[0], 2e-5)
    assert seen[0][0][1] == 2, "one KV head per group"
    assert seen[0][1] == k.data_ptr(), "keys are read in place"


def test_multi_query_keys_are_not_expanded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsek_backend.xformers_op import native

    heads: list[int] = []
    real = native.sink_flash_attention

    def spy(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        heads.append(k.shape[2])
        return real(q, k, *args, **kwargs)

    monkeypatch.setattr(native, "sink_flash_attention", spy)
    q, k, v = inputs(33, 70, heads=(4,), device=device)
    k, v = (x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v))
    out = fmha.memory_efficient_attention_forward(q, k, v, op=FwOp)
    assert heads == [1]
    assert_close("out", out, reference(q, k, v, None)[0], 2e-5)
    leaf = k.detach().requires_grad_()
    grad = torch.autograd.grad(
        fmha.memory_efficient_attention(q, leaf, v, op=(FwOp, BwOp)).sum(), leaf
    )[0]
    twin = k.detach().clone().requires_grad_()
    wanted = torch.autograd.grad(reference(q, twin, v, None)[0].sum(), twin)[0]
    assert_close("dk", grad, wanted, 1e-4)


def test_a_pattern_runs_the_block_sparse_kernels(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.xformers_op import native

    calls: list[str] = []

    def spy(name: str) -> None:
        real = getattr(native, name)
        monkeypatch.setattr(native, name, lambda *a, **k: calls.append(name) or real(*a, **k))

    spy("block_sparse_attention")
    spy("block_sparse_bwd")
    make, num_q, num_k = BATCHED["block-sparse-causal"]
    q, k, v = (x.requires_grad_() for x in inputs(num_q, num_k, device=device))
    fmha.memory_efficient_attention(q, k, v, make(q.device), op=(FwOp, BwOp)).sum().backward()
    assert calls == ["block_sparse_attention", "block_sparse_bwd"]


def test_strided_inputs_are_read_in_place(device: str) -> None:
    packed = torch.randn(2, 33, 3, 3, 16, device=device)
    q, k, v = packed.unbind(2)
    check_pair(q, k, v, ab.LowerTriangularMask())
    q, k, v = (x.permute(0, 2, 1, 3) for x in inputs(3, 3, batch=2, heads=(33,), device=device))
    check_pair(q, k, v, ab.LowerTriangularMask())


def test_partial_results_merge(device: str) -> None:
    q, k, v = inputs(8, 64, batch=2, device=device)
    parts = [
        fmha.memory_efficient_attention_partial(q, k[:, lo:hi], v[:, lo:hi], op=FwOp)
        for lo, hi in ((0, 40), (40, 64))
    ]
    weights = torch.stack([lse for _, lse in parts]).softmax(0)
    merged = sum(
        out * w.transpose(1, 2)[..., None] for (out, _), w in zip(parts, weights, strict=True)
    )
    assert isinstance(merged, torch.Tensor)
    assert_close("merged", merged, reference(q, k, v, None)[0], 2e-5)


def test_low_level_backward(device: str) -> None:
    q, k, v = inputs(33, 70, device=device)
    bias = SinkWindowMask(2, 9)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias, op=FwOp)
    grad = torch.randn_like(out)
    found = fmha.memory_efficient_attention_backward(grad, out, lse, q, k, v, bias, op=BwOp)
    twins = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(reference(*twins, bias)[0], twins, grad.double())
    for name, a, b in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        assert_close(name, a, b, 1e-4)


@pytest.mark.parametrize("name", ["none", "block-sparse-heads"])
def test_backward_of_a_padded_log_sum_exp(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xFormers' CUTLASS operator leaves one, and hands it to whoever runs backward."""
    make, num_q, num_k = BATCHED[name]
    q, k, v = inputs(num_q, num_k, batch=2, device=device)
    bias = make(q.device)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias, op=FwOp)
    grad = torch.randn_like(out)
    padded = torch.nn.functional.pad(lse, (0, -num_q % 32), value=float("inf"))
    for family in (block_sparse_ops, sink_window_ops):
        if not torch.cuda.is_available():  # where kernels are interpreted
            monkeypatch.setattr(family, "runs_kernels", lambda x: True)
    found = fmha.memory_efficient_attention_backward(grad, out, padded, q, k, v, bias, op=BwOp)
    twins = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(reference(*twins, bias)[0], twins, grad.double())
    for which, a, b in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        assert_close(which, a, b, 1e-4)


@pytest.mark.parametrize(
    "bias", [None, ab.LowerTriangularMask(), "diagonal"], ids=["none", "causal", "diagonal"]
)
def test_dropout(bias: Any, device: str) -> None:
    p = 0.3
    q, k, v = (x.requires_grad_() for x in inputs(64, 64, heads=(2,), device=device))
    if bias == "diagonal":
        bias = ab.BlockDiagonalMask.from_seqlens([24, 40], device=torch.device(device))
    v_ones = torch.ones_like(v).requires_grad_()

    def run(value: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return fmha.memory_efficient_attention(q, k, value, bias, p=p, op=(FwOp, BwOp))

    assert torch.equal(run(v), run(v)), "one seed, one result"
    # kept weights are scaled by 1 / (1 - p): the mean of their sums is 1
    sums = run(v_ones)[..., 0]
    assert abs(sums.mean().item() - 1.0) < 0.1
    assert sums.std().item() > 0.01
    # the same mask in both directions: out is linear in v
    grad = torch.randn_like(v)
    dv = torch.autograd.grad(run(v), v, grad)[0]
    assert_close("dv", (dv * v).sum(), (run(v) * grad).sum().double(), 1e-3)
    # and dq agrees with a finite difference along a direction
    direction = torch.randn_like(q)
    dq = torch.autograd.grad((run(v) * grad).sum(), q)[0]
    step = 1e-2
    with torch.no_grad():
        up, down = q + step * direction, q - step * direction
        values = []
        for query in (up, down):
            torch.manual_seed(7)
            out = fmha.memory_efficient_attention(query, k, v, bias, p=p, op=(FwOp, BwOp))
            values.append((out * grad).sum().item())
    numeric = (values[0] - values[1]) / (2 * step)
    analytic = (dq * direction).sum().item()
    assert abs(numeric - analytic) < 2e-2 * max(1.0, abs(numeric))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_no_sequences_give_nothing(p: float, device: str) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(0, 0, device=device))
    mask = ab.BlockDiagonalMask.from_seqlens([], device=torch.device(device))
    out = fmha.memory_efficient_attention(q, k, v, mask, p, op=(FwOp, BwOp))
    out.sum().backward()
    assert out.shape == q.shape


def test_rows_without_keys_give_zeros(device: str) -> None:
    q, k, v = inputs(9, 4, device=device)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(
        q, k, v, ab.LowerTriangularFromBottomRightMask(), op=FwOp
    )
    assert (out[:, :5] == 0).all()
    assert lse[..., :5].isneginf().all()
    assert_close("out", out, reference(q, k, v, ab.LowerTriangularFromBottomRightMask())[0], 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_bfloat16(dtype: torch.dtype, device: str) -> None:
    q, k, v = inputs(33, 70, dtype=dtype, device=device)
    assert TOLERANCE[dtype] == 2e-2
    check_pair(q, k, v, SinkWindowMask(2, 9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", [*BATCHED, *PACKED, *DECODING, "tensor", "causal-tensor", "drop"])
def test_autocast_changes_nothing(name: str, dtype: torch.dtype, device: str) -> None:
    """The operators take what they are given, as xFormers' own do."""
    make, num_q, num_k = {**BATCHED, **DECODING}.get(name, (None, 20, 33))
    if name in PACKED:
        make, num_q, num_k = PACKED[name][0], *map(sum, PACKED[name][1:])
    q, k, v = inputs(num_q, num_k, device=device)
    tensor = torch.zeros(1, 3, num_q, num_k, device=device)
    biases = {"tensor": tensor, "causal-tensor": ab.LowerTriangularMaskWithTensorBias(tensor)}
    bias = make(q.device) if make else biases.get(name)
    p = 0.3 if name == "drop" else 0.0
    upstream = torch.randn(1, num_q, 3, 16, device=device)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        results = [fmha.memory_efficient_attention(q, k, v, bias, p, op=(FwOp, BwOp))]
        if name in DECODING:
            return [*results, *fmha.memory_efficient_attention_partial(q, k, v, bias, op=FwOp)]
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = fmha.memory_efficient_attention(*leaves, bias, p, op=(FwOp, BwOp))
        return [*results, out, *torch.autograd.grad(out, leaves, upstream)]

    wanted = run()
    with torch.autocast(device, dtype):
        found = run()
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert_close(name, a, b, 1e-6)
