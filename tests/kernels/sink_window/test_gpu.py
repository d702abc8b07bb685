"""The kernels on a GPU at real sizes: the grid of shapes, strides, offsets, reproducibility."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sparsek_kernels import sink_flash_attention
from sparsek_kernels.common.device import device_arch
from sparsek_kernels.sink_window import launch_sm90
from sparsek_kernels.sink_window.config import LaunchConfig, TileConfig
from tests.kernels.sink_window.cases import Case, check, check_terms, kernels, long_config, make
from tests.kernels.sink_window.reference import sink_flash_attention_reference

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENS = ((0, 0), (1, 1), (63, 63), (65, 700), (0, 5), (500, 500), (7, 0), (130, 40), (1000, 1000))

GRID = [
    # head sizes, in every dtype, with everything switched on
    *(
        Case(333, 333, 4, 1, dim, dtype=dtype, window=100, num_sink=5, sinks=True)
        for dim in (32, 64, 80, 96, 128, 192, 256)
        for dtype in (BF16, FP16, FP32)
    ),
    # groups
    *(
        Case(500, 500, group, 1, dim, dtype=BF16, window=130, num_sink=4)
        for group in (1, 3, 7, 8, 16)
        for dim in (64, 128)
    ),
    # lengths around the tile edges, two sequences
    *(
        Case(n, n, 4, 2, dim, 2, dtype=BF16, window=window, num_sink=4 if window else 0)
        for n in (1, 63, 64, 65, 1000)
        for dim in (64, 128)
        for window in (None, 64)
    ),
    # masks
    *(
        Case(700, 700, 4, 2, dim, 2, dtype=dtype, **mask)
        for dim, dtype in ((64, FP16), (128, BF16))
        for mask in (
            {"causal": False},
            {"causal": False, "sinks": True},
            {"window": 1},
            {"window": 256, "num_sink": 64, "sinks": True},
            {"window": 100, "num_sink": 300},
            {"window": 5000, "num_sink": 4},
        )
    ),
    # fewer and more queries than keys
    *(
        Case(nq, nk, 6, 2, dim, 2, dtype=BF16, window=window, num_sink=4 if window else 0)
        for nq, nk in ((300, 1000), (500, 130), (1, 777))
        for dim in (64, 128)
        for window in (None, 200)
    ),
    # pairs of heads
    *(
        Case(n, n, 2 * group, 2, 128, 2, dtype=BF16, window=512, sinks=True)
        for group in (2, 4, 16)
        for n in (1, 63, 1000)
    ),
    Case(300, 1000, 8, 2, 128, 2, dtype=BF16, window=200),
    Case(500, 130, 8, 2, 128, 2, dtype=FP16, window=200),
    Case(heads=8, kv_heads=2, dim=128, dtype=BF16, lens=LENS, window=300, sinks=True),
    # packed sequences
    *(
        Case(heads=4, kv_heads=2, dim=dim, dtype=dtype, lens=LENS, **mask)
        for dim, dtype in ((64, BF16), (128, BF16), (96, FP16), (128, FP32))
        for mask in ({}, {"window": 200, "num_sink": 4, "sinks": True}, {"causal": False})
    ),
]


def with_hopper(case: Case) -> LaunchConfig:
    """The configuration of a long problem on this GPU."""
    return long_config(case, device_arch(torch.device("cuda")))


@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(case: Case) -> None:
    check(case, "cuda", with_hopper(case))


def test_very_low_scores_at_a_partial_tile() -> None:
    """Keys past the end score 0, far above a log-sum-exp of -100: they must not overflow fp16."""
    case = Case(300, 200, 2, 1, 64, dtype=FP16, causal=False)
    t = make(case, "cuda")
    t.q.fill_(3.5)
    t.k.fill_(-3.5)
    found = kernels(case, t, with_hopper(case))
    assert float(found["lse"].max()) < -80
    for name in ("dq", "dk", "dv"):
        assert bool(found[name].isfinite().all()), name


PORTABLE = [case for case in GRID if case.dim in (64, 128) and case.dtype == BF16][::5]


@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_portable_kernels(case: Case) -> None:
    config = with_hopper(case)
    check(case, "cuda", dataclasses.replace(config, hopper_forward=None, hopper_backward=None))


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_terms_of_sums_are_not_rounded(case: Case, hopper: bool) -> None:
    config = with_hopper(case)
    if not hopper:
        config = dataclasses.replace(config, hopper_forward=None, hopper_backward=None)
    check_terms(case, "cuda", config)


SMALL = [
    Case(512, 512, 8, 8, 64, causal=False, dtype=FP16),
    Case(512, 512, 6, 2, 64, 2, dtype=BF16, sinks=True),
    Case(77, 450, 4, 2, 64, 2, causal=False, dtype=BF16, sinks=True),
    Case(200, 200, 3, 1, 64, 3, causal=False, dtype=BF16),
    Case(200, 131, 2, 1, 64, dtype=FP16),
    Case(300, 511, 4, 2, 64, 2, dtype=BF16),
    Case(100, 256, 4, 1, 128, dtype=BF16, window=70, num_sink=3, sinks=True),
    Case(1, 1, 2, 2, 64, dtype=BF16, sinks=True),
    Case(90, 33, 2, 1, 128, dtype=FP16),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_problems(case: Case) -> None:
    check(case, "cuda")


def test_a_small_problem_runs_the_kernel_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    if device_arch(torch.device("cuda")) != 90:
        pytest.skip("needs a Hopper GPU")
    launches = []
    small = launch_sm90.forward_small
    monkeypatch.setattr(launch_sm90, "forward_small", lambda *a: launches.append(small(*a)))
    case = SMALL[0]
    kernels(case, make(case, "cuda"))
    assert len(launches) == 1


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("dim", [64, 128])
def test_backward_is_bitwise_reproducible(window: int | None, dim: int) -> None:
    case = Case(5000, 5000, 8, 2, dim, dtype=BF16, window=window, num_sink=4, sinks=True)
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
    want_in = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    found_in = [x.detach().requires_grad_() for x in moved]
    outs = []
    for q_, k_, v_ in (want_in, found_in):
        out = sink_flash_attention(q_, k_, v_, num_sink=4, window_size=100)
        assert isinstance(out, torch.Tensor)
        outs.append((out, *torch.autograd.grad(out.float().pow(2).sum(), (q_, k_, v_))))
    for want, found in zip(*outs, strict=True):
        torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)


def test_more_than_two_to_the_31_elements() -> None:
    tokens, heads, dim, window = 540_000, 32, 128, 64
    assert tokens * heads * dim > 2**31
    torch.manual_seed(0)
    q = torch.randn(1, tokens, heads, dim, device="cuda", dtype=BF16)
    k, v = (torch.randn(1, tokens, 1, dim, device="cuda", dtype=BF16) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = sink_flash_attention(*leaves, num_sink=4, window_size=window)
    assert isinstance(out, torch.Tensor)
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    tail = slice(tokens - 200, tokens)
    with torch.no_grad():
        # The last 200 queries against the sinks and the last 300 keys, whose mask is the same.
        near = torch.cat([torch.arange(4), torch.arange(tokens - 300, tokens)]).to("cuda")
        rows = torch.arange(tokens - 200, tokens, device="cuda")[:, None]
        seen = (near <= rows) & ((near < 4) | (near > rows - window))
        keys, values = k[0, near, 0].float(), v[0, near, 0].float()
        scores = torch.einsum("nhd,md->hnm", q[0, tail].float(), keys) * dim**-0.5
        probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        want = torch.einsum("hnm,md->nhd", probs, values)
        dp = torch.einsum("nhd,md->hnm", dout[0, tail].float(), values)
        ds = probs * (dp - (dp * probs).sum(-1, keepdim=True)) * dim**-0.5
        want_dq = torch.einsum("hnm,md->nhd", ds, keys)
        want_dk = torch.einsum("hnm,nhd->md", ds, q[0, tail].float())
        want_dv = torch.einsum("hnm,nhd->md", probs, dout[0, tail].float())
    torch.testing.assert_close(out[0, tail].float(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(dq[0, tail].float(), want_dq, atol=2e-2, rtol=2e-2)
    # The last 100 keys are seen by these queries alone.
    torch.testing.assert_close(dk[0, -100:, 0].float(), want_dk[-100:], atol=5e-2, rtol=2e-2)
    torch.testing.assert_close(dv[0, -100:, 0].float(), want_dv[-100:], atol=5e-2, rtol=2e-2)


def test_scratch_memory_grows_with_tokens_only() -> None:
    def peak(tokens: int) -> int:
        q, k, v = (torch.randn(1, tokens, h, 128, device="cuda", dtype=BF16) for h in (32, 8, 8))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = sink_flash_attention(*leaves, num_sink=4, window_size=1024)
        assert isinstance(out, torch.Tensor)
        dout = torch.randn_like(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, leaves, dout)
        return torch.cuda.max_memory_allocated() - before

    short, long = peak(16384), peak(65536)
    assert long <= 4.1 * short


def test_repeated_small_calls_use_the_new_tensors() -> None:
    outs = []
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", dtype=FP16) for _ in range(3))
        found, lse = sink_flash_attention(q, k, v, causal=False, return_lse=True)
        want, want_lse = sink_flash_attention_reference(q, k, v, causal=False)
        torch.testing.assert_close(found.double(), want, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-3)
        outs.append(found)
    assert not torch.equal(outs[0], outs[1])


def test_captured_in_a_graph() -> None:
    q, k, v = (torch.randn(1, 512, 8, 64, device="cuda", dtype=FP16) for _ in range(3))
    want = sink_flash_attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sink_flash_attention(q, k, v)
    q.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert isinstance(want, torch.Tensor)
    assert isinstance(out, torch.Tensor)
    assert not torch.equal(out, want)
    exact, _ = sink_flash_attention_reference(q, k, v)
    torch.testing.assert_close(out.double(), exact, atol=2e-3, rtol=2e-3)


def test_compiles_without_graph_breaks() -> None:
    q, k, v = (
        torch.randn(1, 300, 4, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)
    )

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = sink_flash_attention(q, k, v, num_sink=2, window_size=40)
        assert isinstance(out, torch.Tensor)
        return out.float().pow(2).sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(run(q, k, v), (q, k, v))
    found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


def test_selected_configuration_of_a_long_problem_runs_the_hopper_kernels() -> None:
    if device_arch(torch.device("cuda")) != 90:
        pytest.skip("needs a Hopper GPU")
    case = Case(128, 128, 4, 1, 128, dtype=BF16, window=64)
    assert with_hopper(case).hopper_forward == TileConfig(64, 64, 4, 4, hold_q=True)
    assert with_hopper(case).hopper_backward is not None
