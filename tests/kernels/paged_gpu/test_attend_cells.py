"""Attention over given lists of small blocks, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import make_problem

from sparsek_kernels.paged.attend import launch as attend_launch
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.prefill_tiles import prefill_tiles
from sparsek_kernels.paged.reference import attend_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = SelectionPolicy(num_sink=20, window_size=40, top_k=2, sel_block_size=32).per_token()
BLOCKS = replace(SMALL, sel_block_size=32, query_tile=32)
LARGE = SelectionPolicy(num_sink=64, window_size=512, top_k=8, dense_below=600).per_token()


def check(
    lengths: list[tuple[int, int]],
    policy: SelectionPolicy,
    dtype: torch.dtype,
    tolerance: float,
    *,
    fixed: bool = False,
    **options: object,
) -> None:
    """Random selections; ``fixed``: as a batch-invariant engine launches it."""
    decode = policy.query_tile == 1
    problem = make_problem(
        lengths, num_decodes=len(lengths) * decode, dtype=dtype, device=DEVICE, **options
    )
    page_size, heads, dim = problem.k_cache.shape[2], problem.k_cache.shape[1], problem.q.shape[2]
    batch = problem.batch
    table = None if decode else prefill_tiles(batch, policy.query_tile, problem.q.shape[0])
    count = problem.q.shape[0] if table is None else table.shape[0]
    selected = torch.full((count, heads, policy.scored_blocks), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    wanted = torch.empty(problem.q.shape, dtype=torch.float64)
    token, unread = 0, torch.ones(problem.k_cache.shape[:3], dtype=torch.bool)
    for request, (new, length) in enumerate(lengths):
        k, v = problem.keys[request], problem.values[request]
        pages, rows = (
            problem.slots[request].cpu() // page_size,
            problem.slots[request].cpu() % page_size,
        )
        problem.k_cache[pages, :, rows], problem.v_cache[pages, :, rows] = k, v
        drawn: dict[int, torch.Tensor] = {}
        for position in range(length - new, length):
            key = torch.arange(length)
            visible = (key <= position).expand(1, heads, length).clone()
            if not policy.sees_all(position):
                tile = position // policy.query_tile
                first, last = policy.candidate_range(position)
                if tile not in drawn:
                    order = [
                        torch.randperm(last - first, generator=generator) for _ in range(heads)
                    ]
                    best = [o[: policy.scored_blocks].sort().values + first for o in order]
                    drawn[tile] = torch.stack(best)
                if table is None:
                    row = token
                else:
                    base = tile * policy.query_tile
                    (row,) = (
                        (table.cpu() == torch.tensor([request, base])).all(1).nonzero().flatten()
                    )
                selected[row] = drawn[tile]
                block = key // policy.sel_block_size
                forced = (block < policy.sink_blocks) | (block >= last)
                for head in range(heads):
                    visible[0, head] &= forced | torch.isin(block, drawn[tile][head])
            for head in range(heads):
                seen = visible[0, head].nonzero().flatten()
                unread[pages[seen], head, rows[seen]] = False
            q = problem.q[token : token + 1].cpu()
            wanted[token] = attend_reference(q, k.cpu(), v.cpu(), visible, dim**-0.5)[0]
            token += 1
    for cache in (problem.k_cache, problem.v_cache):  # keys that no entry lists are never read
        cache.masked_fill_(unread[..., None].to(DEVICE), float("nan"))
    out = torch.full_like(problem.q, float("nan"))
    segment = Segment(batch, policy, fixed_order=fixed)
    attend_launch.attend_segment(problem.operands(out), segment, Chosen(selected.to(DEVICE)))
    assert (out.double().cpu() - wanted).abs().max() <= tolerance


@pytest.mark.parametrize("fixed", [False, True], ids=["split", "fixed"])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([(1, 350), (1, 433), (1, 20), (1, 97)], {"group": 3}),
        ([(2, 301), (3, 290)], {"page_size": 32, "dim": 40}),
        ([(1, 401)], {"page_size": 64, "group": 8, "head_major": True}),
    ],
    ids=["tokens", "speculative", "large-pages"],
)
def test_tokens(lengths: list[tuple[int, int]], options: dict[str, object], fixed: bool) -> None:
    check(lengths, SMALL, torch.float32, 2e-5, fixed=fixed, **options)


def test_tiles() -> None:
    check([(40, 300), (1, 411)], BLOCKS, torch.float32, 2e-5, page_size=32)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_real_sizes(page_size: int, group: int, dim: int) -> None:
    lengths = [(1, 3000), (3, 5001), (1, 400), (2, 9000)]
    options = {"page_size": page_size, "group": group, "dim": dim}
    check(lengths, LARGE, torch.bfloat16, 3e-2, **options)
    check([(70, 3000)], replace(LARGE, query_tile=64), torch.bfloat16, 3e-2, **options)
