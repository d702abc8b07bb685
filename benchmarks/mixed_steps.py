"""Time of one layer's attention in steps that mix decodes with a chunk of a prompt.

    python benchmarks/mixed_steps.py --json mixed_steps.json        # a GPU

Servers cut prompts into chunks and decode beside them.  No CUDA graph holds such steps, so the time
that the host takes to launch kernels counts.  Each step is run for the layers of a model: with
launches through Triton's JIT, with replayed ones (the same results, bit for bit, or exit status 1),
and through the FlashAttention-3 that vLLM ships, where there is one.  ``new_steps`` has the time of
whole steps of few layers, each planned anew for a longer context.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sparsek_backend.config import resolve_config
from sparsek_backend.machine import choose_device, describe_machine
from sparsek_kernels import PagedBatch, write_kv
from sparsek_kernels.paged import attend_segment, replay, summary_bytes
from sparsek_kernels.paged.api import default_indexers
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import plan_step

HEADS, KV_HEADS, DIM, PAGE, LAYERS = 32, 8, 128, 64, 32
REQUESTS, LONGEST = 12, 34816
STEPS = ((0, 1024, 16384), (0, 1024, 32768), (10, 1014, 32768), (10, 0, 0), (0, 8192, 32768))
"""Decodes, new tokens of a prompt, and its tokens so far."""
NEW_LAYERS = 8
"""Layers of a step that is planned anew, as a server's are: the first one's launches cost most."""


class Layer:
    """One layer's pages, filled with random keys and values, and steps over them."""

    def __init__(self) -> None:
        pages = REQUESTS * LONGEST // PAGE
        shape = (pages, KV_HEADS, PAGE, 2 * DIM)
        self.cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        size = summary_bytes(PAGE, DIM)
        self.summary = torch.zeros(pages, KV_HEADS, size, device="cuda", dtype=torch.uint8)
        self.keys, self.values = self.cache[..., :DIM], self.cache[..., DIM:]
        for slots in torch.arange(pages * PAGE, device="cuda").split(1 << 16):
            page, row = slots // PAGE, slots % PAGE
            new = self.cache[page, :, row]
            write_kv(new[..., :DIM], new[..., DIM:], self.keys, self.values, self.summary, slots)
        self.table = torch.randperm(pages, device="cuda").int().view(REQUESTS, -1)
        self.policy = resolve_config({}, {}).config.policy_for(0)
        self.indexers = default_indexers(self.policy)

    def step(self, decodes: int, chunk: int, context: int) -> tuple[PagedBatch, tuple[int, ...]]:
        """A step's batch, and its contexts on the host."""
        lengths = [LONGEST - 2000 - 97 * i for i in range(decodes)]
        counts = [1] * decodes
        if chunk:
            lengths, counts = [*lengths, context], [*counts, chunk]
        offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
        batch = PagedBatch(
            block_table=self.table[: len(counts)],
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device="cuda"),
            num_decodes=decodes,
            num_decode_tokens=decodes,
            decode_query_len=1,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            seq_lens_host=tuple(lengths),
            query_lens_host=tuple(counts),
        )
        return batch, tuple(lengths)

    def attend(
        self, q: torch.Tensor, out: torch.Tensor, batch: PagedBatch, lengths: tuple[int, ...]
    ) -> None:
        """Attend a step as the backend does, but for a chunk's last queries."""
        operands = PagedOperands(q, self.keys, self.values, out, DIM**-0.5, self.summary)
        for segment in plan_step(batch, self.policy, lengths):
            if segment.decodes or segment.policy.selects_blocks:  # FlashAttention serves the rest
                index = self.indexers.of(segment)
                attend_segment(operands.of_rows(segment.rows), segment, index)

    def flash(self, attend: Any, q: torch.Tensor, out: torch.Tensor, batch: PagedBatch) -> None:
        """Attend a step's whole contexts by FlashAttention-3."""
        attend(
            q=q, k=self.keys.transpose(1, 2), v=self.values.transpose(1, 2), out=out,
            cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=batch.max_query_len,
            seqused_k=batch.seq_lens, max_seqlen_k=batch.max_seq_len, softmax_scale=DIM**-0.5,
            causal=True, block_table=batch.block_table, fa_version=3,
        )  # fmt: skip


def microseconds(work: Callable[[], None]) -> dict[str, float]:
    """Best of five of the time of one call, and of the host's share of it."""
    found = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(LAYERS):
            work()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin, host))
    total, host = min(found[1:])
    return {"total_us": total / LAYERS * 1e6, "host_us": host / LAYERS * 1e6}


def new_steps(
    layer: Layer, shape: tuple[int, int, int], attend: Callable[..., None]
) -> Callable[[], None]:
    """Attends a step of :data:`NEW_LAYERS` layers, of a longer context each time it is called."""
    decodes, chunk, context = shape
    contexts = itertools.cycle(range(max(context - 4 * chunk, chunk), context + 1, chunk or 1))

    def step() -> None:
        batch, lengths = layer.step(decodes, chunk, next(contexts))
        for _ in range(NEW_LAYERS):
            attend(batch, lengths)

    return step


def flash_attention() -> Any:
    """vLLM's FlashAttention function, or ``None``."""
    try:
        from vllm.v1.attention.backends import fa_utils
    except ImportError:
        return None
    return fa_utils.flash_attn_varlen_func


def main() -> int:
    """Time every step and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    torch.manual_seed(0)
    layer, flash = Layer(), flash_attention()
    rows, wrong = [], 0
    for shape in STEPS:
        batch, lengths = layer.step(*shape)
        tokens = sum(batch.query_lens)
        q = torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        row: dict[str, Any] = dict(zip(("decodes", "chunk", "context"), shape, strict=True))
        outs = {}
        for name in ("jit", "replayed"):
            out = torch.zeros_like(q)
            hooked = mock.patch.object(replay, "has_launch_hook", return_value=True)
            with hooked if name == "jit" else nullcontext():
                row[name] = microseconds(lambda: layer.attend(q, out, batch, lengths))  # noqa: B023
            outs[name] = out
        same = torch.equal(outs["jit"], outs["replayed"])
        wrong += not same
        row["new_steps"] = microseconds(
            new_steps(layer, shape, lambda *step: layer.attend(q, out, *step))  # noqa: B023
        )
        if flash is not None:
            out = torch.empty_like(q)
            row["flash_attn"] = microseconds(lambda: layer.flash(flash, q, out, batch))  # noqa: B023
            row["flash_attn_new_steps"] = microseconds(
                new_steps(layer, shape, lambda batch, _: layer.flash(flash, q, out, batch))  # noqa: B023
            )
        rows.append({**row, "same_result": same})
        print(rows[-1], flush=True)
    machine = asdict(describe_machine(choose_device("auto"), options.commit))
    options.json.write_text(json.dumps({"steps": rows, "machine": machine}, indent=1) + "\n")
    if wrong:
        print(f"error: {wrong} steps have another result when they are replayed", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
