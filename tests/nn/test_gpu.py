"""The NSA layer on a GPU: kernels against torch operations, compilation, autocast, checkpointing.

Layers in fp32 and in half precision run the kernels, in fp64 torch operations.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sparsek_backend.nn import NativeSparseAttention, NSAConfig
from sparsek_kernels.common import tape
from sparsek_kernels.nsa.compress.rotary import rotary_frequencies, rotate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HIDDEN = 256


def layer(heads: int, kv_heads: int, dim: int = 64, **options: object) -> NativeSparseAttention:
    torch.manual_seed(0)
    config = NSAConfig.from_dict({"cmp_hidden_size": 64, **options})
    return NativeSparseAttention(HIDDEN, heads, kv_heads, dim, config=config, device="cuda")


def tokens(count: int, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, count, HIDDEN, generator=generator).cuda()


def run(
    module: NativeSparseAttention, x: torch.Tensor, autocast: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Output, and gradients of the input and of every parameter, in fp64."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    x = x.detach().requires_grad_()
    with torch.autocast("cuda", autocast, enabled=autocast is not None):
        out = module(x)
    generator = torch.Generator().manual_seed(2)
    upstream = torch.randn(out.shape, generator=generator).to(out)
    grads = torch.autograd.grad(out, (x, *parameters), upstream)
    found = dict(zip(("out", "x", *names), (out, *grads), strict=True))
    return {name: value.detach().double() for name, value in found.items()}


def distances(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative root-mean-square error of each tensor; the absolute one where it should be zero."""

    def far(have: torch.Tensor, want: torch.Tensor) -> float:
        return float((have.cpu() - want.cpu()).norm() / (want.cpu().norm() or 1.0))

    return {name: far(found[name], want) for name, want in wanted.items()}


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1), (7, 1), (16, 2), (16, 1)], ids=str)
@pytest.mark.parametrize("count", [31, 1537])
def test_fp32_kernels_agree_with_fp64(heads: tuple[int, int], count: int) -> None:
    module = layer(*heads)
    x = tokens(count)
    far = distances(run(module, x), run(copy.deepcopy(module).double(), x.double()))
    assert max(far.values()) < 1e-4, far


@pytest.mark.parametrize("shared", [False, True], ids=["own-kv", "shared-kv"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1), (7, 1), (16, 2), (16, 1)], ids=str)
def test_bf16_is_as_exact_as_torch(heads: tuple[int, int], shared: bool) -> None:
    module = layer(*heads, shared_kv=shared).bfloat16()
    x = tokens(1111, batch=2).bfloat16()
    wanted = run(copy.deepcopy(module).double(), x.double())
    ours = distances(run(module, x), wanted)
    theirs = distances(run(copy.deepcopy(module).cpu(), x.cpu()), wanted)
    for name, far in ours.items():
        assert far <= 2 * theirs[name] + 1e-3, f"{name}: {far:.2e}, torch {theirs[name]:.2e}"


@pytest.mark.parametrize("compression", ["mlp", "mean"])
def test_packed_sequences_do_not_meet(compression: str) -> None:
    module = layer(16, 2, compression=compression)
    edges = [0, 1, 32, 32, 97, 1400, 2601]
    x = tokens(edges[-1])
    packed = module(x, cu_seqlens=torch.tensor(edges, dtype=torch.int32, device="cuda"))
    for lo, hi in pairwise(edges):
        if hi > lo:
            alone = module(x[:, lo:hi])
            torch.testing.assert_close(packed[:, lo:hi], alone, rtol=1e-4, atol=1e-5)


def test_gradients_repeat_bit_for_bit() -> None:
    module = layer(16, 1, dim=128).bfloat16()
    x = tokens(3000).bfloat16()
    first, second = run(module, x), run(module, x)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_decoding_equals_prefill() -> None:
    module = layer(16, 2)
    steps = [1500, 1, 1, 64, 1]
    x = tokens(sum(steps), batch=2)
    cache = module.new_cache(2, sum(steps))
    with torch.no_grad():
        parts = [module(part, cache=cache) for part in x.split(steps, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), module(x), rtol=1e-4, atol=1e-5)


def test_compiled_layer() -> None:
    module = layer(16, 1).bfloat16()
    x = tokens(1500).bfloat16()
    wanted = run(copy.deepcopy(module).double(), x.double())
    eager = distances(run(module, x), wanted)
    torch._dynamo.reset()
    module.compile(fullgraph=True)
    compiled = distances(run(module, x), wanted)
    for name, far in eager.items():
        assert compiled[name] <= 2 * far + 1e-3, f"{name}: {compiled[name]:.2e}, eager {far:.2e}"


