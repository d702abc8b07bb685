"""Cases of sink-window attention and the error rule that every implementation must meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from sparsek_kernels.sink_window import launch
from sparsek_kernels.sink_window.config import LaunchConfig, ProblemShape, TileConfig, select_config
from sparsek_kernels.sink_window.problem import KeyTerms, SinkWindowProblem
from sparsek_kernels.sink_window.spec import AttentionSpec
from tests.kernels.sink_window.reference import sink_flash_attention_reference


@dataclass(frozen=True)
class Case:
    """One problem; ``lens`` are (query, key) lengths of packed sequences."""

    nq: int = 64
    nk: int = 64
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    batch: int = 1
    num_sink: int = 0
    window: int | None = None
    causal: bool = True
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    lens: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        size = f"{self.batch}x{self.nq}-{self.nk}" if not self.lens else f"varlen{len(self.lens)}"
        mask = "full" if not self.causal else f"s{self.num_sink}w{self.window}"
        name = str(self.dtype).removeprefix("torch.")
        extra = "-sinks" if self.sinks else ""
        return f"{size}-h{self.heads}.{self.kv_heads}-d{self.dim}-{mask}-{name}{extra}"


@dataclass
class Tensors:
    """Inputs of a case and the upstream gradients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    dout: torch.Tensor
    dlse: torch.Tensor


def _poisoned(shape: tuple[int, int, int, int], case: Case, device: str) -> torch.Tensor:
    """A random ``[B, N, H, D]`` view whose surroundings in memory are NaN."""
    batch, tokens, heads, dim = shape
    holder = torch.full(
        (batch, tokens + 3, heads + 1, dim + 8), float("nan"), dtype=case.dtype, device=device
    )
    view = holder[:, :tokens, :heads, :dim]
    view.copy_(torch.randn(shape, device=device).to(case.dtype))
    return view


def _column(x: torch.Tensor) -> torch.Tensor:
    """The numbers of ``x`` as a column of a table, others between them."""
    return torch.stack((x, x + 5), dim=1)[:, 0]


def make(case: Case, device: str = "cpu", seed: int = 0) -> Tensors:
    """Random tensors of a case, drawn in its dtype, inside of NaN."""
    torch.manual_seed(seed)
    nq, nk, cu_q, cu_k = case.nq, case.nk, None, None
    if case.lens:
        edges = [[0, *accumulate(part)] for part in zip(*case.lens, strict=True)]
        nq, nk = edges[0][-1], edges[1][-1]
        cu_q, cu_k = (_column(torch.tensor(e, dtype=torch.int32, device=device)) for e in edges)
    q = _poisoned((case.batch, nq, case.heads, case.dim), case, device)
    k = _poisoned((case.batch, nk, case.kv_heads, case.dim), case, device)
    v = _poisoned((case.batch, nk, case.kv_heads, case.dim), case, device)
    dout = _poisoned((case.batch, nq, case.heads, case.dim), case, device)
    dlse = torch.randn(case.batch, case.heads, nq, device=device)
    sinks = _column(torch.randn(case.heads, device=device)) if case.sinks else None
    return Tensors(q, k, v, sinks, cu_q, cu_k, dout, dlse)


