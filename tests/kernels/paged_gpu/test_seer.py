"""SeerAttention-R's gates by the Triton kernels, in the interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import infllm_check
import oracle_check
import pytest
import torch
from problems import Problem, make_problem

from sparsek_kernels.paged import (
    CellMeans,
    Gates,
    Indexers,
    Seer,
    SelectionPolicy,
    StepPolicy,
    paged_attention,
    write_index,
    write_kv,
)
from sparsek_kernels.paged import scratch as runtime
from sparsek_kernels.paged.index import launch as index_launch
from sparsek_kernels.paged.index.seer import launch as seer_launch
from sparsek_kernels.paged.index.seer.cpu import write_gate_keys_eager
from sparsek_kernels.paged.index.seer.gates import view_gate_keys
from sparsek_kernels.paged.reference import (
    paged_attention_reference,
    select_blocks_reference,
    select_seer_reference,
)
from tests.kernels.paged.gate_cases import make_gates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEER = partial(SelectionPolicy, query_tile=1)
BLOCKS_OF_64 = SEER(num_sink=64, window_size=1, top_k=2, sel_block_size=64)
BLOCKS_OF_32 = SEER(num_sink=32, window_size=40, top_k=3, sel_block_size=32)
DENSE_BELOW = SEER(num_sink=32, window_size=1, top_k=2, sel_block_size=32, dense_below=200)
TILES = StepPolicy(replace(BLOCKS_OF_32, query_tile=64), BLOCKS_OF_32)

CASES: dict[str, tuple[list[tuple[int, int]], SelectionPolicy | StepPolicy, dict[str, Any]]] = {
    "decode": ([(1, 500), (1, 33), (1, 290)], BLOCKS_OF_64, {"num_decodes": 3, "page_size": 64}),
    "mixed": (
        [(2, 500), (1, 33), (9, 290), (3, 410)],
        BLOCKS_OF_64,
        {"num_decodes": 2, "page_size": 64, "head_major": True},
    ),
    "blocks-of-32": ([(1, 500), (4, 290)], BLOCKS_OF_32, {"num_decodes": 1, "page_size": 64}),
    "dense-below": ([(1, 290), (5, 203)], DENSE_BELOW, {"num_decodes": 1, "page_size": 32}),
    "pages-of-128": ([(2, 500), (2, 300)], BLOCKS_OF_64, {"num_decodes": 1, "page_size": 128}),
    "tiles": ([(1, 500), (30, 290)], TILES, {"num_decodes": 1, "page_size": 64}),
    "dense-prefill": (
        [(1, 500), (30, 290)],
        StepPolicy(SelectionPolicy(), BLOCKS_OF_32),
        {"num_decodes": 1, "page_size": 64},
    ),
    "group-1": ([(1, 420)], BLOCKS_OF_64, {"group": 1, "heads": 3, "page_size": 64}),
    "group-3": ([(1, 420)], BLOCKS_OF_64, {"group": 3, "dim": 40, "page_size": 64}),
    "group-16": ([(1, 420)], BLOCKS_OF_64, {"group": 16, "heads": 1, "page_size": 64}),
    "blocks-of-96": (
        [(1, 690)],
        SEER(window_size=96, top_k=2, sel_block_size=96),
        {"num_decodes": 1, "page_size": 96},
    ),
}


def make(
    lengths: list[tuple[int, int]], *, rotated: bool = True, **options: Any
) -> tuple[Problem, Gates]:
    """A problem whose cache is not filled yet, and its gates."""
    problem = make_problem(lengths, device=DEVICE, **options)
    heads, dim = problem.k_cache.shape[1], problem.q.shape[2]
    gates = make_gates(heads, problem.q.shape[1] // heads, dim, norms=rotated)
    gates = Gates(*(None if x is None else x.to(DEVICE) for x in gates.tensors))
    if rotated:
        table = infllm_check.rotation(max(length for _, length in lengths), dim, DEVICE)
        problem = replace(problem, batch=replace(problem.batch, rotation=table, _derived={}))
    return problem, gates


def fill(problem: Problem, size: int, gates: Gates, cuts: Sequence[float] = (1.0,)) -> None:
    """Write every request in parts, each with the gate keys of the blocks that it completes."""
    lengths = [len(keys) for keys in problem.keys]
    done = [0] * len(lengths)
    problem.k_summary.fill_(255)
    oracle_check.fill(problem, (1.0,), (1.0, 1.0), write=infllm_check.write_pages)
    for cut in cuts:
        ends = [int(length * cut) for length in lengths]
        batch = infllm_check.part_of(problem.batch, done, ends, DEVICE)
        seer_launch.write_gate_keys(problem.k_cache, problem.k_summary, batch, size, gates)
        done = ends


def kept(problem: Problem, size: int) -> torch.Tensor:
    page_size, dim = problem.k_cache.shape[2:]
    return view_gate_keys(problem.k_summary.cpu(), page_size, size, dim)


def on_cpu(problem: Problem) -> Problem:
    """A copy."""
    batch = problem.batch
    batch = replace(
        batch,
        block_table=batch.block_table.cpu(),
        seq_lens=batch.seq_lens.cpu(),
        cu_seqlens_q=batch.cu_seqlens_q.cpu(),
        rotation=None if batch.rotation is None else batch.rotation.cpu(),
        _derived={},
    )
    names = ("q", "k_cache", "v_cache", "k_summary")
    tensors = {name: getattr(problem, name).cpu().clone() for name in names}
    return replace(problem, batch=batch, **tensors)


def check_keys(problem: Problem, size: int, gates: Gates) -> None:
    """Every complete block has the key that a CPU makes; other bytes are as they were."""
    mine = on_cpu(problem)
    mine.k_summary.fill_(255)
    lengths = [len(keys) for keys in mine.keys]
    whole = infllm_check.part_of(mine.batch, [0] * len(lengths), lengths, "cpu")
    host = Gates(*(None if x is None else x.cpu() for x in gates.tensors))
    write_gate_keys_eager(mine.k_cache, mine.k_summary, whole, size, host)
    torch.testing.assert_close(
        kept(problem, size), kept(mine, size), atol=2e-5, rtol=2e-5, equal_nan=True
    )


def phased(policy: SelectionPolicy | StepPolicy) -> StepPolicy:
    """Both phases' policy; prefills choose as decodes do where there is but one."""
    return policy if isinstance(policy, StepPolicy) else StepPolicy(policy, policy)