@pytest.mark.parametrize("kind", ["sequence", "batch", "packed"])
def test_a_replayed_pass_computes_what_the_jit_launches(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = layer(16, 1, compression="mean").bfloat16()
    xs = [x.bfloat16() for x in tokens(1500, batch=4).split(2 if kind == "batch" else 1)]
    cu_seqlens = None
    if kind == "packed":
        cu_seqlens = torch.tensor([0, 700, 701, 1500], dtype=torch.int32, device="cuda")

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        out = module(x, cu_seqlens=cu_seqlens)
        return [out, *torch.autograd.grad(out, [x, *module.parameters()], out.detach())]

    monkeypatch.setattr(tape, "_replays", {})
    monkeypatch.setattr(tape, "_MOST_ELEMENTS", 0)
    wanted = [step(x) for x in xs]
    assert not tape._replays
    monkeypatch.undo()
    monkeypatch.setattr(tape, "_replays", {})
    for x, want in 2 * list(zip(xs, wanted, strict=True)):  # seen, recorded, then replayed
        for found, exact in zip(step(x), want, strict=True):
            assert torch.equal(found, exact)
    passes = {"rotary", "means", "means backward", "compressed", "branches", "backward"}
    assert {key[1][0] for key in tape._replays} == passes
    assert all(tape._replays.values()), "every pass is replayed"


@pytest.mark.parametrize("compression", ["mean", "mlp"])
def test_a_cuda_graph_captures_a_step(compression: str) -> None:
    """Forward and backward copy nothing from the host, nor wait for the device."""
    module = layer(16, 1, compression=compression).bfloat16()
    x = tokens(1500).bfloat16()
    with torch.cuda.stream(torch.cuda.Stream()):
        wanted = run(module, x)
    torch.cuda.synchronize()
    upstream = torch.randn_like(x)
    leaves = [x.requires_grad_(), *module.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x)
        grads = torch.autograd.grad(out, leaves, upstream)
    graph.replay()
    assert torch.equal(out.double(), wanted["out"])
    for found, want in zip(grads, torch.autograd.grad(module(x), leaves, upstream), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_and_its_gradient(dtype: torch.dtype) -> None:
    """One kernel gives what torch operations give; its gradient is rotated back."""
    frequencies = rotary_frequencies(64, 10000.0)
    at = torch.randint(0, 100000, (2, 300))
    x, upstream = torch.randn(2, 2, 6, 300, 64).to(dtype).transpose(2, 3)
    wanted = rotate(x, at, frequencies), rotate(upstream, -at, frequencies)
    on_gpu = [t.cuda() for t in (x, upstream, at, frequencies)]
    x, upstream, *by = on_gpu
    out = rotate(x.requires_grad_(), *by)
    (grad,) = torch.autograd.grad(out, x, upstream)
    for found, want in zip((out, grad), wanted, strict=True):
        torch.testing.assert_close(found.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_runs_in_half_precision(dtype: torch.dtype) -> None:
    module = layer(16, 1)
    x = tokens(1500)
    wanted = run(copy.deepcopy(module).double(), x.double())
    with torch.autocast("cuda", dtype):
        assert module(x).dtype == dtype
    far = distances(run(module, x, autocast=dtype), wanted)
    plain = distances(run(copy.deepcopy(module).to(dtype), x.to(dtype)), wanted)
    for name, value in far.items():
        assert value <= 2 * plain[name] + 1e-3, f"{name}: {value:.2e}, plain {plain[name]:.2e}"
    assert all(p.dtype == torch.float32 for p in module.parameters())


def test_checkpointing_gives_the_same_gradients() -> None:
    module = layer(16, 1).bfloat16()
    x = tokens(1500).bfloat16().requires_grad_()
    plain = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    again = checkpoint(module, x, use_reentrant=False)
    found = torch.autograd.grad(again.sum(), [x, *module.parameters()])
    for have, need in zip(found, plain, strict=True):
        assert torch.equal(have, need)


@pytest.mark.parametrize(("batch", "count"), [(128, 512), (8, 8192)])
def test_unwritten_memory_is_not_read(batch: int, count: int) -> None:
    """New memory full of NaN changes no bit, many short sequences included."""
    module = layer(16, 1, dim=128).bfloat16()
    x = tokens(count, batch).bfloat16()
    plain = run(module, x)
    torch.use_deterministic_algorithms(True)  # also fills new memory
    try:
        poisoned = [run(module, x) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in plain.items():
        assert value.isfinite().all(), name
        for again in poisoned:
            assert torch.equal(again[name], value), name


@pytest.mark.parametrize(("batch", "count"), [(64, 512), (3, 1000), (1, 9000)])
def test_unwritten_shared_memory_is_not_read(batch: int, count: int) -> None:
    """What earlier kernels, of other processes too, left in shared memory changes no bit."""
    from tests.kernels.poison import poisoned_shared_memory

    module = layer(16, 1, dim=128).bfloat16()
    x = tokens(count, batch).bfloat16()
    plain = run(module, x)
    with poisoned_shared_memory():
        poisoned = run(module, x)
    for name, value in plain.items():
        assert value.isfinite().all(), name
        assert torch.equal(poisoned[name], value), name


@pytest.mark.parametrize(("batch", "count"), [(128, 512), (512, 128)])
def test_many_short_sequences(batch: int, count: int) -> None:
    """Against fp64; two of the sequences say how far torch is from it."""
    module = layer(16, 1, dim=128).bfloat16()
    x = tokens(count, batch).bfloat16()
    ours = distances(run(module, x), run(copy.deepcopy(module).double(), x.double()))
    some, plain = x[:2].cpu(), copy.deepcopy(module).cpu()
    theirs = distances(run(plain, some), run(copy.deepcopy(plain).double(), some.double()))
    for name, far in ours.items():
        assert far <= 2 * theirs[name] + 1e-3, f"{name}: {far:.2e}, torch {theirs[name]:.2e}"
