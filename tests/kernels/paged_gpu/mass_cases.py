"""Scores of prefill tiles by exact block masses, against the oracle.

``python mass_cases.py`` runs the portable kernels on this machine's GPU or, with
``TRITON_INTERPRET=1``, on a CPU; ``--hopper`` runs the kernel for Hopper in our own interpreter.
Prints a line a case and exits with 1 when one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from problems import make_problem

from sparsek_kernels.paged.launch import scores as launch_mass
from sparsek_kernels.paged.launch.tiles import prefill_tiles
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import tile_scores_reference
from tests.kernels.gluon_interpreter import interpret

LOG2E = 1.4426950408889634
BOUND = 1e-6
"""fp32 throughout: products of 16-bit inputs are exact."""


def policy(**changes: Any) -> SelectionPolicy:
    """A policy with a budget that leaves blocks to choose from."""
    return SelectionPolicy(**{"num_sink": 64, "window_size": 128, "top_k": 3, **changes})


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
    policy: SelectionPolicy = field(default_factory=policy)


PORTABLE = (
    Case("two requests", [(200, 700), (130, 333)], group=4, page_size=16),
    Case("short ones too", [(77, 900), (64, 64), (1, 1000)], group=7, page_size=32),
    Case("dense_below", [(300, 700)], policy=policy(dense_below=600)),
    Case("blocks in pieces", [(90, 1500)], 1, 3, 32, policy=policy(sel_block_size=320)),
    Case("blocks of 48", [(300, 700)], 4, 1, 80, 16, policy=policy(sel_block_size=48)),
    Case("tiles of 40", [(300, 700)], 1, 3, policy=policy(query_tile=40)),
    Case("tiles of 8", [(100, 700)], page_size=96, policy=policy(sel_block_size=96, query_tile=8)),
    Case("tiles of 256", [(800, 1100)], 1, 2, policy=policy(sel_block_size=32, query_tile=256)),
    Case("many heads", [(150, 900)], 1, 40, 32),
    Case("page tail of NaN", [(129, 769)], head_major=True),
)
HOPPER = (
    Case("two requests", [(900, 1500), (130, 333)]),
    Case("short ones too", [(77, 900), (64, 64), (1, 1000)], 2, 7, 128, head_major=True),
    Case("tiles of 128", [(1400, 1500)], 1, 8, 64, 128, policy=policy(query_tile=128)),
    Case("page tail of NaN", [(129, 769)], 1, 4, 128),
)


def error(case: Case, dtype: torch.dtype, device: str, first: int, count: int) -> float:
    """Largest difference from the oracle of ``count`` tiles from ``first`` on, per row."""
    problem = make_problem(
        case.lengths,
        heads=case.heads,
        group=case.group,
        dim=case.dim,
        page_size=case.page_size,
        dtype=dtype,
        device=device,
        head_major=case.head_major,
        query_gain=1.5,
    )
    for keys, slots in zip(problem.keys, problem.slots, strict=True):
        problem.k_cache[slots // case.page_size, :, slots % case.page_size] = keys
    batch, rule, scale = problem.batch, case.policy, case.dim**-0.5
    tiles = prefill_tiles(batch, rule.query_tile, problem.q.shape[0])
    count = min(count, tiles.shape[0] - first)
    strips = launch_mass.plan_strips(batch, rule, tiles, case.group, problem.q.shape[0])
    width = -(-max(n for _, n in case.lengths) // rule.sel_block_size // 16) * 16 + 16
    scores = torch.full((count, case.heads, width), float("nan"), device=device)
    launch_mass.score_tiles(
        scores, problem.q, problem.k_cache, batch, rule, tiles, strips, scale * LOG2E, first,
        count, width,
    )  # fmt: skip
    worst = 0.0
    offsets = batch.cu_seqlens_q.tolist()
    for row, (request, base) in enumerate(tiles[first : first + count].tolist()):
        if request < 0:
            continue
        new, length = case.lengths[request]
        low, high = max(base, length - new), min(base + rule.query_tile, length) - 1
        if high < low or rule.sees_all(low):
            continue
        begin = offsets[request] + low - (length - new)
        want = tile_scores_reference(
            problem.q[begin : begin + high - low + 1].cpu(),
            problem.keys[request].cpu(),
            list(range(low, high + 1)),
            rule,
            scale,
        )
        blocks = high // rule.sel_block_size
        found = scores[row, :, :blocks].double().cpu()
        worst = max(worst, (found - want[:, :blocks]).abs().nan_to_num(torch.inf).max().item())
    return worst / (rule.samples * case.group)


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
            launch_mass.device_arch = lambda _device: 90  # type: ignore[assignment]
            launch_mass.SPAN = 256
            launched = stack.enter_context(interpret(args.order, not args.early, side_by_side=2))
        for case in HOPPER if args.hopper else PORTABLE:
            for first, count in ((0, 1 << 20), (1, 3)):
                worst = error(case, dtype, device, first, count)
                good = worst <= BOUND
                failed += not good
                print(
                    f"{'ok  ' if good else 'FAIL'} {case.name:18} {first} {worst:.1e}", flush=True
                )
        if args.hopper and device == "cpu":
            good = "block_mass_sm90_kernel" in launched and "block_mass_kernel" not in launched
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} kernels {sorted(set(launched))}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
