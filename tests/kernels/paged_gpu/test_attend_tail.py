"""Attention over given cells of few keys, and over given tails, against the float64 oracle.

The same cases go through the kernels and through the torch path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hardware import simulated
from problems import Problem, make_problem

from sparsek_kernels.paged import Chosen, SelectionPolicy, Tail, merge_shards
from sparsek_kernels.paged.attend import attend, cpu, cpu_shards
from sparsek_kernels.paged.attend import launch as attend_launch
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SEGMENT
from sparsek_kernels.paged.prefill_tiles import prefill_tiles
from sparsek_kernels.paged.record import record_bytes
from sparsek_kernels.paged.reference import attend_reference

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


def encode_means(records: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Write mean values ``[Hkv, D]`` to records ``[Hkv, bytes]``; returns what these stand for."""
    dim = means.shape[-1]
    scale = (means.abs().amax(-1, keepdim=True) / 7.5).half()
    level = (means / scale.float()).floor().clamp(-8, 7).to(torch.uint8) + 8 & 15
    low, high = level.chunk(2, dim=-1)
    records[:, 21 * dim // 2 : 11 * dim] = low | high << 4
    place = 45 * dim // 4 + 34
    records[:, place : place + 2] = scale.view(torch.uint8)
    return (level.double() - 7.5) * scale.double()


def make_case(
    lengths: list[tuple[int, int]],
    policy: SelectionPolicy,
    *,
    tail: bool = True,
    decode: bool = True,
    nothing_left: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    sinks: torch.Tensor | None = None,
    device: str = "cpu",
    **options: Any,
) -> Case:
    """Random cells and tails; whatever must not be read is NaN."""
    options = {"page_size": 64, **options}
    problem = make_problem(lengths, num_decodes=len(lengths) * decode, device=device, **options)
    heads, page_size, dim = problem.k_cache.shape[1:]
    tokens, num_heads = problem.q.shape[:2]
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
    per_page = max(page_size // SEGMENT, 1)
    shape = (problem.k_cache.shape[0], heads, per_page * record_bytes(dim) + 32)
    records = torch.full(shape, 255, dtype=torch.uint8)
    segments = max(length for _, length in lengths) // SEGMENT + 3
    logits = torch.full((max(rows) + 1, num_heads, segments), float("nan"))
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
            extra = None
            start = length - new if decode else position  # where a list's first token is
            if not policy.sees_all(start):
                first, last = policy.candidate_range(start)
                block = key // policy.sel_block_size
                chosen = indices[request if decode else rows[token]]
                for head in range(heads):
                    if position == start:
                        cells = torch.randperm(last - first, generator=draw) + first
                        chosen[head] = cells[: policy.scored_blocks].sort().values
                    forced = (block < policy.sink_blocks) | (block >= last)
                    visible[0, head] &= forced | torch.isin(block, chosen[head])
                far = range(
                    first * policy.sel_block_size // SEGMENT,
                    last * policy.sel_block_size // SEGMENT,
                )
                given = torch.randn(num_heads, len(far), generator=draw) * 4
                left = torch.rand(given.shape, generator=draw) > (1.0 if nothing_left else 0.2)
                given.masked_fill_(~left, float("-inf"))
                logits[rows[token], :, far.start : far.stop] = given
                if tail:
                    means = []
                    for n in far:
                        page = pages[n * SEGMENT]
                        begin = places[n * SEGMENT] // SEGMENT * record_bytes(dim)
                        mean = v[n * SEGMENT : (n + 1) * SEGMENT].mean(0).float()
                        record = records[page, :, begin : begin + record_bytes(dim)]
                        means.append(encode_means(record, mean))
                    extra = (given[None] * math.log(2), torch.stack(means) * scales[1])
            for head in range(heads):
                seen = visible[0, head].nonzero().flatten()
                unread[pages[seen], head, places[seen]] = False
            q = problem.q[token : token + 1].cpu()
            wanted[token] = attend_reference(
                q, k * scales[0], v * scales[1], visible, dim**-0.5, sinks, extra
            )[0]
            token += 1
    for filled, cache in ((k_cache, problem.k_cache), (v_cache, problem.v_cache)):
        cache.copy_(filled.float().masked_fill(unread[..., None], float("nan")))
    mine = Tail(logits.to(device), records.to(device)) if tail else None
    return Case(problem, Chosen(indices.to(device), mine), wanted)


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
    "nothing-left": ([(2, 700)], PAIRS, {"nothing_left": True}),
    "no-tail": (MIXED, PAIRS, {"tail": False}),
    "no-tail-small-pages": (MIXED, FOURS, {"tail": False, "page_size": 16}),
}


@pytest.mark.parametrize("path", ["kernels", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_decodes(name: str, path: str) -> None:
    lengths, policy, options = CASES[name]
    check(path, lengths, policy, **options)


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_prefills_by_token(path: str) -> None:
    check(path, [(5, 420), (3, 70), (2, 530)], PAIRS, decode=False)


@pytest.mark.parametrize("name", ["pairs", "fours", "wide", "no-tail"])
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
    """What the means of fp8 values stand for is in units of the stored numbers."""
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
@pytest.mark.parametrize("name", ["pairs", "fours", "no-tail", "segments"])
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
        tail = case.chosen.tail
        if tail is not None:
            tail = tail._replace(records=tail.records.masked_fill(~kept[:, None, None], 255))
        out = torch.full(problem.q.shape, float("nan"), device=device)
        lse = torch.full(problem.q.shape[:2], float("nan"), device=device)
        operands = replace(problem.operands(out, lse=lse), k_cache=k_cache, v_cache=v_cache)
        segment = Segment(replace(problem.batch, block_table=mine, _derived={}), policy)
        by = cpu_shards if path == "torch" else attend_launch
        by.attend_segment(operands, segment, case.chosen._replace(tail=tail))
        parts.append((out, lse))
    outs, lses = (torch.stack(part) for part in zip(*parts, strict=True))
    merged = merge_shards(outs, lses, sinks.to(device))
    assert (merged.double().cpu() - case.wanted).abs().max() <= 3e-5


def test_what_is_refused() -> None:
    case = make_case([(1, 400)], PAIRS)
    problem, segment = case.problem, Segment(case.problem.batch, PAIRS)
    operands = problem.operands(torch.empty_like(problem.q))
    with pytest.raises(TypeError, match=r"chosen: expected Chosen\(indices, tail\), got Tensor"):
        attend(operands, segment, case.chosen.indices)
    for wrong in (
        (replace(operands, v_cache=problem.v_cache[..., :16]), segment),
        (operands, replace(segment, policy=SelectionPolicy(window_size=40, query_tile=1))),
        (replace(operands, k_cache=problem.k_cache[:, :, :32]), segment),
    ):
        with pytest.raises(ValueError, match=r"chosen\.tail: expected a policy with an alignment"):
            attend(*wrong, case.chosen)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [PAIRS, FOURS], ids=["pairs", "fours"])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_real_sizes(dim: int, group: int, policy: SelectionPolicy) -> None:
    policy = replace(policy, window_size=512, top_k=1000, dense_below=600)
    lengths = [(1, 9000), (4, 5001), (1, 400), (2, 4000)]
    check("kernels", lengths, policy, 3e-2, group=group, dim=dim, dtype=torch.bfloat16)
