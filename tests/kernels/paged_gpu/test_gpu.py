"""The paged kernels at real sizes; needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import oracle_check
import pytest
import torch
from problems import Problem, attend_phases, make_problem, select_phases

from sparsek_backend.bench.ops.paged_inputs import (
    PagedInputs,
    Tile,
    attend_tile,
    wrong_selection,
)
from sparsek_kernels.paged import paged_attention, select_blocks
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SelectionPolicy
from tests.kernels.launched import write_launched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

TOP_K = SelectionPolicy(num_sink=64, window_size=192, top_k=4)
WINDOW = SelectionPolicy(num_sink=4, window_size=300)
POLICIES = {
    "dense": SelectionPolicy(),
    "window": WINDOW,
    "topk": TOP_K,
    "topk128": replace(TOP_K, query_tile=128, top_k=6),
}
MIXED = [(1, 1500), (1, 65), (1, 1), (1, 1024), (200, 1300), (63, 63), (130, 901), (1, 700)]


def mixed(seed: int = 0, **options: object) -> Problem:
    return make_problem(MIXED, num_decodes=4, device="cuda", seed=seed, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_page_sizes(policy: str, page_size: int) -> None:
    problem = mixed(page_size=page_size, dim=64, dtype=torch.bfloat16, head_major=page_size > 32)
    oracle_check.check(problem, POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16])
def test_groups(policy: str, group: int) -> None:
    problem = mixed(page_size=64, dim=64, group=group, heads=2, dtype=torch.float16)
    oracle_check.check(problem, POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dims(policy: str, dim: int) -> None:
    problem = mixed(page_size=64, dim=dim, group=4, heads=1, dtype=torch.bfloat16)
    oracle_check.check(problem, POLICIES[policy])


def test_speculative_and_sinks() -> None:
    problem = make_problem(
        [(4, 1500), (4, 800), (3, 70)],
        num_decodes=3,
        decode_query_len=4,
        device="cuda",
        dim=128,
        group=4,
        page_size=64,
        dtype=torch.bfloat16,
    )
    sinks = torch.randn(8, device="cuda")
    for policy in POLICIES.values():
        oracle_check.check(problem, policy, sinks)


def test_last_queries_see_everything() -> None:
    problem = mixed(page_size=64, dim=128, dtype=torch.bfloat16)
    oracle_check.fill(problem)
    policy = oracle_check.without_records(replace(TOP_K, dense_last=70))
    got = paged_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.batch,
        policy,
        k_summary=problem.k_summary,
    )
    chosen = oracle_check.Chosen(problem, policy)
    want = oracle_check.expected(problem, policy, chosen=chosen)
    error = (got.double().cpu() - want).abs().max().item()
    assert error <= oracle_check.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("policy", POLICIES)
def test_queries_that_lie_head_by_head(policy: str) -> None:
    problem = mixed(page_size=64, dim=128, group=4, dtype=torch.bfloat16)
    oracle_check.fill(problem)
    whole = oracle_check.attend(problem, POLICIES[policy])
    problem.q = problem.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(whole, oracle_check.attend(problem, POLICIES[policy]))


def test_fp8_cache() -> None:
    """Selection is checked through what it attends: the oracle reads the cache.

    ``test_fp8.py`` holds what prompts choose against the rule.
    """
    problem = mixed(page_size=64, dim=128, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    oracle_check.fill(problem, scales=(0.5, 0.25))
    wide = replace(
        problem,
        k_cache=(problem.k_cache.float() * 0.5).bfloat16(),
        v_cache=(problem.v_cache.float() * 0.25).bfloat16(),
    )
    for policy in (SelectionPolicy(), WINDOW, replace(TOP_K, top_k=40)):
        out = torch.full_like(problem.q, float("nan"))
        operands = problem.operands(out, k_scale=0.5, v_scale=0.25)
        attend_phases(operands, problem.batch, policy)
        want = oracle_check.expected(wide, policy)
        assert (out.double().cpu() - want).abs().max() < 3e-2
    few = replace(TOP_K, top_k=6)
    chosen = select_phases(problem.operands(problem.q, k_scale=0.5), problem.batch, few)
    exact = mixed(page_size=64, dim=128, dtype=torch.bfloat16)
    oracle_check.fill(exact)
    reference = select_phases(exact.operands(exact.q), exact.batch, few)
    decodes = slice(exact.batch.num_decodes)
    mine, theirs = (torch.cat(rows[decodes]) for rows in (chosen, reference))
    same = (mine[..., None] == theirs[..., None, :]).any(-1)
    assert same.float().mean() > 0.7


def test_batch_composition_does_not_change_a_request() -> None:
    problem = mixed(page_size=64, dim=128, dtype=torch.bfloat16, group=4)
    oracle_check.fill(problem)
    whole = oracle_check.attend(problem, TOP_K)
    alone = PagedBatch(
        block_table=problem.batch.block_table[4:5],
        seq_lens=problem.batch.seq_lens[4:5],
        cu_seqlens_q=torch.tensor([0, 200], dtype=torch.int32, device="cuda"),
        num_decodes=0,
        num_decode_tokens=0,
        decode_query_len=1,
        max_query_len=200,
        max_seq_len=4096,
    )
    solo = replace(problem, q=problem.q[4:204], batch=alone)
    part = oracle_check.attend(solo, TOP_K)
    torch.testing.assert_close(part, whole[4:204], atol=1e-2, rtol=1e-2)


def test_graph_replay_with_other_lengths() -> None:
    problem = make_problem(
        [(1, 4000), (1, 3000), (1, 2000)],
        num_decodes=3,
        device="cuda",
        dim=128,
        group=4,
        page_size=64,
        dtype=torch.bfloat16,
        max_seq_len=131072,
    )
    oracle_check.fill(problem)
    out = torch.empty_like(problem.q)

    def step() -> None:
        write_launched(
            problem.keys[0][-1:],
            problem.values[0][-1:],
            problem.k_cache,
            problem.v_cache,
            problem.k_summary,
            problem.slots[0][-1:],
        )
        attend_phases(problem.operands(out), problem.batch, TOP_K)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([4000, 3000, 2000], [1, 70, 1999], [3900, 0, 300], [640, 641, 703]):
        problem.batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        problem.q.normal_()
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        torch.testing.assert_close(replayed, oracle_check.attend(problem, TOP_K), atol=0, rtol=0)


def test_a_million_tokens_of_context() -> None:
    """Page offsets pass 2**31 elements."""
    length, dim, page_size, heads = 1 << 20, 64, 64, 8
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=32)
    pages = 2 * length // page_size + 1
    body = heads * page_size * 2 * dim
    buffer = torch.empty(pages, body, device="cuda", dtype=torch.bfloat16)
    kv = buffer.view(pages, heads, page_size, 2 * dim)
    k_cache, v_cache = kv[..., :dim], kv[..., dim:]
    for first in range(0, pages, 4096):
        kv[first : first + 4096].normal_()
    assert buffer.numel() > 2**31
    table = torch.arange(pages - 1, pages - 1 - length // page_size, -1, device="cuda")
    inputs = PagedInputs(
        q=torch.randn(100, heads * 2, dim, device="cuda", dtype=torch.bfloat16),
        k_cache=k_cache,
        v_cache=v_cache,
        k_summary=torch.empty(pages, heads, 0, device="cuda", dtype=torch.uint8),
        block_table=table.to(torch.int32)[None],
        query_lens=(100,),
        seq_lens=(length,),
        policy=policy,
    )
    batch = inputs.batch(inputs.query_lens, inputs.seq_lens, 0)
    out = torch.full_like(inputs.q, float("nan"))
    operands = PagedOperands(inputs.q, k_cache, v_cache, out, dim**-0.5)
    attend_phases(operands, batch, policy)
    (chosen,) = select_blocks(inputs.q, k_cache, batch, policy)
    begin = length - 100
    for index, base in enumerate(range(begin - begin % 64, length, 64)):
        where = range(max(begin, base), min(base + 64, length))
        rows = range(where.start - begin, where.stop - begin)
        for head in range(heads):
            tile = Tile(0, head, rows, where)
            mine = chosen[index, head].cpu()
            assert not wrong_selection(mine, inputs, tile, policy)
            want = attend_tile(inputs, tile, mine, policy, torch.float64)
            assert (inputs.tile_rows(out, tile).double() - want).abs().max() < 2e-2