def indexers_of(policy: SelectionPolicy | StepPolicy, gates: Gates) -> Indexers:
    tiles = phased(policy).prefill.query_tile > 1
    return Indexers(CellMeans() if tiles else Seer(gates), Seer(gates))


def attend(problem: Problem, policy: SelectionPolicy | StepPolicy, gates: Gates) -> torch.Tensor:
    return oracle_check.attend(problem, phased(policy), indexers=indexers_of(policy, gates))


def check(problem: Problem, policy: SelectionPolicy | StepPolicy, gates: Gates) -> None:
    mine = on_cpu(problem)
    host = Gates(*(None if x is None else x.cpu() for x in gates.tensors))

    def select(q: Any, k: Any, positions: Any, rule: SelectionPolicy, scale: float) -> Any:
        if rule.query_tile > 1:
            return select_blocks_reference(q, k, positions, rule, scale)
        return select_seer_reference(q, k, positions, rule, host, mine.batch.rotation)

    got = attend(problem, policy, gates).double().cpu()
    want = paged_attention_reference(
        mine.q,
        mine.k_cache,
        mine.v_cache,
        mine.batch,
        phased(policy),
        select=select,
    )
    assert (got - want).abs().max() <= oracle_check.TOLERANCE[problem.q.dtype]


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("name", CASES)
def test_choice_and_attention_equal_the_oracle(name: str, rotated: bool) -> None:
    lengths, policy, options = CASES[name]
    problem, gates = make(lengths, rotated=rotated, **{"num_decodes": 1, **options})
    size = phased(policy).decode.sel_block_size
    fill(problem, size, gates)
    check_keys(problem, size, gates)
    check(problem, policy, gates)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits(dtype: torch.dtype) -> None:
    lengths, policy, options = CASES["decode"]
    problem, gates = make(lengths, dtype=dtype, **options)
    fill(problem, 64, gates)
    check_keys(problem, 64, gates)
    check(problem, policy, gates)


@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_the_same_bytes_in_any_order(page_size: int) -> None:
    """Chunks that end inside blocks, and pages that held other keys before, leave no trace."""
    options: dict[str, Any] = {"page_size": page_size, "heads": 1}
    (whole, gates), (pieces, _) = (make([(1, 250), (1, 77)], **options) for _ in range(2))
    fill(whole, 32, gates)
    check_keys(whole, 32, gates)
    fill(pieces, 32, gates, cuts=(0.03, 0.11, 0.12, 0.37, 0.71, 0.995, 1.0))
    assert torch.equal(whole.k_summary, pieces.k_summary)


