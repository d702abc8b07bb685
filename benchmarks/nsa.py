"""Native sparse attention against its peers on one GPU: whole passes, selected branch, memory.

    python benchmarks/nsa.py --csv nsa.csv                    # every row of comparisons/nsa.yaml
    python benchmarks/nsa.py --only "forward 64x4:64k" --kernels kernels.csv

Ours is checked against the fp64 oracle at the case's heads first, and a failed check stops the run.
All implementations of a case are timed in turn, one call of each after the other, with a cold L2
(``sparsek_backend.bench.timing``).  Peers that cannot run are rows without a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import nsa_peers
import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from sparsek_backend.bench.registry import OURS, Unavailable
from sparsek_backend.bench.results import Row, read_csv, write_csv
from sparsek_backend.bench.timing import make_timed, time_interleaved
from sparsek_backend.machine import describe_machine
from sparsek_kernels import nsa_attention, selected_attention

DIM = 128
CUDA = torch.device("cuda")
NO_WINDOW = "no window branch"
Call = Callable[[], object]


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


Tensors = Mapping[str, torch.Tensor]
"""Arguments of an attention function by name."""


def as_leaves(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Copies that take gradients."""
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def worst_error(
    what: str, leaves: Tensors, out: torch.Tensor, exact: Tensors, want: torch.Tensor
) -> str:
    """Stop unless an output and the gradients of its leaves agree with fp64; the worst error."""
    upstream = torch.randn_like(out)
    have = [out, *torch.autograd.grad(out, list(leaves.values()), upstream)]
    need = [want, *torch.autograd.grad(want, list(exact.values()), upstream.double())]
    worst = 0.0
    for name, x, y in zip(("out", *(f"d{x}" for x in leaves)), have, need, strict=True):
        error = float((x.detach().double() - y.detach()).norm() / y.detach().norm())
        if not error < 1e-2:
            raise SystemExit(f"{what}: {name} is off by {error:.2e} (relative)")
        worst = max(worst, error)
    return f"worst relative error {worst:.1e}, bound 1e-2"


def check_nsa(what: str, tensors: Tensors, **sizes: int) -> str:
    """Stop unless our attention agrees with fp64, the blocks being those it chose itself."""
    leaves = as_leaves(tensors)
    out, indices = nsa_attention(**leaves, **sizes, return_block_indices=True)
    exact = as_leaves({name: x.double() for name, x in tensors.items()})
    want = nsa_attention(**exact, **sizes, block_indices=indices)  # in torch
    return worst_error(what, leaves, out, exact, want)


@cache
def gate(heads: int, kv_heads: int) -> str:
    """Stop unless a short call of so many heads agrees with fp64; the worst error."""
    names = ("q", "k", "v", "g_cmp", "g_slc", "g_swa")
    tensors = inputs(heads, kv_heads, 1280, "random")
    return check_nsa(f"{heads}x{kv_heads}", dict(zip(names, tensors, strict=True)))


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


