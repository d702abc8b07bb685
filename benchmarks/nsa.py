"""Native sparse attention against its peers on one GPU: whole passes, selected branch, memory.

    python benchmarks/nsa.py --csv nsa.csv                    every case of nsa.yaml
    python benchmarks/nsa.py --only 64x4:64k --kernels        one case, and the time of each kernel

Ours is checked against the fp64 oracle at the case's heads first, and a failed check stops the run.
All implementations of a case are timed in turn, one call of each after the other, with a cold L2
(``sparsek_backend.bench.timing``).  Peers that cannot run are rows without a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nsa_peers
import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from sparsek_backend.bench.machine import describe_machine
from sparsek_backend.bench.registry import Unavailable
from sparsek_backend.bench.results import Row, write_csv
from sparsek_backend.bench.timing import make_timed, time_interleaved
from sparsek_kernels import nsa_attention, selected_attention
from sparsek_kernels.nsa.reference import nsa_reference

DIM = 128
CUDA = torch.device("cuda")
OURS = "sparsek"
NO_WINDOW = "no window branch"


def inputs(heads: int, kv_heads: int, tokens: int, kind: str) -> list[torch.Tensor]:
    """q, k, v and three gates.  ``correlated`` queries drift slowly, as a trained model's do."""
    torch.manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(1, tokens, count, DIM, device=CUDA, dtype=torch.bfloat16)

    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    if kind == "correlated":
        anchors = torch.randn(1, tokens // 256 + 2, kv_heads, 1, DIM, device=CUDA)
        weight = (torch.arange(tokens, device=CUDA) % 256 / 256).view(1, -1, 1, 1, 1)
        at = torch.arange(tokens, device=CUDA) // 256
        drift = anchors[:, at] * (1 - weight) + anchors[:, at + 1] * weight
        grouped = q.unflatten(2, (kv_heads, -1))
        q = (0.5 * grouped + 2.0 * drift).to(torch.bfloat16).flatten(2, 3)
        texture = torch.randn(1, tokens // 64 + 1, kv_heads, DIM, device=CUDA)
        k = (0.7 * k + texture[:, torch.arange(tokens, device=CUDA) // 64]).to(torch.bfloat16)
    gates = [torch.rand(1, tokens, heads, device=CUDA, dtype=torch.bfloat16) for _ in range(3)]
    return [q, k, v, *gates]


def gate(heads: int, kv_heads: int, kind: str) -> str:
    """Stop unless a short call agrees with the oracle, outputs and gradients; the worst error."""
    tensors = inputs(heads, kv_heads, 1280, kind)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, indices = nsa_attention(*leaves, return_block_indices=True)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, upstream)
    exact = [x.double().requires_grad_() for x in tensors]
    with CUDA:
        want = nsa_reference(*exact, block_indices=indices)
    wanted = torch.autograd.grad(want.out, exact, upstream.double())
    worst = 0.0
    for name, have, need in zip(
        ("out", "dq", "dk", "dv", "dg_cmp", "dg_slc", "dg_swa"),
        (out, *grads),
        (want.out, *wanted),
        strict=True,
    ):
        error = float((have.detach().double() - need.detach()).norm() / need.detach().norm())
        if not error < 1e-2:
            raise SystemExit(f"{heads}x{kv_heads}: {name} is off by {error:.2e} (relative)")
        worst = max(worst, error)
    return f"worst relative error {worst:.1e}, bound 1e-2"


def random_selection(tokens: int, kv_heads: int, slots: int = 16) -> torch.Tensor:
    """Distinct causal blocks ``[1, tokens, Hkv, slots]``, the forced ones and evenly drawn ones."""
    own = torch.arange(tokens, device=CUDA).view(1, -1, 1) // 64
    ranks = torch.rand(1, tokens, kv_heads, tokens // 64, device=CUDA, dtype=torch.float16)
    block = torch.arange(tokens // 64, device=CUDA)
    ranks.masked_fill_((block > own[..., None]), -1.0)
    ranks.masked_fill_((block == 0) | ((block > own[..., None] - 2) & (block <= own[..., None])), 2)
    best = ranks.topk(slots, dim=-1)
    chosen = torch.where(best.values >= 0, best.indices, tokens).sort(-1).values  # -1 comes last
    return torch.where(chosen < tokens, chosen, -1).int()


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """``TimeoutError`` after so long: autotuning of a peer must not use up the run."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def forward_call(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Any:
    def call() -> torch.Tensor:
        with torch.no_grad():
            return function(*tensors)

    return call


def backward_call(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Any:
    """A backward pass that can be repeated, over the inputs that take part."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True, allow_unused=True)
    used = [x for x, grad in zip(leaves, first, strict=True) if grad is not None]

    def call() -> object:
        return torch.autograd.grad(out, used, dout, retain_graph=True)

    return call


def peak_mib(tensors: list[torch.Tensor]) -> dict[str, float]:
    """Peak memory of our passes beyond inputs, outputs and the gradients of both, MiB."""
    found = {}
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        out = nsa_attention(*tensors)
    size = out.numel() * out.element_size()
    found["forward"] = (torch.cuda.max_memory_allocated() - base - size) / 2**20
    del out
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = nsa_attention(*leaves)
    dout = torch.randn_like(out)
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, leaves, dout)
    kept = sum(x.numel() * x.element_size() for x in (out, dout, *leaves))
    found["backward"] = (torch.cuda.max_memory_allocated() - base - kept) / 2**20
    return found


def measure(
    case: dict[str, Any], limit_s: int, budget_ms: float, add: Callable[[Row], None]
) -> None:
    """Rows of one case: forward, backward, selected branch."""
    heads, kv_heads = (int(x) for x in case["case"].split(":")[0].split("x"))
    length, kind = case["case"].split(":")[1], case.get("queries", "random")
    tokens = int(length.removesuffix("k")) * (1024 if length.endswith("k") else 1)
    checked = gate(heads, kv_heads, kind)
    tensors = inputs(heads, kv_heads, tokens, kind)
    peaks = peak_mib(tensors)
    for what in ("forward", "backward", "selected"):
        if what not in case:
            continue
        wanted, bars = case[what]["peers"], case[what].get("bars", {})
        loaders = nsa_peers.SELECTED if what == "selected" else nsa_peers.WHOLE
        used = [*tensors[:3], random_selection(tokens, kv_heads)] if what == "selected" else tensors
        make = backward_call if what == "backward" else forward_call
        ours = selected_attention if what == "selected" else nsa_attention
        row = Row(f"nsa_{what}", f"{heads}x{kv_heads} {kind}", f"q{length}", OURS, "ok", checked)
        rows, timed = [], []
        for name in (OURS, *wanted):
            note = NO_WINDOW if name in nsa_peers.SPARSE and what != "selected" else ""
            one = dataclasses.replace(row, provider=name, note=note)
            if name == OURS:
                one = dataclasses.replace(one, peak_mib=peaks.get(what))
            else:
                one = dataclasses.replace(one, detail="")
            try:
                with time_limit(600 if name == OURS else limit_s):
                    function = ours if name == OURS else loaders[name](*tensors[:2])
                    call = make(function, used)
                    call()
                    torch.cuda.synchronize()
                timed.append(
                    make_timed(
                        call, timing="cold", device=CUDA, graph=name in case[what].get("graph", [])
                    )
                )
            except Exception as problem:  # a peer that cannot run this case is a row of its own
                if name == OURS:
                    raise
                status = "unavailable" if isinstance(problem, Unavailable) else "error"
                text = f"{type(problem).__name__}: {str(problem).splitlines()[:1]}"[:160]
                add(dataclasses.replace(one, status=status, detail=text))
                continue
            rows.append(one)
        times = time_interleaved(timed, device=CUDA, budget_ms=budget_ms, min_samples=5)
        found = {}
        for one, time in zip(rows, times, strict=True):
            found[one.provider] = time.median_ms
            add(
                dataclasses.replace(
                    one,
                    ms=time.median_ms,
                    p20_ms=time.p20_ms,
                    p80_ms=time.p80_ms,
                    samples=time.samples,
                    method=time.method,
                )
            )
        for name, bar in bars.items():
            peers = [ms for peer, ms in found.items() if peer == name]
            if name == "best":
                peers = [ms for peer, ms in found.items() if peer in nsa_peers.SPARSE]
            if peers:
                ratio = min(peers) / found[OURS]
                verdict = "met" if ratio >= bar else "NOT met"
                print(f"{row.op} {row.case} {row.spec}: {ratio:.2f} x {name}, bar {bar}: {verdict}")
        del timed, rows
        torch.cuda.empty_cache()


def measure_kernels(case: dict[str, Any], add: Callable[[Row], None]) -> None:
    """Time of every kernel of one forward and one backward pass, over all its launches."""
    heads, kv_heads = (int(x) for x in case["case"].split(":")[0].split("x"))
    length, kind = case["case"].split(":")[1], case.get("queries", "random")
    tokens = int(length.removesuffix("k")) * (1024 if length.endswith("k") else 1)
    leaves = [x.requires_grad_() for x in inputs(heads, kv_heads, tokens, kind)]
    for turn in range(2):  # the first pass compiles
        dout = torch.randn_like(leaves[0])
        for what in ("forward", "backward"):
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                if what == "forward":
                    out = nsa_attention(*leaves)
                else:
                    torch.autograd.grad(out, leaves, dout)
                torch.cuda.synchronize()
            if turn == 0:
                continue
            spent = {x.key: x.device_time_total / 1e3 for x in seen.key_averages()}
            spent["all kernels"] = sum(spent.values())
            for kernel, ms in sorted(spent.items(), key=lambda item: -item[1]):
                if ms > 0.005:
                    op, name = f"nsa_{what} kernels", f"{heads}x{kv_heads} {kind}"
                    add(Row(op, name, f"q{length}", kernel[:70], "ok", ms=ms, method="profiler"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--yaml", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--only", action="append", help="cases, CASE or CASE@correlated")
    parser.add_argument("--kernels", action="store_true", help="time of each kernel instead")
    parser.add_argument("--csv", type=Path, help="rewritten after every row")
    parser.add_argument("--commit", help="commit to note, where the checkout is none")
    parser.add_argument("--limit-s", type=int, default=120, help="for a peer's first call")
    parser.add_argument("--budget-ms", type=float, default=2000, help="of one comparison")
    args = parser.parse_args()
    machine = dataclasses.asdict(describe_machine(CUDA))
    machine["commit"] = args.commit or machine["commit"]
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(dataclasses.replace(row, **machine))
        ms = "" if row.ms is None else f"{row.ms:10.3f} ms"
        print(f"{row.op:22} {row.case:17} {row.spec:6} {row.provider:50} {ms} {row.status}")
        if row.status != "ok":
            print("   ", row.detail)
        if args.csv:
            write_csv(args.csv, rows)

    for case in yaml.safe_load(args.yaml.read_text(encoding="utf-8")):
        kind = case.get("queries", "random")
        name = case["case"] if kind == "random" else f"{case['case']}@{kind}"
        if args.only and name not in args.only:
            continue
        if args.kernels:
            measure_kernels(case, add)
        else:
            measure(case, args.limit_s, args.budget_ms, add)


if __name__ == "__main__":
    main()
