"""The paged prefill's Hopper kernels against the oracle, interpreted on a CPU; a script, because
the interpreter cannot serve a process whose kernels Triton interprets.

    python hopper_cases.py --order "last first" --early

Prints one line per check and exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from oracle_check import TOLERANCE, attend, expected, fill
from problems import Problem, make_problem

from sparsek_kernels.paged import launch_select, write_kv
from sparsek_kernels.paged import launch_sm90 as launch_hopper
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div
from sparsek_kernels.paged.reference import block_logits_reference
from tests.kernels.gluon_interpreter import interpret

PADDING = 3
"""Rows of q and of the output that belong to no request."""
TOP_K = SelectionPolicy(num_sink=64, window_size=65, top_k=2)
STEP = [(1, 330), (130, 391), (63, 63), (0, 200), (40, 300), (2, 129)]
SHORT = [(1, 1), (3, 3), (64, 64), (65, 65), (1, 321), (66, 385)]
BOTH = {"attend_hopper_kernel", "tile_scores_hopper_kernel"}
ATTEND = {"attend_hopper_kernel"}


@dataclass(frozen=True)
class Case:
    """Requests as (new tokens, sequence length), the rule, and which Hopper kernels take it."""

    name: str
    lengths: list[tuple[int, int]]
    policy: SelectionPolicy = TOP_K
    kernels: set[str] = field(default_factory=lambda: BOTH)
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("g4", STEP, options={"num_decodes": 1}),
    Case("g4-short", SHORT, replace(TOP_K, num_sink=0)),
    Case(
        "g8-dim128-page128",
        [(90, 450), (7, 7), (64, 384)],
        dtype=torch.float16,
        options={"heads": 1, "group": 8, "dim": 128, "page_size": 128, "head_major": True},
    ),
    Case("g4-ring", [(100, 830)], replace(TOP_K, num_sink=128, top_k=5), sinks=True),
    Case("g4-long", [(30, 2250), (70, 8500), (20, 700)], options={"heads": 1}),
    Case("g3-page128", STEP, kernels=ATTEND, options={"group": 3, "page_size": 128}),
    Case(
        "g2-dense-below",
        [(150, 470), (65, 130)],
        replace(TOP_K, dense_below=384),
        ATTEND,
        dtype=torch.float16,
        options={"group": 2},
    ),
    Case(
        "g7-tiles-of-two",
        [(150, 470), (1, 600)],
        replace(TOP_K, query_tile=128, num_sink=0, top_k=1),
        ATTEND,
        sinks=True,
        options={"heads": 1, "group": 7},
    ),
]


def make(case: Case) -> Problem:
    """A case's problem: pages past the end of a sequence, and rows past the last query, are NaN."""
    options = {"group": 4, "dim": 64, "page_size": 64} | case.options
    problem = make_problem(case.lengths, dtype=case.dtype, **options)
    fill(problem, case.policy.score_kind, write=write_kv)
    spare = int(problem.k_cache[:, 0, 0, 0].isnan().nonzero()[0])
    for row, (_, length) in enumerate(case.lengths):
        problem.batch.block_table[row, ceil_div(length, options["page_size"]) :] = spare
    rows = torch.full((PADDING, *problem.q.shape[1:]), float("nan"), dtype=case.dtype)
    return replace(problem, q=torch.cat((problem.q, rows)))


def tiles_of(problem: Problem, policy: SelectionPolicy) -> Iterator[tuple[int, int, range]]:
    """Index, request and positions of every tile of the prefills that has queries."""
    tiles = launch_select.prefill_tiles(problem.batch, policy.query_tile, problem.q.shape[0])
    for tile, (request, base) in enumerate(tiles.tolist()):
        if request >= 0:
            new, length = problem.batch.query_lens[request], int(problem.batch.seq_lens[request])
            last = min(base + policy.query_tile, length)
            yield tile, request, range(max(base, length - new), last)


def score_error(problem: Problem, policy: SelectionPolicy) -> tuple[float, bool]:
    """Largest error of the scores of tiles, by query head, and whether nothing else is written."""
    q, batch = problem.q, problem.batch
    _, heads, _, dim = problem.k_summary.shape
    page_size, group = problem.k_cache.shape[2], q.shape[1] // heads
    tiles = launch_select.prefill_tiles(batch, policy.query_tile, q.shape[0])
    width = ceil_div(ceil_div(batch.max_seq_len, policy.sel_block_size), 16) * 16
    got = torch.full((tiles.shape[0], heads, group, width), float("nan"))
    launch_hopper.score_tiles_hopper(
        *(
            got,
            q,
            problem.k_summary,
            batch,
            policy,
            tiles,
            dim**-0.5 * math.log2(math.e),
            page_size,
        ),
        *(0, tiles.shape[0], width),
    )
    want = torch.full(got.shape, float("nan"), dtype=torch.float64)
    for tile, request, positions in tiles_of(problem, policy):
        if policy.sees_all(positions[0]):
            continue
        slots = problem.slots[request][15::16]
        page, row = slots // page_size, slots % page_size
        summaries = problem.k_summary[page, :, row // 16]
        new, length = batch.query_lens[request], int(batch.seq_lens[request])
        first = int(batch.cu_seqlens_q[request]) - (length - new)
        blocks = positions[0] // policy.sel_block_size
        total = torch.zeros(heads * group, blocks, dtype=torch.float64)
        for position in positions:
            logits = block_logits_reference(q[first + position], summaries, policy, dim**-0.5)
            total += logits[:, :blocks].softmax(-1)
        want[tile, :, :, :blocks] = total.view(heads, group, blocks)
    written = want.isfinite()
    error = (got - want)[written].abs().max().item() if written.any() else float("nan")
    return error, torch.equal(written, got.isfinite())


def run(case: Case, launched: list[str]) -> int:
    """Check one case; the number of failures."""
    failed = 0

    def say(good: bool, what: str, detail: str) -> None:
        nonlocal failed
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {case.name:18} {what:10} {detail}", flush=True)

    problem = make(case)
    if "tile_scores_hopper_kernel" in case.kernels:
        error, same = score_error(problem, case.policy)
        say(error <= 2e-3 and same, "scores", f"{error:.1e}, those of tiles only: {same}")
    launched.clear()
    gen = torch.Generator().manual_seed(1)
    sinks = torch.randn(problem.q.shape[1], generator=gen) if case.sinks else None
    if sinks is not None:
        sinks[0] = float("-inf")
    got = attend(problem, case.policy, sinks).double()
    taken = {name for name in launched if "hopper" in name}
    say(taken == case.kernels, "kernels", ", ".join(sorted(taken)))
    want = expected(problem, case.policy, sinks)
    error = (got - want)[:-PADDING].abs().max().item()
    say(error <= TOLERANCE[case.dtype], "output", f"{error:.1e}")
    say(bool(got[-PADDING:].isnan().all()), "padding", "left alone")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--order", default="first first", help="of partitions")
    parser.add_argument("--early", action="store_true", help="products before copies")
    parser.add_argument("--only", default="", help="cases with this in their names")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    with interpret(args.order, not args.early, side_by_side=2) as launched:
        failed = sum(run(case, launched) for case in CASES if args.only in case.name)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
