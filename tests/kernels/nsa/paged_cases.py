"""The kernels of the paged decode step against the layer, in Triton's interpreter.

A script, because the interpreter and the compiler cannot serve one process:

    TRITON_INTERPRET=1 python paged_cases.py

Prints one line per case and exits 1 if any failed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from sparsek_backend.nn import NSAConfig
from sparsek_kernels import PagedBatch
from sparsek_kernels.nsa.paged import launch as launch_paged
from sparsek_kernels.nsa.paged.cache import NSAPages
from sparsek_kernels.nsa.paged.problem import PagedProblem
from tests.kernels.interpreter import hasten_interpreter
from tests.kernels.nsa.paged_layer import SMALL, PagedLayer, make_layer, make_tokens


class KernelLayer(PagedLayer):
    """Prefills in torch operations, decodes with the kernels, all on the CPU.

    Decodes are followed by requests without tokens, as in a CUDA graph of more requests.
    """

    overlap = False
    """Whether kernels start before what the one before them writes is there."""

    def attend(self, q: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        out = torch.full((q.shape[0], 3, *q.shape[1:]), float("nan"))
        if batch.num_prefills:
            prefills = batch.part(batch.num_decodes, batch.num_requests)
            rows = slice(prefills.first_row, None)
            out[rows] = super().attend(q, prefills)[rows]
        if batch.num_decodes:
            problem = PagedProblem(
                q, self.pages, padded(batch), self.layer.config.spec, self.compression,
                self.layer.config.window_size, q.shape[-1] ** -0.5,
            )  # fmt: skip
            with overlapping(self.pages) if self.overlap else nullcontext():
                launch_paged.decode(problem, out)
        return out


@contextmanager
def overlapping(pages: NSAPages) -> Iterator[None]:
    """Programs of compressed attention see the step's new blocks after they have waited only."""
    rows = (pages.k_cmp, pages.v_cmp)
    before = [x.clone() for x in rows]
    attend, calls = launch_paged._attend_compressed, Counter[str]()

    def write(values: list[torch.Tensor], name: str) -> None:
        calls[name] += 1
        for row, value in zip(rows, values, strict=True):
            row.copy_(value)

    def late(*args: Any) -> Any:
        after = [x.clone() for x in rows]
        cuda.gdc_launch_dependents = lambda: write(before, "started")
        cuda.gdc_wait = lambda: write(after, "waited")
        found = attend(*args)
        assert calls["waited"] >= calls["started"] > 0
        cuda.gdc_launch_dependents = cuda.gdc_wait = lambda: None
        return found

    cuda = triton.language.extra.cuda
    kept = cuda.gdc_wait, cuda.gdc_launch_dependents, launch_paged.overlap_options
    cuda.gdc_launch_dependents = cuda.gdc_wait = lambda: None
    launch_paged.overlap_options = lambda *_: {"OVERLAP": True}
    launch_paged._attend_compressed = late
    try:
        yield
    finally:
        cuda.gdc_wait, cuda.gdc_launch_dependents, launch_paged.overlap_options = kept
        launch_paged._attend_compressed = attend


def padded(batch: PagedBatch) -> PagedBatch:
    """The decodes of a batch, and two requests that have nothing."""
    decodes = batch.part(0, batch.num_decodes)
    nothing = torch.zeros(2, dtype=torch.int32)
    ends = decodes.cu_seqlens_q
    return replace(
        decodes,
        block_table=torch.cat([decodes.block_table, decodes.block_table[:1].expand(2, -1)]),
        seq_lens=torch.cat([decodes.seq_lens, nothing]),
        cu_seqlens_q=torch.cat([ends, ends[-1:].expand(2)]),
        num_decodes=batch.num_decodes + 2,
        _derived={},
    )


@dataclass(frozen=True)
class Case:
    """Sequences of some lengths, prefilled but for the last tokens, which are decoded.

    A step decodes one token of each sequence, or one to ``query_len`` of them.
    """

    name: str
    lengths: tuple[int, ...]
    config: NSAConfig = SMALL
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    page_size: int = 32
    steps: int = 6
    query_len: int = 1
    overlap: bool = False
    masses: int = 1 << 24


WIDE = NSAConfig(cmp_block_size=8, cmp_stride=4, sel_block_size=32, top_n=5, window_size=20)
LONG = NSAConfig(48, 16, 48, top_n=4, num_init_blocks=0, num_local_blocks=1, window_size=20)
CASES = [
    Case("ragged", (170, 9, 33, 64)),
    Case("from the first token", (12,), steps=12),
    Case("shared K and V", (150,), replace(SMALL, shared_kv=True)),
    Case("mean", (150,), replace(SMALL, compression="mean")),
    Case("shared mean", (150,), replace(SMALL, compression="mean", shared_kv=True)),
    Case("no positions, group of 3", (150,), replace(SMALL, rope_theta=None), (3, 1)),
    Case("head size 24, pages of 48", (170, 50), heads=(2, 2), dim=24, page_size=48),
    Case("no overlap", (170,), replace(SMALL, cmp_block_size=16, cmp_stride=16)),
    Case("four strides", (230,), replace(WIDE, cmp_block_size=16, cmp_hidden_size=40)),
    Case("blocks of several pages", (75, 7, 20), LONG, page_size=16),
    Case("wide map", (60,), replace(SMALL, cmp_hidden_size=300)),
    Case("no initial block", (170,), replace(SMALL, num_init_blocks=0, num_local_blocks=1)),
    Case("speculating", (171, 40, 66), steps=3, query_len=3),
    Case("overlapping", (171, 40, 66), steps=3, query_len=3, overlap=True),
    Case("a token a launch", (171, 40, 66), steps=3, query_len=3, masses=1),
    Case("several programs a token", (1100,), heads=(2, 1), steps=2, overlap=True),
]


def error(case: Case) -> float:
    """Greatest difference between the layer's outputs and those of the kernels."""
    layer = make_layer(case.config, case.heads, case.dim)
    tokens = [make_tokens(length, layer, i) for i, length in enumerate(case.lengths)]
    paged = KernelLayer(layer, case.page_size, 40)
    paged.overlap, launch_paged._SCRATCH_MASSES = case.overlap, case.masses
    taken = [i % case.query_len + 1 for i in range(len(tokens))]
    for i, rows in enumerate(tokens):
        if (first := rows.shape[0] - case.steps * taken[i]) > 0:
            paged.step({str(i): rows[:first]}, decode_query_len=0)
    worst = 0.0
    for left in range(case.steps, 0, -1):
        parts = [
            rows[len(rows) - left * n : len(rows) - left * n + n]
            for rows, n in zip(tokens, taken, strict=True)
        ]
        found = paged.step({str(i): part for i, part in enumerate(parts)}, case.query_len)
        for rows, n, out in zip(tokens, taken, found, strict=True):
            last = len(rows) - (left - 1) * n
            gap = (out - layer(rows[None])[0, last - n : last]).abs().max()
            worst = max(worst, float(gap.nan_to_num(float("inf"))))
    return worst


def main() -> int:
    torch.set_num_threads(1)
    hasten_interpreter()
    failed = 0
    for case in CASES:
        worst = error(case)
        good = worst <= 2e-5
        failed += not good
        print(f"{'ok' if good else 'FAIL'} {case.name}: {worst:.2g}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
