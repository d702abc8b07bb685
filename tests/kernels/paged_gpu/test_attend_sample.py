"""Attention over given samples of cells of few keys, against the float64 oracle.

The same cases go through the kernels and through the torch path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hardware import simulated
from problems import Problem, make_problem
from torch import nn

from sparsek_kernels.paged import Chosen, SelectionPolicy, merge_shards
from sparsek_kernels.paged.attend import attend, cpu, cpu_shards
from sparsek_kernels.paged.attend import launch as attend_launch
from sparsek_kernels.paged.attend.reference import attend_reference, list_logs
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.prefill_tiles import prefill_tiles
from sparsek_kernels.paged.sample import CELL_BITS

ON_GPU = torch.cuda.is_available()
PAIRS = SelectionPolicy(num_sink=20, window_size=40, top_k=60, query_tile=64).by_records(74)
FOURS = replace(PAIRS, sel_block_size=4, top_k=32)  # whole pieces of 64 keys
WIDE = replace(FOURS, window_size=100, num_sink=0, top_k=9, dense_below=400)
WHOLE = replace(PAIRS, sel_block_size=64, top_k=2)
MIXED = [(1, 900), (4, 770), (1, 200), (3, 402), (1, 640), (2, 66)]
"""New tokens and lengths of requests, of which some see everything, and some cross segments."""


@dataclass
class Case:
    """A filled problem, what its tokens attend, and the float64 oracle's output."""

    problem: Problem
    chosen: Chosen
    wanted: torch.Tensor


def make_case(
    lengths: list[tuple[int, int]],
    policy: SelectionPolicy,
    *,
    decode: bool = True,
    unfilled: int = 0,
    heaviest: int = 1023,
    scales: tuple[float, float] = (1.0, 1.0),
    sinks: torch.Tensor | None = None,
    device: str = "cpu",
    **options: Any,
) -> Case:
    """Random cells, weights and order; whatever must not be read is NaN."""
    options = {"page_size": 64, **options}
    problem = make_problem(lengths, num_decodes=len(lengths) * decode, device=device, **options)
    heads, page_size, dim = problem.k_cache.shape[1:]
    tokens = problem.q.shape[0]
    draw = torch.Generator().manual_seed(5)
    rows = list(range(tokens))
    if not decode:
        tiles = prefill_tiles(problem.batch, 1, tokens).tolist()
        rows = [
            tiles.index([request, position])
            for request, (new, length) in enumerate(lengths)
            for position in range(length - new, length)
        ]
    lists = len(lengths) if decode else max(rows) + 1
    indices = torch.full((lists, heads, policy.scored_blocks), -1, dtype=torch.int32)
    k_cache, v_cache = problem.k_cache.cpu().clone(), problem.v_cache.cpu().clone()
    unread = torch.ones(problem.k_cache.shape[:3], dtype=torch.bool)
    wanted = torch.empty(problem.q.shape, dtype=torch.float64)
    token = 0
    for request, (new, length) in enumerate(lengths):
        slots = problem.slots[request].cpu()
        pages, places = slots // page_size, slots % page_size
        k_cache[pages, :, places] = problem.keys[request].cpu().to(k_cache.dtype)
        v_cache[pages, :, places] = problem.values[request].cpu().to(v_cache.dtype)
        k = k_cache[pages, :, places].double()
        v = v_cache[pages, :, places].double()
        for position in range(length - new, length):
            key = torch.arange(length)
            visible = (key <= position).expand(1, heads, length).clone()
            logs = None
            start = length - new if decode else position  # where a list's first token is
            if not policy.sees_all(start):
                listed = indices[request if decode else rows[token]]
                if position == start:
                    listed.copy_(draw_lists(policy, start, heads, unfilled, heaviest, draw))
                logs = list_logs(listed.tolist(), length, start, policy)
                visible &= logs > float("-inf")
                unread[pages[0], :, places[: policy.sel_block_size]] = False  # read for places left
            for head in range(heads):
                seen = visible[0, head].nonzero().flatten()
                unread[pages[seen], head, places[seen]] = False
            q = problem.q[token : token + 1].cpu()
            wanted[token] = attend_reference(
                q, k * scales[0], v * scales[1], visible, dim**-0.5, sinks, logs
            )[0]
            token += 1
    for filled, cache in ((k_cache, problem.k_cache), (v_cache, problem.v_cache)):
        cache.copy_(filled.float().masked_fill(unread[..., None], float("nan")))
    return Case(problem, Chosen(indices.to(device)), wanted)


