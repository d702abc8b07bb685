"""The paged kernels at real sizes; needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import oracle_check
import pytest
import torch
from problems import Problem, make_problem

from sparsek_kernels.paged import paged_attention
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.launch import attend as launch
from sparsek_kernels.paged.launch import select as launch_select
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SelectionPolicy

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
    policy = replace(TOP_K, dense_last=70)
    got = paged_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.batch,
        policy,
        k_summary=problem.k_summary,
    )
    error = (got.double().cpu() - oracle_check.expected(problem, policy)).abs().max().item()
    assert error <= oracle_check.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("policy", POLICIES)
def test_queries_that_lie_head_by_head(policy: str) -> None:
    problem = mixed(page_size=64, dim=128, group=4, dtype=torch.bfloat16)
    oracle_check.fill(problem)
    whole = oracle_check.attend(problem, POLICIES[policy])
    problem.q = problem.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(whole, oracle_check.attend(problem, POLICIES[policy]))


def test_fp8_cache() -> None:
    """Selection is checked through what it attends: the oracle reads the cache."""
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
        launch.paged_attention(operands, problem.batch, policy)
        want = oracle_check.expected(wide, policy)
        assert (out.double().cpu() - want).abs().max() < 3e-2
    few = replace(TOP_K, top_k=6)
    chosen = launch.select_blocks(
        problem.q,
        problem.k_cache,
        problem.batch,
        few,
        k_summary=problem.k_summary,
        softmax_scale=128**-0.5,
        k_scale=0.5,
    )
    exact = mixed(page_size=64, dim=128, dtype=torch.bfloat16)
    oracle_check.fill(exact)
    reference = launch.select_blocks(
        exact.q,
        exact.k_cache,
        exact.batch,
        few,
        k_summary=exact.k_summary,
        softmax_scale=128**-0.5,
    )
    tiles = launch_select.prefill_tiles(problem.batch, few.query_tile, problem.q.shape[0])
    known = [torch.ones(problem.batch.num_decode_tokens, device="cuda") > 0, tiles[:, 0] >= 0]
    for valid in (slice(problem.batch.num_decode_tokens), torch.cat(known)):
        same = (chosen[valid][..., None] == reference[valid][..., None, :]).any(-1)
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
        launch.write_kv(
            problem.keys[0][-1:],
            problem.values[0][-1:],
            problem.k_cache,
            problem.v_cache,
            problem.k_summary,
            problem.slots[0][-1:],
        )
        launch.paged_attention(problem.operands(out), problem.batch, TOP_K)

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
        exact = replace(problem, batch=replace(problem.batch, max_seq_len=4000))
        want = oracle_check.expected(exact, TOP_K)
        assert (replayed.double().cpu() - want).abs().max() < 3e-2


def tile_masses(rows: torch.Tensor, keys: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """Scores ``[Hkv, blocks]`` of a tile of 64 by keys ``[Hkv, N, D]`` in blocks of 64."""
    last = {position // 16: index for index, position in enumerate(positions)}
    total = 0
    for index in last.values():
        seen = positions[index] + 1
        logits = torch.einsum("hgd,hnd->hgn", rows[index].float(), keys[:, :seen].float())
        probs = torch.softmax(logits * rows.shape[-1] ** -0.5, dim=-1).sum(1)
        probs = torch.nn.functional.pad(probs, (0, keys.shape[1] - seen))
        total += probs.unflatten(-1, (-1, 64)).sum(-1)
    return total


def test_a_million_tokens_of_context() -> None:
    """One head, 64-dim: page offsets pass 2**31 elements, and 16384 blocks compete."""
    length, dim, page_size = 1 << 20, 64, 64
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=32)
    pages = 2 * length // page_size
    heads = 8
    body, tail = heads * page_size * 2 * dim, heads * (page_size // 16) * dim
    buffer = torch.empty(pages, body + tail, device="cuda", dtype=torch.bfloat16)
    for part in buffer.split(4096):
        part.normal_()
    assert buffer.numel() > 2**31
    kv = buffer.as_strided(
        (pages, heads, page_size, 2 * dim), (body + tail, page_size * 2 * dim, 2 * dim, 1)
    )
    summary = buffer.as_strided(
        (pages, heads, page_size // 16, dim),
        (body + tail, page_size // 16 * dim, dim, 1),
        body,
    )
    k_cache, v_cache = kv[..., :dim], kv[..., dim:]
    table = torch.arange(pages - 1, pages - 1 - length // page_size, -1, device="cuda")
    batch = PagedBatch(
        block_table=table.to(torch.int32)[None].repeat(2, 1),
        seq_lens=torch.tensor([length - 5, length], dtype=torch.int32, device="cuda"),
        cu_seqlens_q=torch.tensor([0, 1, 101], dtype=torch.int32, device="cuda"),
        num_decodes=1,
        num_decode_tokens=1,
        decode_query_len=1,
        max_query_len=100,
        max_seq_len=length,
    )
    q = torch.randn(101, heads * 2, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    operands = PagedOperands(q, k_cache, v_cache, out, dim**-0.5, summary)
    launch.paged_attention(operands, batch, policy)
    chosen = launch.select_blocks(
        q, k_cache, batch, policy, k_summary=summary, softmax_scale=dim**-0.5
    )
    cells = summary[table].permute(1, 0, 2, 3).float()  # [Hkv, blocks, 4, D]
    keys = k_cache[table].permute(1, 0, 2, 3).flatten(1, 2)
    values = v_cache[table].permute(1, 0, 2, 3).flatten(1, 2)
    groups = [(0, [length - 6])]
    start = length - 100
    for tile in range(start // 64, length // 64):
        groups.append((len(groups), list(range(max(start, tile * 64), tile * 64 + 64))))
    token = 0
    for row, positions in groups:
        rule = policy.per_token() if row == 0 else policy
        rows = q[token : token + len(positions)].unflatten(1, (heads, 2))
        first, last = rule.candidate_range(positions[0])
        own = positions[0] // 64
        if row == 0:
            logits = torch.einsum("nhgd,hbcd->nhgbc", rows.float(), cells[:, :own]).amax(-1)
            probs = torch.softmax(logits * dim**-0.5, dim=-1).sum((0, 2))[:, first:last]
        else:
            probs = tile_masses(rows, keys, positions)[:, first:last]
        for head in range(heads):
            best = set((probs[head].topk(rule.scored_blocks).indices + first).tolist())
            mine = set(chosen[row, head].tolist())
            assert len(mine) == rule.scored_blocks
            assert len(best & mine) >= rule.scored_blocks - 1
            local = range(rule.local_range(positions[0])[0], own + 1)
            blocks = torch.tensor(sorted({0, *mine, *local}), device="cuda")
            index = (blocks[:, None] * 64 + torch.arange(64, device="cuda")).flatten()
            k, v = keys[head, index].double(), values[head, index].double()
            score = torch.einsum("ngd,kd->ngk", rows[:, head].double(), k) * dim**-0.5
            limit = torch.tensor(positions, device="cuda")[:, None, None]
            prob = torch.softmax(score.masked_fill(index > limit, float("-inf")), dim=-1)
            want = torch.einsum("ngk,kd->ngd", prob, v)
            got = out[token : token + len(positions)].unflatten(1, (heads, 2))[:, head]
            assert (got.double() - want).abs().max() < 2e-2
        token += len(positions)
