"""Native sparse attention against its peers on one GPU: whole passes, stages, memory.

    python benchmarks/nsa.py --csv nsa.csv --case 64x4:64k --case 32x8:64k

A case is ``query heads x KV heads : tokens``.  Every number is the median of repeated runs with a
cold L2; ours is checked against the fp64 oracle at the case's heads first, and a failed check stops
the run.  Peers that cannot be imported are left out: flash-linear-attention (``fla``),
mdy666/Scalable-Flash-Native-Sparse-Attention (``mdy666``: ``flash_nsa`` on the path),
XunhaoLai/native-sparse-attention-triton (``xunhaolai``: ``native_sparse_attention`` on the path)
and torch's dense attention (``cudnn``, ``flash``).  The sparse peers run without a window branch,
which they take from FlashAttention; ours is timed with its own.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

from sparsek_kernels import (
    compressed_attention,
    nsa_attention,
    nsa_compress,
    nsa_select,
    selected_attention,
    sink_flash_attention,
)
from sparsek_kernels.nsa.reference import nsa_reference

DIM = 128
Row = dict[str, str | float]


def median_ms(function: Callable[[], object]) -> float:
    """Median time of one call; the cache is flushed before each."""
    return float(do_bench(function, warmup=20, rep=120, return_mode="median"))


def inputs(heads: int, kv_heads: int, tokens: int, kind: str) -> list[torch.Tensor]:
    """q, k, v and three gates.  ``correlated`` queries drift slowly, as a trained model's do."""
    torch.manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(1, tokens, count, DIM, device="cuda", dtype=torch.bfloat16)

    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    if kind == "correlated":
        anchors = torch.randn(1, tokens // 256 + 2, kv_heads, 1, DIM, device="cuda")
        weight = (torch.arange(tokens, device="cuda") % 256 / 256).view(1, -1, 1, 1, 1)
        at = torch.arange(tokens, device="cuda") // 256
        drift = anchors[:, at] * (1 - weight) + anchors[:, at + 1] * weight
        grouped = q.unflatten(2, (kv_heads, -1))
        q = (0.5 * grouped + 2.0 * drift).to(torch.bfloat16).flatten(2, 3)
        texture = torch.randn(1, tokens // 64 + 1, kv_heads, DIM, device="cuda")
        k = (0.7 * k + texture[:, torch.arange(tokens, device="cuda") // 64]).to(torch.bfloat16)
    gates = [torch.rand(1, tokens, heads, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return [q, k, v, *gates]


def gate(heads: int, kv_heads: int) -> None:
    """Stop unless a short call agrees with the oracle, outputs and gradients."""
    tensors = inputs(heads, kv_heads, 768, "random")
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, indices = nsa_attention(*leaves, return_block_indices=True)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, upstream)
    exact = [x.double().requires_grad_() for x in tensors]
    with torch.device("cuda"):
        want = nsa_reference(*exact, block_indices=indices)
    wanted = torch.autograd.grad(want.out, exact, upstream.double())
    for name, have, need in zip(
        ("out", "dq", "dk", "dv", "dg_cmp", "dg_slc", "dg_swa"),
        (out, *grads),
        (want.out, *wanted),
        strict=True,
    ):
        error = float((have.detach().double() - need.detach()).norm() / need.detach().norm())
        if not error < 1e-2:
            raise SystemExit(f"{heads}x{kv_heads}: {name} is off by {error:.2e} (relative)")


def random_selection(tokens: int, kv_heads: int, slots: int = 16) -> torch.Tensor:
    """Distinct causal blocks drawn evenly, the forced ones included."""
    own = torch.arange(tokens, device="cuda").view(1, -1, 1) // 64
    ranks = torch.rand(1, tokens, kv_heads, tokens // 64, device="cuda", dtype=torch.float16)
    block = torch.arange(tokens // 64, device="cuda")
    ranks.masked_fill_((block > own[..., None]), -1.0)
    ranks.masked_fill_((block == 0) | ((block > own[..., None] - 2) & (block <= own[..., None])), 2)
    best = ranks.topk(slots, dim=-1)
    return torch.where(best.values >= 0, best.indices, -1).int()


def stages(tensors: list[torch.Tensor], kind: str) -> list[tuple[str, Callable[[], object]]]:
    """The forward stages and, for the two attention branches, their backward."""
    q, k, v, *_ = tensors
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    k_cmp, v_cmp = (x.detach().requires_grad_() for x in nsa_compress(k, v))
    out_cmp, lse = compressed_attention(q, k_cmp, v_cmp)
    chosen = {"own": nsa_select(q, k_cmp, lse=lse)}
    if kind == "random" and q.shape[1] <= 65536:
        chosen["random"] = random_selection(q.shape[1], k.shape[2])
    dout = torch.randn_like(out_cmp)
    found: list[tuple[str, Callable[[], object]]] = [
        ("compress", lambda: nsa_compress(k.detach(), v.detach())),
        ("compressed fwd", lambda: compressed_attention(
            q.detach(), k_cmp.detach(), v_cmp.detach())),
        ("select", lambda: nsa_select(q, k_cmp, lse=lse)),
        ("sliding fwd", lambda: sink_flash_attention(
            q.detach(), k.detach(), v.detach(), window_size=512)),
        ("compressed bwd", lambda: torch.autograd.grad(
            out_cmp, (q, k_cmp, v_cmp), dout, retain_graph=True)),
    ]  # fmt: skip
    out_swa = sink_flash_attention(q, k, v, window_size=512)
    found.append(
        ("sliding bwd", lambda: torch.autograd.grad(out_swa, (q, k, v), dout, retain_graph=True))
    )
    for name, indices in chosen.items():
        out = selected_attention(q, k, v, indices)

        def forward(indices: torch.Tensor = indices) -> object:
            return selected_attention(q.detach(), k.detach(), v.detach(), indices)

        def backward(out: torch.Tensor = out) -> object:
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        found += [(f"selected fwd ({name})", forward), (f"selected bwd ({name})", backward)]
    return found


def kernel_times(tensors: list[torch.Tensor]) -> list[tuple[str, float]]:
    """Time of every kernel of one forward and one backward pass, over all its launches."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = nsa_attention(*leaves)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, leaves, dout)
    found: list[tuple[str, float]] = []
    for name in ("forward", "backward"):
        if name == "backward":
            out = nsa_attention(*leaves)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            if name == "forward":
                out = nsa_attention(*leaves)
            else:
                torch.autograd.grad(out, leaves, dout)
            torch.cuda.synchronize()
        spent = {x.key: x.device_time_total / 1e3 for x in seen.key_averages()}
        found.append((f"{name}, all kernels", sum(spent.values())))
        for kernel, ms in sorted(spent.items(), key=lambda item: -item[1]):
            if ms > 0.02:
                found.append((f"{name}: {kernel[:70]}", ms))
    return found


def load_fla() -> Callable[..., torch.Tensor]:
    """``fla.ops.nsa.parallel_nsa`` without importing the models beside it."""
    for name in ("fla", "fla.ops"):
        if name not in sys.modules:
            folder = Path(*name.split("."))
            places = [str(Path(p) / folder) for p in sys.path if (Path(p) / folder).is_dir()]
            if not places:
                raise ModuleNotFoundError("fla: pip install fla-core==0.6.0 einops")
            module = types.ModuleType(name)
            module.__path__ = places
            module.__version__ = "0.6.0"
            sys.modules[name] = module
    function: Callable[..., torch.Tensor] = importlib.import_module(
        "fla.ops.nsa.parallel"
    ).parallel_nsa
    return function


def load_mdy666(tokens: int) -> Callable[..., torch.Tensor]:
    """Compression, selection, selected attention and the fused gate of ``flash_nsa``."""
    if importlib.util.find_spec("pkg_resources") is None:  # all that is used of it
        stub = types.ModuleType("pkg_resources")
        stub.parse_version = lambda text: tuple(int(x) for x in text.split("+")[0].split("."))
        sys.modules["pkg_resources"] = stub
    nsa = importlib.import_module("flash_nsa")
    gate = importlib.import_module("flash_nsa.ops.combine").fused_sigmoid_combine
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    scale = DIM**-0.5

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *g: torch.Tensor) -> torch.Tensor:
        q, k, v, a, b = (x[0] for x in (q, k, v, *g[:2]))
        nsa.NSAHelper.init_cu_seqlens(cu_seqlens)
        k_cmp, v_cmp = nsa.mean_pooling(k), nsa.mean_pooling(v)
        out_cmp, lse = nsa.compress_attn(q, k_cmp, v_cmp, sm_scale=scale)
        found, _ = nsa.slc_topk_indices(
            q, k_cmp, lse, sm_scale=scale, maybe_efficient_version=True, scale_slc_p=True
        )
        out_slc = nsa.select_attn(q, k, v, found, sm_scale=scale)
        # The gate wants a third branch; it gets one that was there before and needs no gradient.
        return gate(out_cmp, out_slc, out_cmp.detach(), torch.stack((a, b, b), -1))[None]

    return run


def load_xunhaolai(tokens: int) -> Callable[..., torch.Tensor]:
    """Compression, selection and selected attention of ``native_sparse_attention``, torch gates."""
    ops = importlib.import_module("native_sparse_attention.ops")
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *g: torch.Tensor) -> torch.Tensor:
        q, k, v, a, b = (x[0] for x in (q, k, v, *g[:2]))
        k_cmp, cu_cmp = ops.avgpool_compress(k, None, cu_seqlens, 32, 16)
        v_cmp, _ = ops.avgpool_compress(v, None, cu_seqlens, 32, 16)
        out_cmp, found = ops.compressed_attention(
            q, k_cmp, v_cmp, 32, 16, 64, 16, cu_seqlens, cu_cmp, tokens, k_cmp.shape[0]
        )
        out_slc = ops.topk_sparse_attention(q, k, v, found, 64, cu_seqlens)
        return (out_cmp * a[..., None] + out_slc * b[..., None])[None]

    return run


def providers(
    tensors: list[torch.Tensor], wanted: list[str]
) -> dict[str, Callable[..., torch.Tensor]]:
    """Whole passes by name; each takes q, k, v and the gates."""
    tokens, heads, kv_heads = *tensors[0].shape[1:3], tensors[1].shape[2]

    def dense(backend: SDPBackend) -> Callable[..., torch.Tensor]:
        def run(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor
        ) -> torch.Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
                ).transpose(1, 2)

        return run

    def fla() -> Callable[..., torch.Tensor]:
        if heads // kv_heads < 16:
            raise ModuleNotFoundError("fla wants groups of 16")
        function = load_fla()
        return lambda q, k, v, a, b, c: function(q, k, v, a, b, None, block_counts=16)

    loaders: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
        "cudnn": lambda: dense(SDPBackend.CUDNN_ATTENTION),
        "flash": lambda: dense(SDPBackend.FLASH_ATTENTION),
        "fla": fla,
        "mdy666": lambda: load_mdy666(tokens),
        "xunhaolai": lambda: load_xunhaolai(tokens),
    }
    found: dict[str, Callable[..., torch.Tensor]] = {"sparsek": nsa_attention}
    for name in wanted:
        try:
            found[name] = loaders[name]()
        except ModuleNotFoundError as missing:
            print(f"{name} left out: {missing}", file=sys.stderr)
    return found


def measure(
    case: str,
    kind: str,
    peers: list[str],
    with_stages: bool,
    with_kernels: bool,
    add: Callable[[Row], None],
) -> None:
    """Rows of one case."""
    heads, rest = case.split("x")
    kv_heads, length = rest.split(":")
    tokens = int(length[:-1]) * 1024 if length.endswith("k") else int(length)
    gate(int(heads), int(kv_heads))
    tensors = inputs(int(heads), int(kv_heads), tokens, kind)

    def note(provider: str, what: str, ms: float, peak: float | None = None) -> None:
        row = {"case": case, "queries": kind, "provider": provider, "what": what}
        add({**row, "ms": round(ms, 3), "peak_mib": "" if peak is None else round(peak)})

    for name, function in providers(tensors, peers).items():
        try:
            with torch.no_grad():
                note(name, "forward", median_ms(lambda f=function: f(*tensors)))
            leaves = [x.clone().requires_grad_() for x in tensors]
            torch.cuda.synchronize()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = function(*leaves)
            dout = torch.randn_like(out)
            used = leaves[: {"sparsek": 6, "cudnn": 3, "flash": 3}.get(name, 5)]
            run = lambda o=out, u=used, g=dout: torch.autograd.grad(o, u, g, retain_graph=True)  # noqa: E731
            run()
            # Beyond the inputs, the output, its gradient and the gradients of the inputs.
            kept = sum(x.numel() * x.element_size() for x in (out, dout, *used))
            peak = (torch.cuda.max_memory_allocated() - base - kept) / 2**20
            note(name, "backward", median_ms(run), peak)
            del out, run, leaves, used
        except Exception as problem:  # a peer that cannot run this case is a line of its own
            if name == "sparsek":
                raise
            print(f"{case} {name}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
        torch.cuda.empty_cache()
    if with_stages:
        for what, run in stages(tensors, kind):
            note("sparsek", what, median_ms(run))
    if with_kernels:
        for what, ms in kernel_times(tensors):
            note("sparsek", what, ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case", action="append", required=True, help="HEADSxKV:TOKENS, @correlated for such"
    )
    parser.add_argument("--peers", default="fla,mdy666,xunhaolai,cudnn,flash")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="time of each kernel, once")
    parser.add_argument("--csv", help="rows are appended as they are measured")
    args = parser.parse_args()

    def add(row: Row) -> None:
        print(*(f"{x!s:<12}" for x in row.values()), flush=True)
        if args.csv:
            fresh = not Path(args.csv).exists()
            with open(args.csv, "a", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(row))
                if fresh:
                    writer.writeheader()
                writer.writerow(row)

    for case in args.case:
        shape, _, kind = case.partition("@")
        peers = args.peers.split(",") if args.peers else []
        measure(shape, kind or "random", peers, args.stages, args.kernels, add)


if __name__ == "__main__":
    main()
