"""Scores of prefill tiles by means of keys, against the oracle.

``python score_cases.py`` runs the portable kernels on this machine's GPU or, with
``TRITON_INTERPRET=1``, on a CPU; ``--hopper`` runs the kernel for Hopper in our own interpreter.
Prints a line a case and exits with 1 when one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from problems import Problem, make_problem

from sparsek_kernels.paged.index.cell_means import launch_scores
from sparsek_kernels.paged.index.problem import Selection
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy
from sparsek_kernels.paged.prefill_tiles import prefill_tiles
from sparsek_kernels.paged.reference import (
    block_logits_reference,
    means_reference,
    sampled_queries,
    tile_scores_reference,
)
from tests.kernels.gluon_interpreter import interpret

BOUND = 1e-6
"""Of a row's probability, in fp32: products of 16-bit inputs are exact."""
KEPT = 2**-11
"""Relative rounding of the fp16 weights that the kernel for Hopper keeps."""


def policy(**changes: Any) -> SelectionPolicy:
    """A policy with a budget that leaves blocks to choose from."""
    return SelectionPolicy(**{"num_sink": 64, "window_size": 128, "top_k": 2, **changes})


@dataclass(frozen=True)
class Case:
    """A step: ``(new tokens, sequence length)`` of each request, shapes and the policy."""

    name: str
    lengths: list[tuple[int, int]]
    heads: int = 2
    group: int = 2
    dim: int = 64
    page_size: int = 64
    head_major: bool = False
    num_decodes: int = 0
    fp8_cache: bool = False
    policy: SelectionPolicy = field(default_factory=policy)


PORTABLE = (
    Case("two requests", [(20, 740), (66, 533)], group=4, page_size=16),
    Case("decodes before", [(1, 700), (1, 64), (30, 800), (64, 64), (3, 600)], 1, 7, 32, 32,
         num_decodes=2),
    Case("dense_below", [(100, 700)], policy=policy(dense_below=640)),
    Case("blocks of 320", [(20, 2900)], 1, 3, 32, policy=policy(sel_block_size=320, top_k=1)),
    Case("blocks of 48", [(60, 700)], 2, 1, 80, 16, policy=policy(sel_block_size=48)),
    Case("blocks of 16", [(50, 300)], 1, 16, 16, 16,
         policy=policy(sel_block_size=16, num_sink=16, window_size=32)),
    Case("tiles of 40", [(60, 700)], 1, 3, policy=policy(query_tile=40)),
    Case("tiles of 2", [(5, 900)], 1, page_size=96,
         policy=policy(sel_block_size=96, query_tile=2)),
    Case("tiles of 256", [(120, 1100)], 1, 2, policy=policy(sel_block_size=32, query_tile=256)),
    Case("many heads", [(3, 500)], 1, 40, 16, policy=policy(query_tile=4)),
    Case("page tail of NaN", [(65, 833)], 1, head_major=True),
    Case("fp8 cache", [(40, 700)], 1, fp8_cache=True),
)  # fmt: skip
STRADDLES = Case("items straddle", [(200, 1500), (130, 900), (500, 2200)], 1, 4)
"""Tiles of two requests among four neighbours."""
HOPPER = (
    Case("two requests", [(100, 2400), (70, 733)]),
    Case("decodes before", [(1, 700), (77, 900), (64, 64), (1, 1000)], 2, 7, 128, 16, True, 1),
    Case("tiles of 128", [(200, 1400)], 1, 4, 64, 128, policy=policy(query_tile=128)),
    Case("page tail of NaN", [(65, 1153)], 1, 4, 128),
    STRADDLES,
    Case("two fours of 128", [(300, 2000), (150, 1700)], 1, 7, policy=policy(query_tile=128)),
    Case("tiles of 192", [(200, 2100)], 1, 2, policy=policy(query_tile=192)),
    Case("three heads", [(330, 1900)], 2, 3),
    Case("ends inside tiles", [(90, 1000), (37, 1300), (3, 1100)], 1, 5),
    Case("dense_below", [(400, 1000)], 1, 2, policy=policy(dense_below=800)),
    Case("fp8 cache", [(40, 700)], 1, fp8_cache=True),
)


