"""The paged prefill's Hopper kernels against the oracle, interpreted on a CPU; a script, because
the interpreter cannot serve a process whose kernels Triton interprets.

    python hopper_cases.py --order "last first" --early

Prints one line per check and exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from oracle_check import TOLERANCE, Chosen, attend, expected, fill
from problems import Problem, make_problem

from sparsek_kernels.paged import write_kv
from sparsek_kernels.paged.index.page_records import launch as records_launch
from sparsek_kernels.paged.policy import Growth, SelectionPolicy, ceil_div
from tests.kernels.gluon_interpreter import interpret

PADDING = 3
"""Rows of q and of the output that belong to no request."""
TOP_K = SelectionPolicy(num_sink=64, window_size=65, top_k=2)
STEP = [(1, 330), (130, 391), (63, 63), (0, 200), (40, 300), (2, 129)]
DECODED = [(1, 200), *STEP[1:]]  # a decode that sees everything: Triton's kernels select
SHORT = [(1, 1), (3, 3), (64, 64), (65, 65), (1, 321), (66, 385)]
FEW = [(64, 64), (64, 128), (64, 192), (1, 1), (64, 320), (0, 50), (130, 130), (64, 640), (5, 69)]
"""Lists of one to five blocks, odd and even ones in turn, whole tiles and parts of them."""
FAR = 5 << 26
"""Elements from head to head that make eight heads more than 31 bits can number."""
KERNELS = {"attend_hopper_kernel", "tile_scores_sm90_kernel"}
MASSES = {True: "listed_masses_sm90_kernel", False: "listed_masses_kernel"}
"""By whether a tile has 128 rows or a multiple of them."""


@dataclass(frozen=True)
class Case:
    """Requests as (new tokens, sequence length), and the rule."""

    name: str
    lengths: list[tuple[int, int]]
    policy: SelectionPolicy = TOP_K
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    far: bool = False
    """Whether heads lie too far apart for the copy engine: over 2^31 elements in all."""


CASES = [
    Case("g4", DECODED, options={"num_decodes": 1}),
    Case("g4-short", SHORT, replace(TOP_K, num_sink=0)),
    Case(
        "g8-dim128-page128",
        [(90, 450), (7, 7), (64, 384)],
        dtype=torch.float16,
        options={"heads": 1, "group": 8, "dim": 128, "page_size": 128, "head_major": True},
    ),
    Case("g4-ring", [(100, 830)], replace(TOP_K, num_sink=128, top_k=5), sinks=True),
    Case("g4-long", [(30, 2250), (70, 8500), (20, 700)], options={"heads": 1}),
    Case("g4-shared-list", [(30, 1400)], options={"heads": 1}),
    Case(
        "g16-token-major",
        [(3, 203), (70, 450)],
        replace(TOP_K, dense_below=128),
        options={"heads": 2, "group": 16, "num_decodes": 1},
    ),
    Case("g3-page128", STEP, options={"group": 3, "page_size": 128}),
    Case(
        "g2-dense-below",
        [(150, 470), (65, 130)],
        replace(TOP_K, dense_below=384),
        dtype=torch.float16,
        options={"group": 2},
    ),
    Case(
        "g7-tiles-of-two",
        [(150, 470), (1, 600)],
        replace(TOP_K, query_tile=128, num_sink=0, top_k=1),
        sinks=True,
        options={"heads": 1, "group": 7},
    ),
    Case("g2-lists-of-few", FEW, options={"heads": 1, "group": 2}),
    Case(
        "g5-empty-chunks",  # items without rows before and behind the others of each tile
        [(70, 700), (1, 130), (140, 460)],
        replace(TOP_K, query_tile=256),
        options={"heads": 1, "group": 5, "dim": 128},
    ),
    Case("g4-growing", [(200, 1100)], replace(TOP_K, growth=Growth(256, 2, 1024))),
    Case("g4-far-heads", [(70, 450)], far=True),
]


def make(case: Case) -> Problem:
    """A case's problem: pages past the end of a sequence, and rows past the last query, are NaN."""
    options = {"group": 4, "dim": 64, "page_size": 64} | case.options
    problem = make_problem(case.lengths, dtype=case.dtype, **options)
    fill(problem, write=write_kv)
    spare = int(problem.k_cache[:, 0, 0, 0].isnan().nonzero()[0])
    for row, (_, length) in enumerate(case.lengths):
        problem.batch.block_table[row, ceil_div(length, options["page_size"]) :] = spare
    rows = torch.full((PADDING, *problem.q.shape[1:]), float("nan"), dtype=case.dtype)
    q = torch.cat((problem.q, rows))
    if case.far:
        memory = torch.UntypedStorage(q.shape[1] * FAR * q.element_size())
        q = q.new_empty(0).set_(memory, 0, q.shape, (q.shape[2], FAR, 1)).copy_(q)
    return replace(problem, q=q)


def run(case: Case, launched: list[str]) -> int:
    """Check one case; the number of failures."""
    failed = 0

    def say(good: bool, what: str, detail: str) -> None:
        nonlocal failed
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {case.name:18} {what:10} {detail}", flush=True)

    problem = make(case)
    launched.clear()
    gen = torch.Generator().manual_seed(1)
    sinks = torch.randn(problem.q.shape[1], generator=gen) if case.sinks else None
    if sinks is not None:
        sinks[0] = float("-inf")
    got = attend(problem, case.policy, sinks).double()
    known = {*KERNELS, *MASSES.values(), "part_scores_kernel"}
    taken = {name for name in launched if name in known}
    group = problem.q.shape[1] // problem.k_cache.shape[1]
    wide = case.policy.ranking_samples * group >= 96  # groups of 3 take the rows of 4
    fit = KERNELS - ({"attend_hopper_kernel"} if case.far else set())
    say(taken == {*fit, MASSES[wide]}, "kernels", ", ".join(sorted(taken)))
    want = expected(problem, case.policy, sinks, Chosen(problem, case.policy))
    error = (got - want)[:-PADDING].abs().max().item()
    say(error <= TOLERANCE[case.dtype], "output", f"{error:.1e}")
    say(bool(got[-PADDING:].isnan().all()), "padding", "left alone")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--order", default="first first", help="of partitions")
    parser.add_argument("--early", action="store_true", help="products before copies")
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--part", default="0/1", help="I/N: cases I, I + N, ...")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    # What decoded tokens choose on matrix units is not interpreted: instructions are spelled there.
    portable = mock.patch.object(records_launch, "_fits", return_value=False)
    with portable, interpret(args.order, not args.early, side_by_side=2) as launched:
        first, step = (int(x) for x in args.part.split("/"))
        cases = [case for case in CASES[first::step] if args.only in case.name]
        failed = sum(run(case, launched) for case in cases)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