def test_scratch_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, gates = make([(1, 350), (2, 433), (5, 400)], num_decodes=2, page_size=32)
    fill(problem, 32, gates)
    whole = attend(problem, BLOCKS_OF_32, gates)
    monkeypatch.setattr(index_launch, "SCRATCH_ELEMENTS", 64)
    monkeypatch.setattr(runtime, "_ROW_ELEMENTS", 1)
    assert torch.equal(whole, attend(problem, BLOCKS_OF_32, gates))


@pytest.mark.parametrize("num_sms", [1, 3, 100])
def test_programs_that_share_a_context(num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seer_launch, "multiprocessors", lambda _: num_sms)
    problem, gates = make([(1, 2500), (1, 300)], num_decodes=2, page_size=64, heads=1)
    fill(problem, 32, gates)
    check(problem, BLOCKS_OF_32, gates)


def test_padded_requests_write_zeros_or_nothing() -> None:
    problem, gates = make([(1, 500), (1, 64)], num_decodes=2, page_size=64)
    fill(problem, 64, gates)
    before = problem.k_summary.clone()
    problem.batch.seq_lens[1] = 0
    seer_launch.write_gate_keys(problem.k_cache, problem.k_summary, problem.batch, 64, gates)
    out = attend(problem, BLOCKS_OF_64, gates)
    assert torch.equal(before, problem.k_summary)
    assert out[0].isfinite().all()
    assert (out[1] == 0).all()


def test_equal_scores_go_to_the_lower_index() -> None:
    problem, gates = make([(1, 640)], rotated=False, num_decodes=1, page_size=64)
    problem.keys[0] = torch.ones_like(problem.keys[0])
    fill(problem, 64, gates)
    check(problem, BLOCKS_OF_64, gates)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_layers_and_graphs_at_real_sizes() -> None:
    """Qwen3-4B's heads and a budget of 4096 tokens; two layers' gates, replayed and captured."""
    policy = SEER(num_sink=64, window_size=1, top_k=62)
    problem, gates = make(
        [(1, 16384), (1, 12000), (1, 9000)],
        num_decodes=3,
        heads=8,
        group=4,
        dim=128,
        page_size=64,
        dtype=torch.bfloat16,
        head_major=True,
        query_gain=1.0,
    )
    fill(problem, 64, gates, cuts=(0.1234, 0.5, 1.0))
    check_keys(problem, 64, gates)
    other = make_gates(8, 4, 128, seed=9)
    other = Gates(*(None if x is None else x.to(DEVICE) for x in other.tensors))

    def layer(mine: Gates, out: torch.Tensor) -> torch.Tensor:
        write_index(
            problem.k_cache, problem.v_cache, problem.k_summary, problem.batch, policy, Seer(mine)
        )
        return paged_attention(
            problem.q,
            problem.k_cache,
            problem.v_cache,
            problem.batch,
            phased(policy),
            k_summary=problem.k_summary,
            indexers=indexers_of(policy, mine),
            out=out,
        )

    first, second, again = (torch.empty_like(problem.q) for _ in range(3))
    layer(gates, first)
    layer(other, second)  # replays the first one's launches
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, attend(problem, policy, gates), atol=0, rtol=0)
    torch.testing.assert_close(second, attend(problem, policy, other), atol=0, rtol=0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(gates, again)
    graph.replay()
    torch.testing.assert_close(first, again, atol=0, rtol=0)
    check(problem, policy, gates)


def test_writing_by_the_api() -> None:
    """On a CPU the public function computes what the kernel does."""
    problem, gates = make([(1, 130)], num_decodes=1, page_size=64)
    fill(problem, 64, gates)
    expected = kept(problem, 64).clone()
    mine = on_cpu(problem)
    mine.k_summary.fill_(255)
    host = Gates(*(None if x is None else x.cpu() for x in gates.tensors))
    write_kv(
        mine.keys[0].cpu(), mine.values[0].cpu(), mine.k_cache, mine.v_cache, None,
        mine.slots[0].cpu(),
    )  # fmt: skip
    whole = infllm_check.part_of(mine.batch, [0], [130], "cpu")
    write_index(mine.k_cache, mine.v_cache, mine.k_summary, whole, BLOCKS_OF_64, Seer(host))
    torch.testing.assert_close(kept(mine, 64), expected, atol=2e-5, rtol=2e-5, equal_nan=True)