def oracle(case: Case, t: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output, LSE and gradients of the oracle in ``dtype``."""
    found = sink_flash_attention_reference(
        t.q,
        t.k,
        t.v,
        num_sink=case.num_sink,
        window_size=case.window,
        causal=case.causal,
        sinks=t.sinks,
        cu_seqlens_q=t.cu_q,
        cu_seqlens_k=t.cu_k,
        dtype=dtype,
        dout=t.dout,
        dlse=t.dlse,
    )
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), found, strict=False))


def problem_of(case: Case, t: Tensors) -> SinkWindowProblem:
    """A case as the launchers take it."""
    num_sink = case.num_sink if case.window is not None else 0
    spec = AttentionSpec(num_sink, case.window, case.causal, case.dim**-0.5)
    return SinkWindowProblem(t.q, t.k, t.v, spec, t.sinks, t.cu_q, t.cu_k)


def long_config(case: Case, arch: int) -> LaunchConfig:
    """The configuration of a long problem for a small one, so that its kernels are tested."""
    long = ProblemShape(
        1, 65536, 65536, case.heads, case.kv_heads, case.dim, case.num_sink if case.window else 0,
        case.window, case.causal, len(case.lens) or None,
    )  # fmt: skip
    config = select_config(long, case.dtype, arch)
    if config.hopper_backward is not None and config.hopper_forward is None:
        # A short window: not the faster kernel, but it has to be right.
        config = replace(config, hopper_forward=TileConfig(128, 128, 4, 2))
    return config


def kernels(
    case: Case, t: Tensors, config: LaunchConfig | None = None, terms: KeyTerms | None = None
) -> dict[str, torch.Tensor]:
    """Output, LSE and gradients of the kernels, every output poisoned with NaN first."""
    problem = problem_of(case, t)
    out = torch.full(t.q.shape, float("nan"), dtype=t.q.dtype, device=t.q.device)
    lse = torch.full(t.dlse.shape, float("nan"), device=t.q.device)
    launch.forward(problem, out, lse, config)
    dlse = t.dlse.masked_fill(lse == float("-inf"), 0.0)
    grads = launch.backward(problem, out, lse, t.dout, dlse, config, terms)
    found = dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), (out, lse, *grads), strict=True))
    return {name: x for name, x in found.items() if x is not None}


def problems(
    found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]
) -> list[str]:
    """What breaks the rule: at most twice the error of torch in the same dtype, by maximum and by
    root mean square."""
    bad = []
    for name, want in exact.items():
        got = found[name].double()
        empty = want == float("-inf")
        if name == "lse" and not torch.equal(got == float("-inf"), empty):
            bad.append(f"{name}: rows without keys differ")
            continue
        mine = (got - want).masked_fill(empty, 0.0)
        other = (plain[name].double() - want).masked_fill(empty, 0.0)
        if not torch.isfinite(mine).all():
            bad.append(f"{name}: {int((~torch.isfinite(mine)).sum())} values are not finite")
            continue
        if mine.numel() == 0:
            continue
        for kind, a, b in (
            ("max", mine.abs().max().item(), other.abs().max().item()),
            ("rms", mine.pow(2).mean().sqrt().item(), other.pow(2).mean().sqrt().item()),
        ):
            floor = 1e-5 if kind == "max" else 2e-6
            if a > 2 * b + floor:
                bad.append(f"{name}: {kind} error {a:.2e}, torch {b:.2e}")
    return bad


def check(case: Case, device: str = "cpu", config: LaunchConfig | None = None) -> None:
    """Assert the rule for every output of the kernels."""
    t = make(case, device)
    found = kernels(case, t, config)
    bad = problems(found, oracle(case, t, torch.float64), oracle(case, t, case.dtype))
    assert not bad, f"{case}: " + "; ".join(bad)


def check_terms(case: Case, device: str = "cpu", config: LaunchConfig | None = None) -> None:
    """Assert that some rows of ``dk`` and ``dv`` come unrounded too, and only rounded differ."""
    t = make(case, device)
    keys = torch.randperm(t.k.shape[1])[: -(-t.k.shape[1] // 3)]
    slots = torch.full((t.k.shape[1],), -1, dtype=torch.int32)
    slots[keys] = torch.arange(len(keys), dtype=torch.int32)
    shape = (2, t.k.shape[0], len(keys), *t.k.shape[2:])
    terms = KeyTerms(slots.to(device), torch.full(shape, float("nan"), device=device))
    found, alone = kernels(case, t, config, terms), kernels(case, t, config)
    assert all(torch.equal(found[name], x) for name, x in alone.items())
    for name, grads in zip(("dk", "dv"), terms.grads, strict=True):
        assert torch.equal(grads.to(case.dtype), found[name][:, keys.to(device)]), name
        if case.dtype != torch.float32:
            assert not torch.equal(grads, grads.to(case.dtype).float()), name
