"""A training step with native sparse attention against its dense twin's, on one GPU.

    python benchmarks/nsa_training_step.py --csv step.csv                 # 8k tokens, both shapes
    python benchmarks/nsa_training_step.py --case 32x8 --tokens 8192 --tokens 32768
    python benchmarks/nsa_training_step.py --toy --tokens 320             # seconds on a CPU

The model has the layers of Llama-3.2-1B (16 of 2048, MLP of 8192) and its heads (32 and 8 of 64) or
64 and 4 of 128, and a smaller vocabulary.  Its twin has the same weights, gates excepted: one K and
V for all branches, compressed to means.  A step is forward, backward and AdamW, all in bf16, with
nothing recomputed or compiled: called from Python, and replayed from a CUDA graph, which launches
nothing from the host.  Weights and tokens are random, and so is the choice of blocks.

The twin has the fastest dense attention that can go backward, found by one layer's attention at
the same length: cuDNN's, FlashAttention-2's (both torch's) or FlashAttention-3's, where
``flash_attn_interface`` is installed.  vLLM's FlashAttention-3 only goes forward; on Hopper cuDNN's
attention stands for it.  Each is first held against fp64, outputs and gradients, and a failed check
stops the run.  Peak memory is beyond weights and optimiser.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nsa_peers
import torch
from nsa import Call, Tensors, as_leaves, check_nsa, worst_error
from torch import nn

from sparsek_backend.bench.registry import OURS, Unavailable
from sparsek_backend.bench.results import Row, read_csv, write_csv
from sparsek_backend.bench.timing import Timing, make_timed, time_interleaved
from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.nn import NativeSparseAttention, NSAConfig, NSALlamaConfig, NSALlamaForCausalLM
from sparsek_backend.nn.rotary import rotate
from sparsek_kernels import nsa_attention, sink_flash_attention

SHAPES = {"32x8": (32, 8, 64), "64x4": (64, 4, 128)}
"""Query heads, KV heads and head size."""
CHECKED = 1280
"""Tokens of the check: more than a query selects."""


def flash_attention_3(q: torch.Tensor, k: torch.Tensor) -> nsa_peers.Provider:
    """FlashAttention-3 of its own package, which has a backward pass."""
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError as error:
        raise Unavailable(f"flash_attn_interface: {error}") from error

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(q, k, v, causal=True)
        return out[0] if isinstance(out, tuple) else out  # earlier versions add the log-sum-exp

    return run


DENSE: dict[str, nsa_peers.Loader] = {
    "fa3": flash_attention_3, "cudnn": nsa_peers.cudnn, "fa2": nsa_peers.fa2,
}  # fmt: skip
"""Dense causal attention with a backward pass, by name."""


class DenseAttention(nn.Module):
    """Causal attention with the projections and the rotary embedding of a natively sparse layer."""

    def __init__(self, layer: NativeSparseAttention, attend: nsa_peers.Provider) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = layer.q_proj, layer.k_proj, layer.v_proj
        self.o_proj, self.head_dim = layer.o_proj, layer.head_dim
        self.theta, self.attend = layer.config.rope_theta, attend

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        """``[B, N, hidden]`` to the same shape."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in projections)
        at = torch.arange(x.shape[1], device=x.device)
        out = self.attend(rotate(q, at, self.theta), rotate(k, at, self.theta), v)
        return self.o_proj(out.flatten(2))


def sparse_model(case: str, vocab: int, *, toy: bool, device: torch.device) -> NSALlamaForCausalLM:
    """The natively sparse model of a case, of random weights."""
    heads, kv_heads, dim = (4, 2, 16) if toy else SHAPES[case]
    config = NSALlamaConfig(
        vocab_size=vocab,
        hidden_size=64 if toy else 2048,
        intermediate_size=128 if toy else 8192,
        num_hidden_layers=2 if toy else 16,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        tie_word_embeddings=True,
        nsa=NSAConfig(compression="mean", shared_kv=True, rope_theta=500000.0),
    )
    with device:
        return NSALlamaForCausalLM(config).bfloat16()


def dense_twin(model: NSALlamaForCausalLM, attend: nsa_peers.Provider) -> NSALlamaForCausalLM:
    """A copy of the model that attends to everything."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        layer.self_attn = DenseAttention(layer.self_attn, attend)
    return twin


def layer_inputs(model: NSALlamaForCausalLM, tokens: int) -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors and sizes with which the first layer calls the attention, for random states."""
    layer = model.model.layers[0].self_attn
    weight = model.lm_head.weight
    with torch.no_grad():
        states = torch.randn(1, tokens, weight.shape[1], device=weight.device, dtype=weight.dtype)
        given = layer.attention_inputs(states)
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    del tensors["k_swa"], tensors["v_swa"]  # the very k and v
    return tensors, {name: x for name, x in given.items() if isinstance(x, int)}


def check_dense(what: str, attend: nsa_peers.Provider, tensors: Tensors) -> str:
    """Stop unless dense attention agrees with fp64; the worst error."""
    leaves = as_leaves(tensors)
    exact = as_leaves({name: x.double() for name, x in tensors.items()})
    return worst_error(what, leaves, attend(**leaves), exact, sink_flash_attention(**exact))


def attention_call(attend: Callable[..., torch.Tensor], tensors: Tensors) -> Call:
    """Forward and backward of one layer's attention, run once."""
    leaves = as_leaves(tensors)
    upstream = torch.randn_like(tensors["q"])

    def call() -> object:
        return torch.autograd.grad(attend(**leaves), list(leaves.values()), upstream)

    call()
    return call