def make(case: Case, dtype: torch.dtype, device: str) -> Problem:
    """The case's queries, and its keys in the cache."""
    problem = make_problem(
        case.lengths,
        num_decodes=case.num_decodes,
        heads=case.heads,
        group=case.group,
        dim=case.dim,
        page_size=case.page_size,
        dtype=dtype,
        device=device,
        head_major=case.head_major,
        query_gain=3.0,
        cache_dtype=torch.float8_e4m3fn if case.fp8_cache else None,
    )
    problem.keys = [keys.to(problem.k_cache.dtype) for keys in problem.keys]
    as_bytes = problem.k_cache.view(torch.uint8) if case.fp8_cache else problem.k_cache
    for keys, slots in zip(problem.keys, problem.slots, strict=True):
        rows = keys.view(torch.uint8) if case.fp8_cache else keys
        as_bytes[slots // case.page_size, :, slots % case.page_size] = rows
    problem.keys = [keys.to(dtype) for keys in problem.keys]
    return problem


def check(
    case: Case, dtype: torch.dtype, device: str, first: int = 0, count: int = 1 << 20
) -> tuple[float, int]:
    """Largest error of a row's probability, and tiles compared, of ``count`` from ``first`` on.

    The oracle's means are rounded as the kernels' are; in fp32 they need not be.
    """
    problem = make(case, dtype, device)
    rule, scale, before = case.policy, case.dim**-0.5, case.num_decodes
    batch = problem.batch.part(before, len(case.lengths))
    tiles = prefill_tiles(batch, rule.query_tile, problem.q.shape[0])
    count = min(count, tiles.shape[0] - first)
    out = torch.empty(tiles.shape[0], case.heads, rule.scored_blocks, dtype=torch.int32)
    call = Selection(out, problem.operands(problem.q), batch, rule, tiles)
    scores = torch.full((count, case.heads, call.width), float("nan"), device=device)
    launch_scores.score_tiles(scores, call, first, count)
    hopper = dtype != torch.float32 and launch_scores.scores_fit(call)
    worst, compared = 0.0, 0
    offsets = batch.cu_seqlens_q.tolist()
    for row, (request, base) in enumerate(tiles[first : first + count].tolist()):
        new, length = case.lengths[before + request]
        low, high = max(base, length - new), min(base + rule.query_tile, length) - 1
        if request < 0 or high < low or rule.sees_all(low):
            assert scores[row].isnan().all()
            continue
        begin = offsets[request] + low - (length - new)
        q = problem.q[begin : begin + high - low + 1].cpu()
        keys = problem.keys[before + request].cpu()
        blocks = base // rule.sel_block_size
        want = torch.zeros(case.heads, blocks, dtype=torch.float64)
        positions = list(range(low, high + 1))
        samples = sampled_queries(positions, rule)
        for position in (positions[sample] for sample in samples):
            seen = position // rule.sel_block_size * rule.sel_block_size
            vectors = means_reference(keys[:seen], CELL_SIZE).to(dtype).double()
            cells = rule.sel_block_size // CELL_SIZE
            logits = block_logits_reference(q[position - low], vectors, cells, scale)
            of = logits.softmax(-1).unflatten(0, (case.heads, -1)).sum(1)
            want += of[:, :blocks]
        found = scores[row, :, :blocks].double().cpu()
        error = (found - want).abs().nan_to_num(torch.inf) - (KEPT if hopper else 0.0) * want
        worst = max(worst, error.max().item() / (case.group * len(samples)))
        compared += 1
        if dtype == torch.float32:
            exact = tile_scores_reference(q, keys, positions, rule, scale)
            found = found[:, : exact.shape[1]]
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-7)
    return worst, compared


def say(name: str, worst: float, compared: int) -> bool:
    """Print a line of what :func:`check` found; whether it is good."""
    good = worst <= BOUND and compared > 0
    print(f"{'ok  ' if good else 'FAIL'} {name:18} {worst:.1e}", flush=True)
    return good


def main() -> int:
    """Run the cases; the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hopper", action="store_true")
    parser.add_argument("--order", default="first first")
    parser.add_argument("--early", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = args.hopper or device == "cuda"
    dtype = torch.bfloat16 if half else torch.float32
    failed = 0
    with contextlib.ExitStack() as stack:
        if args.hopper and device == "cpu":
            launched = stack.enter_context(interpret(args.order, not args.early, side_by_side=2))
        for case in HOPPER if args.hopper else PORTABLE:
            failed += not say(case.name, *check(case, dtype, device))
        for limit in ("_MEANS_ELEMENTS", "_PARTS_ELEMENTS"):
            with mock.patch.object(launch_scores, limit, 1):
                failed += not say(limit, *check(STRADDLES, dtype, device, 1, 9))
        if args.hopper and device == "cpu":
            names = {"pool_means_kernel", "gather_samples_kernel", "tile_scores_sm90_kernel"}
            names.add("add_parts_kernel")
            good = set(launched) == names
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} kernels {sorted(set(launched))}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