def forward_call(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Call:
    def call() -> torch.Tensor:
        with torch.no_grad():
            return function(*tensors)

    return call


def backward_call(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Call:
    """A backward pass that can be repeated, over the inputs that take part."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True, allow_unused=True)
    used = [x for x, grad in zip(leaves, first, strict=True) if grad is not None]

    def call() -> object:
        return torch.autograd.grad(out, used, dout, retain_graph=True)

    return call


def peak_mib(op: str, tensors: list[torch.Tensor]) -> float | None:
    """Peak memory of our pass beyond inputs, output and the gradients of both, MiB."""
    if op == "selected":
        return None
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    leaves = [x.detach().requires_grad_(op == "backward") for x in tensors]
    kept = [nsa_attention(*leaves)]
    if op == "backward":
        kept += [torch.randn_like(kept[0]), *leaves]
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(kept[0], leaves, kept[1])
    size = sum(x.numel() * x.element_size() for x in kept)
    return (torch.cuda.max_memory_allocated() - base - size) / 2**20


@dataclass(frozen=True)
class Comparison:
    """One line of the YAML file: an operation of one case, and whom to time beside ours."""

    op: str
    case: str
    peers: list[str]
    queries: str = "random"
    bars: dict[str, float] = field(default_factory=dict)
    graph: list[str] = field(default_factory=list)

    @property
    def heads(self) -> tuple[int, int]:
        """Query and KV heads."""
        heads, kv_heads = self.case.split(":")[0].split("x")
        return int(heads), int(kv_heads)

    @property
    def tokens(self) -> int:
        length = self.case.split(":")[1]
        return int(length.removesuffix("k")) * (1024 if length.endswith("k") else 1)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return inputs(*self.heads, self.tokens, self.queries)

    def row(self, op: str) -> Row:
        """An empty row of this case."""
        heads, length = self.case.split(":")
        return Row(op, f"{heads} {self.queries}", f"q{length}", OURS, "ok")

    def verdicts(self, found: dict[str, float]) -> list[str]:
        """Each bar beside the speed-up of ours."""
        said = []
        for name, bar in self.bars.items():
            sparse = nsa_peers.SPARSE if name == "best" else {name}
            times = [ms for peer, ms in found.items() if peer in sparse]
            if times and OURS in found:
                ratio = min(times) / found[OURS]
                verdict = "met" if ratio >= bar else "NOT met"
                said.append(f"{self.op} {self.case}: {ratio:.2f} x {name}, bar {bar}: {verdict}")
        return said


def selection(one: Comparison, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Evenly drawn blocks, or those that correlated queries choose."""
    if one.queries == "random":
        return random_selection(one.tokens, one.heads[1])
    with torch.no_grad():
        _, chosen = nsa_attention(*tensors, return_block_indices=True)
    return chosen


def provider_call(one: Comparison, name: str, tensors: list[torch.Tensor]) -> Call:
    """What is timed, run once: compiled, tuned, and able to run this case."""
    if name == OURS:
        function = selected_attention if one.op == "selected" else nsa_attention
    else:
        loaders = nsa_peers.SELECTED if one.op == "selected" else nsa_peers.WHOLE
        function = loaders[name](*tensors[:2])
    call = (backward_call if one.op == "backward" else forward_call)(function, tensors)
    call()
    torch.cuda.synchronize()
    return call


def measure(one: Comparison, args: argparse.Namespace, add: Callable[[Row], None]) -> None:
    """Rows of one comparison."""
    alone = args.once and bool(args.peers)
    checked = "" if alone else gate(*one.heads)
    tensors = one.tensors
    peak = None if alone else peak_mib(one.op, tensors)
    if one.op == "selected":
        tensors = [*tensors[:3], selection(one, tensors)]
    rows, timed = [], []
    for name in one.peers if alone else (OURS, *one.peers):
        note = NO_WINDOW if name in nsa_peers.SPARSE and one.op != "selected" else ""
        row = dataclasses.replace(one.row(f"nsa_{one.op}"), provider=name, note=note)
        if name == OURS:
            row = dataclasses.replace(row, detail=checked, peak_mib=peak)
        try:
            with time_limit(600 if name == OURS else args.limit_s):
                call = provider_call(one, name, tensors)
        except Exception as problem:  # a peer that cannot run this case is a row of its own
            if name == OURS:
                raise
            status = "unavailable" if isinstance(problem, Unavailable) else "error"
            text = f"{type(problem).__name__}: {str(problem)[:120]}"
            add(dataclasses.replace(row, status=status, detail=text))
            continue
        rows.append(row)
        timed.append(make_timed(call, timing="cold", device=CUDA, graph=name in one.graph))
    if args.once:
        return
    taken = time_interleaved(timed, device=CUDA, budget_ms=args.budget_ms, min_samples=5)
    for row, timing in zip(rows, taken, strict=True):
        spread = {"p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "samples": timing.samples}
        add(dataclasses.replace(row, ms=timing.median_ms, method=timing.method, **spread))
    found = {row.provider: timing.median_ms for row, timing in zip(rows, taken, strict=True)}
    print(*one.verdicts(found), sep="\n", flush=True)


def measure_kernels(one: Comparison, add: Callable[[Row], None]) -> None:
    """Time of every kernel of one pass, over all its launches."""
    leaves = [x.requires_grad_(one.op == "backward") for x in one.tensors]
    call = (backward_call if one.op == "backward" else forward_call)(nsa_attention, leaves)
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    spent = {x.key: x.device_time_total / 1e3 for x in seen.key_averages()}
    spent["all kernels"] = sum(spent.values())
    row = one.row(f"nsa_{one.op} kernels")
    for kernel, ms in sorted(spent.items(), key=lambda item: -item[1]):
        if ms > 0.005:
            add(dataclasses.replace(row, provider=kernel[:70], ms=ms, method="profiler"))


COMPARISONS = Path(__file__).parent / "comparisons" / "nsa.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--yaml", type=Path, default=COMPARISONS)
    parser.add_argument("--only", action="append", help="comparisons, as `forward 64x4:64k`")
    parser.add_argument("--peers", help="these peers alone, comma-separated")
    parser.add_argument("--kernels", type=Path, help="CSV for the time of each kernel of ours, too")
    parser.add_argument("--once", action="store_true", help="run each once, to compile it; with "
                        "--peers, these alone")  # fmt: skip
    parser.add_argument("--csv", type=Path, help="rows are added to those that it holds")
    parser.add_argument("--commit", default="", help="to record where there is no git")
    parser.add_argument("--limit-s", type=int, default=120, help="for a peer's first call")
    parser.add_argument("--budget-ms", type=float, default=2000, help="of one comparison")
    args = parser.parse_args()
    peers = None if args.peers is None else args.peers.split(",")
    unknown = set(peers or ()) - set(nsa_peers.WHOLE)
    if unknown:
        parser.error(f"--peers: expected some of {', '.join(nsa_peers.WHOLE)}, got {args.peers!r}")
    begin = time.perf_counter()
    machine = dataclasses.asdict(describe_machine(CUDA, args.commit))

    def add(row: Row, path: Path | None = args.csv) -> None:
        row = dataclasses.replace(row, **machine)
        ms = row.status if row.ms is None else f"{row.ms:10.3f} ms"
        at = time.perf_counter() - begin
        name = f"{row.op:20} {row.case:17} {row.spec:6} {row.provider}"
        print(f"{at:6.1f} s  {name:60} {ms}  {row.detail}", flush=True)
        if path:
            write_csv(path, [*(read_csv(path) if path.exists() else ()), row])

    chosen = []
    for fields in yaml.safe_load(args.yaml.read_text(encoding="utf-8")):
        one = Comparison(**fields)
        if peers is not None:
            one = dataclasses.replace(one, peers=[x for x in one.peers if x in peers])
        if not args.only or f"{one.op} {one.case}" in args.only:
            chosen.append(one)
    if not chosen:
        parser.error(f"--only: expected comparisons of {args.yaml}, got {args.only}")
    for one in chosen:
        measure(one, args, add)
        torch.cuda.empty_cache()
    for one in chosen if args.kernels else ():
        if one.op != "selected":
            measure_kernels(one, partial(add, path=args.kernels))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