def step_call(
    model: NSALlamaForCausalLM, ids: torch.Tensor, *, capturable: bool = False
) -> Callable[[], torch.Tensor]:
    """A training step, which returns the loss; run once, so that the optimiser has its state."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=capturable)

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        return loss.detach()

    step()
    return step


class GraphStep:
    """A training step captured in a CUDA graph; its loss is that of the latest replay."""

    def __init__(self, model: NSALlamaForCausalLM, ids: torch.Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            self.step = step_call(model, ids, capturable=True)  # its optimiser has to live on
            self.step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.step()

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.loss


def peak_mib(step: Call, device: torch.device) -> float | None:
    """Peak memory of a step beyond what is there before it, MiB."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def timed_row(row: Row, timing: Timing) -> Row:
    """A row with its time."""
    spread = {"p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "samples": timing.samples}
    return dataclasses.replace(row, ms=timing.median_ms, method=timing.method, **spread)


def measure(
    case: str,
    tokens: int,
    args: argparse.Namespace,
    device: torch.device,
    add: Callable[[Row], None],
) -> None:
    """Rows of one layer's attention by all, then of the step by ours and the fastest dense one."""
    torch.manual_seed(0)
    model = sparse_model(case, args.vocab, toy=args.toy, device=device)
    layer = model.model.layers[0].self_attn
    heads = f"{layer.num_heads}x{layer.num_kv_heads}"
    params = f"layers={len(model.model.layers)} head_dim={layer.head_dim} vocab={args.vocab}"
    spec = f"q{tokens // 1024}k" if tokens % 1024 == 0 else f"q{tokens}"
    row = Row("nsa_training_attention", heads, spec, OURS, "ok", params=params)
    short, sizes = layer_inputs(model, CHECKED)
    tensors, _ = layer_inputs(model, tokens)
    details = {OURS: check_nsa(f"{OURS} {heads}", short, **sizes)}
    calls = {OURS: attention_call(partial(nsa_attention, **sizes), tensors)}
    short, tensors = ({name: x[name] for name in ("q", "k", "v")} for x in (short, tensors))
    dense = {}
    for name, load in DENSE.items():
        try:
            dense[name] = load(tensors["q"], tensors["k"])
            calls[name] = attention_call(dense[name], tensors)
        except Exception as problem:  # what cannot run here is a row of its own
            status = "unavailable" if isinstance(problem, Unavailable) else "error"
            text = f"{type(problem).__name__}: {str(problem)[:120]}"
            add(dataclasses.replace(row, provider=name, status=status, detail=text))
            continue
        details[name] = check_dense(f"{name} {heads}", dense[name], short)
    time = partial(time_interleaved, device=device, budget_ms=args.budget_ms, min_samples=5)
    cold = partial(make_timed, timing="cold", device=device, graph=False)
    taken = dict(zip(calls, time([cold(call) for call in calls.values()]), strict=True))
    for name, timing in taken.items():
        found = dataclasses.replace(row, provider=name, detail=details[name])
        add(timed_row(found, timing))
    best = min(taken.keys() & DENSE.keys(), key=lambda name: taken[name].median_ms, default=None)
    if best is None:
        raise SystemExit("no dense attention with a backward pass runs here")
    del calls, tensors, short

    ids = torch.randint(args.vocab, (1, tokens), device=device)
    models = {OURS: model, best: dense_twin(model, dense[best])}
    ways: dict[str, Callable[..., Callable[[], torch.Tensor]]] = {"nsa_training_step": step_call}
    if device.type == "cuda":
        ways["nsa_training_graph"] = GraphStep
    for op, way in ways.items():
        steps = {name: way(x, ids) for name, x in models.items()}
        peaks: dict[str, float | None] = {}
        if way is step_call:  # a graph has its memory from the beginning
            peaks = {name: peak_mib(step, device) for name, step in steps.items()}
        taken = dict(zip(steps, time([cold(step) for step in steps.values()]), strict=True))
        for name, timing in taken.items():
            loss = float(steps[name]())
            if not loss < float("inf"):
                raise SystemExit(f"{name} {heads}: expected a finite loss, got {loss}")
            found = dataclasses.replace(
                row, op=op, provider=name, detail=details[name], peak_mib=peaks.get(name)
            )
            add(timed_row(found, timing))
        ratio = taken[best].median_ms / taken[OURS].median_ms
        verdict = "met" if ratio > 1 else "NOT met"
        print(f"{op} {heads} {spec}: {ratio:.2f} x {best}, bar 1: {verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=SHAPES, help="heads; default: all")
    parser.add_argument("--tokens", action="append", type=int, help="repeatable; default: 8192")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--toy", action="store_true", help="two layers of 64, for a CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--csv", type=Path, help="rows are added to those that it holds")
    parser.add_argument("--commit", default="", help="to record where there is no git")
    parser.add_argument("--budget-ms", type=float, default=2000, help="of one comparison")
    args = parser.parse_args()
    device = choose_device(args.device)
    machine = dataclasses.asdict(describe_machine(device, args.commit))

    def add(row: Row) -> None:
        row = dataclasses.replace(row, **machine)
        ms = row.status if row.ms is None else f"{row.ms:10.3f} ms"
        print(
            f"{row.op:23} {row.case:5} {row.spec:5} {row.provider:8} {ms}  {row.detail}", flush=True
        )
        if args.csv:
            write_csv(args.csv, [*(read_csv(args.csv) if args.csv.exists() else ()), row])

    for case in args.case or (["32x8"] if args.toy else SHAPES):
        for tokens in args.tokens or [8192]:
            measure(case, tokens, args, device, add)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