def draw_lists(
    policy: SelectionPolicy,
    start: int,
    heads: int,
    unfilled: int,
    heaviest: int,
    draw: torch.Generator,
) -> torch.Tensor:
    """Random lists ``[heads, scored_blocks]``, of which some places are not filled."""
    first, last = policy.candidate_range(start)
    lists = []
    for _ in range(heads):
        cells = torch.randperm(last - first, generator=draw)[: policy.scored_blocks] + first
        steps = torch.randint(0, heaviest + 1, cells.shape, generator=draw)
        steps[torch.rand(cells.shape, generator=draw) < 0.3] = 0
        entries = cells + (steps << CELL_BITS)
        entries[torch.randperm(len(entries), generator=draw)[:unfilled]] = -1
        lists.append(entries.int())
    return torch.stack(lists)


def check(
    path: str,
    lengths: list[tuple[int, int]],
    policy: SelectionPolicy,
    tolerance: float = 3e-5,
    *,
    fixed: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    sinks: bool = False,
    arch: tuple[int, int] = (90, 132),
    **options: Any,
) -> None:
    """A case by one of the paths; ``fixed``: as a batch-invariant engine launches it."""
    device = "cuda" if ON_GPU and path == "kernels" else "cpu"
    learned = torch.linspace(-1, 2, options.get("group", 2) * 2) if sinks else None
    case = make_case(lengths, policy, scales=scales, sinks=learned, device=device, **options)
    out = torch.full_like(case.problem.q, float("nan"))
    operands = case.problem.operands(
        out,
        sinks=None if learned is None else learned.to(device),
        k_scale=scales[0],
        v_scale=scales[1],
    )
    segment = Segment(case.problem.batch, policy, fixed_order=fixed)
    if path == "torch":
        cpu.attend_segment(operands, segment, case.chosen)
    elif ON_GPU:
        attend_launch.attend_segment(operands, segment, case.chosen)
    else:
        with simulated(*arch):
            attend_launch.attend_segment(operands, segment, case.chosen)
    assert (out.double().cpu() - case.wanted).abs().max() <= tolerance


CASES: dict[str, tuple[list[tuple[int, int]], SelectionPolicy, dict[str, Any]]] = {
    "pairs": (MIXED, PAIRS, {"group": 4}),
    "pairs-alone": ([(1, 1500)], PAIRS, {"group": 7, "sinks": True}),
    "fours": (MIXED, FOURS, {"group": 1, "dim": 64, "page_size": 128, "head_major": True}),
    "fours-d80": (MIXED[:2], FOURS, {"dim": 80, "sinks": True}),
    "wide": (MIXED, WIDE, {"page_size": 128, "dim": 128}),
    "wide-group": (MIXED[:4], PAIRS, {"group": 24}),
    "many-tokens": ([(20, 400), (5, 777)], PAIRS, {"group": 4}),
    "segments": (MIXED, WHOLE, {"page_size": 128, "group": 4}),
    "weights-of-1": (MIXED, PAIRS, {"heaviest": 0}),
    "small-pages": (MIXED, FOURS, {"page_size": 16}),
    "places-left": (MIXED, PAIRS, {"unfilled": 5, "heaviest": 200}),
    "nothing-drawn": ([(2, 700)], FOURS, {"unfilled": 32}),
}


