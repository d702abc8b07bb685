"""Tensors of a case of sink + sliding-window attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sparsek_backend.bench.oracle import MaskRule
from sparsek_backend.bench.registry import Case


@dataclass(frozen=True)
class Inputs:
    """One case's tensors.  Varlen batches are packed: B = 1 and cumulative lengths."""

    q: torch.Tensor  # [B, N, Hq, D]
    k: torch.Tensor  # [B, M, Hkv, D]
    v: torch.Tensor  # [B, M, Hkv, D]
    dout: torch.Tensor  # [B, N, Hq, D]
    sinks: torch.Tensor | None  # [Hq] learned logits, or None
    cu_q: torch.Tensor  # [R + 1] int32
    cu_k: torch.Tensor  # [R + 1] int32
    rule: MaskRule  # the mask
    packed: bool  # whether the batch is packed (B = 1, several requests)
    query_lens: tuple[int, ...]  # query tokens of each request
    seq_lens: tuple[int, ...]  # keys of each request

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    @property
    def softmax_scale(self) -> float:
        return float(self.q.shape[3] ** -0.5)

    def with_grad(self) -> Inputs:
        given = {"q": self.q, "k": self.k, "v": self.v, "sinks": self.sinks}
        leaves: dict[str, Any] = {
            name: x.detach().requires_grad_() for name, x in given.items() if x is not None
        }
        return replace(self, **leaves)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    window = None if case.params["window_size"] is None else case.int_param("window_size")
    rule = MaskRule(case.int_param("num_sink"), window, bool(case.params["causal"]))
    return draw_inputs(case, rule, device, learned_sinks=bool(case.params["learned_sinks"]))


def draw_inputs(
    case: Case, rule: MaskRule, device: torch.device, *, learned_sinks: bool = False
) -> Inputs:
    """Random tensors of a case's heads, lengths and dtype under a mask."""
    spec = case.spec
    packed = not spec.is_uniform
    heads, kv_heads = case.int_param("num_heads"), case.int_param("num_kv_heads")
    dim, dtype = case.int_param("head_dim"), case.dtype()
    if heads % kv_heads:
        raise ValueError(f"num_heads: expected a multiple of {kv_heads} KV heads, got {heads}")
    batch = 1 if packed else spec.num_requests
    queries = sum(spec.query_lens) if packed else spec.query_lens[0]
    keys = sum(spec.seq_lens) if packed else spec.seq_lens[0]
    generator = torch.Generator(device=device).manual_seed(case.int_param("seed"))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
        ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ends.to(device)

    return Inputs(
        q=draw(batch, queries, heads, dim),
        k=draw(batch, keys, kv_heads, dim),
        v=draw(batch, keys, kv_heads, dim),
        dout=draw(batch, queries, heads, dim),
        sinks=draw(heads).float() if learned_sinks else None,
        cu_q=cumulative(spec.query_lens),
        cu_k=cumulative(spec.seq_lens),
        rule=rule,
        packed=packed,
        query_lens=spec.query_lens,
        seq_lens=spec.seq_lens,
    )
