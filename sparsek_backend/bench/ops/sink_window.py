"""Sink + sliding-window attention, forward and backward, against what people use today."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import sparsek_kernels
from sparsek_backend.bench.ops import peers
from sparsek_backend.bench.ops.peers import Call
from sparsek_backend.bench.ops.sink_window_inputs import Inputs, make_inputs
from sparsek_backend.bench.oracle import Mask, MaskRule, attend_head, compare
from sparsek_backend.bench.registry import HEADS, OURS, BenchOp, Case, GateResult, Outputs, Provider

DEFAULTS = HEADS | {
    "num_sink": 0,
    "window_size": None,
    "causal": True,
    "learned_sinks": False,
    "seed": 0,
}

WINDOW_ALONE = "window without the sinks"


def pick_requests(inputs: Inputs) -> list[tuple[int, int]]:
    """(request, KV head) pairs that the gate checks: all when small, else a few spread out."""
    requests, heads = len(inputs.query_lens), inputs.k.shape[2]
    if requests * heads <= 8 and sum(inputs.seq_lens) <= 4096:
        return [(r, h) for r in range(requests) for h in range(heads)]
    if requests == 1:
        return [(0, heads - 1)]
    return [(0, 0), (requests // 2, heads // 2), (requests - 1, heads - 1)]


def _request(
    tensor: torch.Tensor, cumulative: torch.Tensor, inputs: Inputs, index: int
) -> torch.Tensor:
    """[tokens, H, D] of one request."""
    if not inputs.packed:
        return tensor[index]
    start, end = int(cumulative[index]), int(cumulative[index + 1])
    return tensor[0, start:end]


class Oracle:
    """Exact and plain-torch results of the checked heads, computed once per mask."""

    def __init__(self, inputs: Inputs, *, backward: bool) -> None:
        self.inputs = inputs
        self.backward = backward
        self.picks = pick_requests(inputs)
        self.results = functools.lru_cache(maxsize=2)(self._results)

    def _results(self, rule: Mask, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        return [self._head(rule, dtype, request, head) for request, head in self.picks]

    def _head(self, rule: Mask, dtype: torch.dtype, request: int, head: int) -> list[torch.Tensor]:
        """The output, or with `backward` the gradients, of a KV head's group."""
        inputs = self.inputs
        leaves = (inputs.q, inputs.k, inputs.v, *(() if inputs.sinks is None else (inputs.sinks,)))
        q, k, v, *sinks = self._of_head(leaves, request, head)
        (dout,) = self._of_head((inputs.dout,), request, head) if self.backward else (None,)
        out, *grads = attend_head(
            q,
            k,
            v,
            rule.of_head(head),
            dtype=dtype,
            softmax_scale=inputs.softmax_scale,
            sinks=sinks[0] if sinks else None,
            dout=dout,
            chunk=max(64, min(1024, (1 << 25) // max(inputs.seq_lens))),
        )
        return grads or [out]

    def gate(self, rule: Mask, outputs: Outputs) -> GateResult:
        """Check `(out,)` or `(dq, dk, dv[, dsinks])` in the layout of the inputs."""
        exact = self.results(rule, torch.float64)
        plain = self.results(rule, self.inputs.q.dtype)
        verdicts = []
        for (request, head), oracle, reference in zip(self.picks, exact, plain, strict=True):
            got = self._of_head(outputs, request, head)
            names = ("dq", "dk", "dv", "dsinks")[: len(got)] if self.backward else ("out",)
            if len(self.inputs.query_lens) > 1:  # of which `dsinks` is the sum
                names = names[:3]
            fields = (found[: len(names)] for found in (got, oracle, reference))
            verdicts.append(compare(names, *fields))
        failed = [verdict for verdict in verdicts if not verdict.passed]
        return failed[0] if failed else verdicts[-1]

    def _of_head(self, tensors: Outputs, request: int, head: int) -> list[torch.Tensor]:
        """What a KV head and its group have of `q, k, v, sinks`, or of the first of these."""
        inputs = self.inputs
        heads = slice(head * inputs.group, (head + 1) * inputs.group)
        queries = [_request(x, inputs.cu_q, inputs, request)[:, heads] for x in tensors[:1]]
        keys = [_request(x, inputs.cu_k, inputs, request)[:, head] for x in tensors[1:3]]
        return [*queries, *keys, *(x[heads] for x in tensors[3:])]


def cost(inputs: Inputs, rule: Mask, *, backward: bool) -> tuple[float, float]:
    """FLOPs (4 D a visible pair and query head, 2.5 times that backward) and least bytes."""
    lengths = zip(inputs.query_lens, inputs.seq_lens, strict=True)
    pairs = sum(rule.count_pairs(query_len, seq_len) for query_len, seq_len in lengths)
    heads, dim = inputs.q.shape[2:]
    flops = 4.0 * dim * heads * pairs * (2.5 if backward else 1.0)
    q_bytes, kv_bytes = (t.numel() * t.element_size() for t in (inputs.q, inputs.k))
    lse_bytes = inputs.q.numel() // dim * 4
    forward_bytes = 2 * q_bytes + 2 * kv_bytes + lse_bytes
    return flops, float(forward_bytes + 2 * q_bytes + 2 * kv_bytes if backward else forward_bytes)


def _ours(inputs: Inputs) -> Call:
    rule = inputs.rule
    cu_q, cu_k = (inputs.cu_q, inputs.cu_k) if inputs.packed else (None, None)
    call = functools.partial(
        sparsek_kernels.sink_flash_attention,
        inputs.q,
        inputs.k,
        inputs.v,
        num_sink=rule.num_sink,
        window_size=rule.window_size,
        causal=rule.causal,
        sinks=inputs.sinks,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
    )
    return Call(call)


@dataclass(frozen=True)
class Entry:
    """An implementation: its name, its call, its mask, and a note where that is not ours."""

    name: str
    make: Callable[[Inputs], Call]
    rule: Mask
    note: str = ""


def providers(inputs: Inputs, entries: Sequence[Entry], *, backward: bool) -> list[Provider]:
    """Providers over the same inputs, each gated against the oracle of what it computes."""
    oracle = Oracle(inputs, backward=backward)

    def provider(entry: Entry) -> Provider:
        flops, num_bytes = cost(inputs, entry.rule, backward=backward)
        views: list[Callable[[torch.Tensor], torch.Tensor]] = []

        def prepare() -> Callable[[], Outputs]:
            leaves = inputs.with_grad() if backward else inputs
            call = entry.make(leaves)
            if backward:
                out = call.view(call.run())
                wanted = [leaves.q, leaves.k, leaves.v]
                wanted += [] if leaves.sinks is None else [leaves.sinks]
                return lambda: torch.autograd.grad(out, wanted, leaves.dout, retain_graph=True)
            views.append(call.view)
            return lambda: (call.run(),)

        def gate(outputs: Outputs) -> GateResult:
            viewed = outputs if backward else tuple(views[-1](out) for out in outputs)
            return oracle.gate(entry.rule, viewed)

        return Provider(
            name=entry.name,
            prepare=prepare,
            gate=gate,
            flops=flops,
            bytes=num_bytes,
            note=entry.note,
            use_graph=not backward,
        )

    return [provider(entry) for entry in entries]


def _build(case: Case, device: torch.device, *, backward: bool) -> list[Provider]:
    inputs = make_inputs(case, device)
    rule = inputs.rule
    entries = [
        Entry(OURS, _ours, rule),
        Entry("sdpa", peers.sdpa, rule),
        Entry("sdpa_flash", peers.sdpa_flash, rule),
        Entry("sdpa_cudnn", peers.sdpa_cudnn, rule),
        Entry("sdpa_mask", peers.sdpa_mask, rule),
        Entry("flex", peers.flex, rule),
    ]
    if not backward:
        alone = MaskRule(0, rule.window_size, rule.causal)
        note = WINDOW_ALONE if rule.num_sink and rule.window_size is not None else ""
        entries.append(Entry("fa3", peers.fa3, alone, note))
    return providers(inputs, entries, backward=backward)


OPS = tuple(
    BenchOp(name, summary, DEFAULTS, functools.partial(_build, backward=backward))
    for name, summary, backward in (
        ("sink_window_fwd", "sink + sliding-window, causal and full attention, forward", False),
        ("sink_window_bwd", "the same, backward alone (dq, dk, dv and dsinks)", True),
    )
)