@pytest.mark.parametrize("path", ["kernels", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_decodes(name: str, path: str) -> None:
    lengths, policy, options = CASES[name]
    check(path, lengths, policy, **options)


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_prefills_by_token(path: str) -> None:
    check(path, [(5, 420), (3, 70), (2, 530)], PAIRS, decode=False)


@pytest.mark.parametrize("name", ["pairs", "fours", "wide", "places-left"])
def test_one_order_of_addition(name: str) -> None:
    """Nothing is split, on whatever GPU."""
    lengths, policy, options = CASES[name]
    check("kernels", lengths, policy, fixed=True, **options)
    check("kernels", lengths, policy, arch=(80, 1), **options)


def test_wide_heads() -> None:
    check("kernels", [(1, 700)], PAIRS, dim=160)


@pytest.mark.parametrize("path", ["kernels", "torch"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)], ids=str
)
def test_short_floats(dtype: torch.dtype, tolerance: float, path: str) -> None:
    check(path, MIXED[:2], PAIRS, tolerance, dtype=dtype, dim=64)


def test_fp8_caches() -> None:
    check("kernels", MIXED, PAIRS, scales=(0.5, 0.25), cache_dtype=torch.float8_e4m3fn)


def test_rows_do_not_depend_on_the_batch() -> None:
    """In one order of addition a token's bits are those that it has alone."""
    case = make_case([(1, 900), (1, 640)], PAIRS, device="cuda" if ON_GPU else "cpu")
    outs = []
    for batch in (case.problem.batch, case.problem.batch.by_token(0, 1)):
        out = torch.full_like(case.problem.q, float("nan"))
        segment = Segment(batch, PAIRS, fixed_order=True)
        attend_launch.attend_segment(case.problem.operands(out), segment, case.chosen)
        outs.append(out[0])
    assert torch.equal(*outs)


@pytest.mark.parametrize("path", ["kernels", "torch"])
@pytest.mark.parametrize("name", ["pairs", "fours", "places-left", "segments"])
def test_ranks_attend_together_what_one_does(name: str, path: str) -> None:
    lengths, policy, options = CASES[name]
    device = "cuda" if ON_GPU and path == "kernels" else "cpu"
    sinks = torch.linspace(-1, 2, options.get("group", 2) * 2)
    case = make_case(lengths, policy, sinks=sinks, device=device, **options)
    problem, parts = case.problem, []
    table = problem.batch.block_table
    for rank in range(2):
        others = torch.arange(table.shape[1], device=device) % 2 != rank
        foreign = table[:, others].flatten().long()
        mine = table.masked_fill(others, -1)
        kept = torch.ones(problem.k_cache.shape[0], dtype=torch.bool, device=device)
        kept[foreign] = False
        kept[mine[mine >= 0].long()] = True
        k_cache, v_cache = (
            cache.clone().masked_fill(~kept[:, None, None, None], float("nan"))
            for cache in (problem.k_cache, problem.v_cache)
        )
        out = torch.full(problem.q.shape, float("nan"), device=device)
        lse = torch.full(problem.q.shape[:2], float("nan"), device=device)
        operands = replace(problem.operands(out, lse=lse), k_cache=k_cache, v_cache=v_cache)
        segment = Segment(replace(problem.batch, block_table=mine, _derived={}), policy)
        by = cpu_shards if path == "torch" else attend_launch
        by.attend_segment(operands, segment, case.chosen)
        parts.append((out, lse))
    outs, lses = (torch.stack(part) for part in zip(*parts, strict=True))
    merged = merge_shards(outs, lses, sinks.to(device))
    assert (merged.double().cpu() - case.wanted).abs().max() <= 3e-5


def test_rows_that_begin_anywhere() -> None:
    """Rows whose beginnings 32 bits do not tell are found by 64."""
    case = make_case(MIXED, PAIRS, group=4, device="cuda" if ON_GPU else "cpu")
    segment, outs = Segment(case.problem.batch, PAIRS), []
    operands = case.problem.operands(torch.empty_like(case.problem.q))
    odd = [nn.functional.pad(x, (0, 3))[..., :-3] for x in (operands.k_cache, operands.v_cache)]
    for caches in ((operands.k_cache, operands.v_cache), odd):
        out = torch.full_like(operands.q, float("nan"))
        mine = replace(operands, out=out, k_cache=caches[0], v_cache=caches[1])
        attend_launch.attend_segment(mine, segment, case.chosen)
        outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("dtype", "pages", "unit"),
    [
        (torch.bfloat16, (1 << 20) - 1, 8),
        (torch.bfloat16, 1 << 20, 1),
        (torch.float32, (1 << 19) - 1, 4),
        (torch.float8_e4m3fn, (1 << 21) - 1, 16),
    ],
)
def test_32_bits_tell_where_rows_begin_in_caches_up_to_32_gib(
    dtype: torch.dtype, pages: int, unit: int
) -> None:
    cache = torch.empty(pages, 1, 64, 256, dtype=dtype, device="meta")
    assert attend_launch.unit_of(cache[..., :128], cache[..., 128:]) == unit


def test_what_is_refused() -> None:
    case = make_case([(1, 400)], PAIRS)
    segment = Segment(case.problem.batch, PAIRS)
    operands = case.problem.operands(torch.empty_like(case.problem.q))
    with pytest.raises(TypeError, match=r"chosen: expected Chosen\(indices\), got Tensor"):
        attend(operands, segment, case.chosen.indices)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [PAIRS, FOURS], ids=["pairs", "fours"])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_real_sizes(dim: int, group: int, policy: SelectionPolicy) -> None:
    policy = replace(policy, window_size=512, top_k=1000, dense_below=600)
    lengths = [(1, 9000), (4, 5001), (1, 400), (2, 4000)]
    check("kernels", lengths, policy, 3e-2, group=group, dim=dim, dtype=torch.bfloat16)
