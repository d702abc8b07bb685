"""InfLLM-v2's own ranking by the Triton kernels, in the interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import infllm_check
import pytest
import torch
from problems import Problem, make_problem

from sparsek_kernels.paged import (
    InfLLM,
    SelectionPolicy,
    StepPolicy,
    paged_attention,
    write_index,
    write_kv,
)
from sparsek_kernels.paged import scratch as runtime
from sparsek_kernels.paged.checks import check_rotation
from sparsek_kernels.paged.index import launch as index_launch
from sparsek_kernels.paged.index.infllm import launch as infllm_launch
from sparsek_kernels.paged.index.infllm.means import view_means
from sparsek_kernels.paged.pages import summary_bytes
from sparsek_kernels.paged.plan import Segment, plan_step
from sparsek_kernels.paged.reference import block_ranks_reference, select_infllm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INFLLM = partial(SelectionPolicy, query_tile=1)
BLOCKS_OF_64 = INFLLM(num_sink=64, window_size=64, top_k=2, sel_block_size=64)
BLOCKS_OF_32 = INFLLM(num_sink=32, window_size=64, top_k=3, sel_block_size=32)
BLOCKS_OF_16 = INFLLM(num_sink=16, window_size=1, top_k=4, sel_block_size=16)
DENSE_BELOW = INFLLM(num_sink=32, window_size=32, top_k=2, sel_block_size=32, dense_below=200)

CASES: dict[str, tuple[list[tuple[int, int]], SelectionPolicy, dict[str, Any]]] = {
    "decode": ([(1, 500), (1, 33), (1, 290)], BLOCKS_OF_64, {"num_decodes": 3, "page_size": 64}),
    "mixed": (
        [(2, 500), (1, 33), (9, 290), (3, 410)],
        BLOCKS_OF_64,
        {"num_decodes": 2, "page_size": 64, "head_major": True},
    ),
    "blocks-of-32": ([(1, 500), (4, 290)], BLOCKS_OF_32, {"num_decodes": 1}),
    "blocks-of-16": ([(1, 290), (2, 201)], BLOCKS_OF_16, {"num_decodes": 1, "page_size": 32}),
    "dense-below": ([(1, 290), (5, 203)], DENSE_BELOW, {"num_decodes": 1, "page_size": 32}),
    "pages-of-128": ([(2, 500), (2, 300)], BLOCKS_OF_64, {"num_decodes": 1, "page_size": 128}),
    "group-1": ([(1, 420)], BLOCKS_OF_64, {"num_decodes": 1, "group": 1, "heads": 3}),
    "group-3": ([(1, 420)], BLOCKS_OF_64, {"num_decodes": 1, "group": 3, "dim": 40}),
    "group-16": ([(1, 420)], BLOCKS_OF_64, {"num_decodes": 1, "group": 16, "heads": 1}),
    "blocks-of-96": (
        [(1, 690)],
        INFLLM(window_size=96, top_k=2, sel_block_size=96),
        {"num_decodes": 1, "page_size": 48},
    ),
}


def make(
    lengths: list[tuple[int, int]], *, use_nope: bool = False, device: str = DEVICE, **options: Any
) -> Problem:
    """A problem whose cache is not filled yet."""
    problem = make_problem(lengths, device=device, **options)
    if not use_nope:
        return problem
    positions = max(length for _, length in lengths)
    table = infllm_check.rotation(positions, problem.q.shape[2], device)
    return replace(problem, batch=replace(problem.batch, rotation=table, _derived={}))


def select(problem: Problem, policy: SelectionPolicy) -> list[torch.Tensor]:
    return infllm_check.Chosen(problem, policy).rows


@pytest.mark.parametrize("use_nope", [False, True], ids=["rotated", "use_nope"])
@pytest.mark.parametrize("name", CASES)
def test_choice_and_attention_equal_the_oracle(name: str, use_nope: bool) -> None:
    lengths, policy, options = CASES[name]
    problem = make(lengths, use_nope=use_nope, **options)
    infllm_check.fill(problem)
    infllm_check.check_means(problem)
    infllm_check.check(problem, policy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use_nope", [False, True], ids=["rotated", "use_nope"])
def test_sixteen_bits(use_nope: bool, dtype: torch.dtype) -> None:
    lengths, policy, options = CASES["decode"]
    problem = make(lengths, use_nope=use_nope, dtype=dtype, **options)
    infllm_check.fill(problem)
    infllm_check.check_means(problem)
    infllm_check.check(problem, policy)


def test_the_choice_is_that_of_the_rule_on_the_keys() -> None:
    """The oracle's on the keys themselves, where no two scores are as near as a mean's rounding."""
    lengths, policy, options = CASES["decode"]
    problem = make(lengths, **options)
    for keys in problem.keys:  # means that differ: one direction for each cell
        cells = torch.randn(-(-len(keys) // 16), *keys.shape[1:], device=DEVICE)
        keys.copy_(cells.repeat_interleave(16, dim=0)[: len(keys)] + 0.1 * keys)
    infllm_check.fill(problem)
    scale = problem.q.shape[-1] ** -0.5
    for row, (keys, found) in enumerate(zip(problem.keys, select(problem, policy), strict=True)):
        q, position = problem.q[row : row + 1].cpu(), len(keys) - 1
        wanted = select_infllm_reference(q, keys.cpu(), [position], policy, scale)
        if wanted is not None:
            ranks = block_ranks_reference(q[0], keys.cpu(), position, policy, scale)
            last = ranks.masked_fill(ranks.isinf(), 0.0).sort(descending=True).values
            kept = policy.scored_blocks
            assert (last[:, kept - 1] > 1.02 * last[:, kept]).all()  # no tie
            assert found.tolist() == wanted


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("use_nope", [False, True], ids=["rotated", "use_nope"])
def test_the_same_bytes_in_any_order(page_size: int, use_nope: bool) -> None:
    """Chunks that end inside cells, and pages that held other keys before, leave no trace."""
    options: dict[str, Any] = {"page_size": page_size, "heads": 1, "use_nope": use_nope}
    whole, pieces = (make([(1, 150), (1, 77)], **options) for _ in range(2))
    infllm_check.fill(whole)
    infllm_check.check_means(whole)
    keys = [key.clone() for key in pieces.keys]
    for key in pieces.keys:
        key.mul_(100.0)
    infllm_check.fill(pieces)
    for key, mine in zip(keys, pieces.keys, strict=True):
        mine.copy_(key)
    infllm_check.fill(pieces, cuts=(0.03, 0.11, 0.12, 0.37, 0.71, 0.995, 1.0))
    assert torch.equal(whole.k_summary, pieces.k_summary)


def test_cells_that_are_filling_are_never_read() -> None:
    """Nor pages of nobody: both may hold NaN."""
    lengths, policy, options = CASES["mixed"]
    problem = make(lengths, **options)
    infllm_check.fill(problem)
    expected = infllm_check.attend(problem, policy)
    page_size, dim = problem.k_cache.shape[2:]
    means = view_means(problem.k_summary, page_size, dim)
    complete = torch.zeros(means.shape[0], means.shape[2], dtype=torch.bool, device=DEVICE)
    for slots in problem.slots:
        cells = slots[: len(slots) // 16 * 16 : 16]
        complete[cells // page_size, cells % page_size // 16] = True
    means.transpose(1, 2)[~complete] = float("nan")
    for (_, length), pages in zip(lengths, problem.batch.block_table, strict=True):
        pages[-(-length // page_size) :] = 1 << 30
    problem.batch = replace(problem.batch, _derived={})  # whose parts may be copies
    assert torch.equal(expected, infllm_check.attend(problem, policy))


def test_prefills_choose_as_decodes_do() -> None:
    problem = make([(6, 390)], page_size=32)
    infllm_check.fill(problem)
    batch = replace(
        problem.batch, num_decodes=1, num_decode_tokens=6, decode_query_len=6, _derived={}
    )
    rows = select(problem, BLOCKS_OF_32)
    assert all(map(torch.equal, rows, select(replace(problem, batch=batch), BLOCKS_OF_32)))


def test_scratch_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make([(1, 350), (2, 433), (5, 400)], num_decodes=2, use_nope=True)
    infllm_check.fill(problem)
    whole = select(problem, BLOCKS_OF_32)
    monkeypatch.setattr(index_launch, "SCRATCH_ELEMENTS", 64)
    monkeypatch.setattr(runtime, "_ROW_ELEMENTS", 1)
    assert all(map(torch.equal, whole, select(problem, BLOCKS_OF_32)))


@pytest.mark.parametrize("num_sms", [1, 2, 3, 100])
def test_programs_that_share_a_context(num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infllm_launch, "multiprocessors", lambda _: num_sms)
    problem = make([(1, 4700), (1, 300)], num_decodes=2, page_size=64, heads=1)
    infllm_check.fill(problem)
    infllm_check.check(problem, BLOCKS_OF_64)


def test_equal_scores_go_to_the_lower_index() -> None:
    problem = make([(1, 640)], num_decodes=1, page_size=64)
    problem.keys[0] = torch.ones_like(problem.keys[0])
    infllm_check.fill(problem)
    (chosen,) = select(problem, BLOCKS_OF_64)
    assert chosen.tolist() == [list(range(1, 1 + BLOCKS_OF_64.scored_blocks))] * 2


def test_scores_of_nan_queries_stay_in_range() -> None:
    problem = make([(1, 640)], num_decodes=1, page_size=64)
    infllm_check.fill(problem)
    problem.q.fill_(float("nan"))
    (chosen,) = infllm_launch.select(
        problem.operands(problem.q), Segment(problem.batch, BLOCKS_OF_64)
    )
    assert ((chosen >= 1) & (chosen < 10)).all()


def test_padded_requests_write_zeros_or_nothing() -> None:
    problem = make([(1, 500), (1, 40)], num_decodes=2, page_size=64)
    infllm_check.fill(problem)
    before = problem.k_summary.clone()
    problem.batch.seq_lens[1] = 0
    infllm_launch.write_means(problem.k_cache, problem.k_summary, problem.batch)
    out = infllm_check.attend(problem, BLOCKS_OF_64)
    assert torch.equal(before, problem.k_summary)
    assert out[0].isfinite().all()
    assert (out[1] == 0).all()


def test_fp8_cache() -> None:
    problem = make(
        [(1, 500), (1, 290)], num_decodes=2, page_size=64, cache_dtype=torch.float8_e4m3fn
    )
    infllm_check.fill(problem, scales=(0.5, 0.25))
    infllm_check.check_means(problem)
    chosen = infllm_check.Chosen(problem, BLOCKS_OF_64, k_scale=0.5)
    assert [chosen.of_row(row) is None for row in range(2)] == [False, False]


@pytest.mark.parametrize("dim", [8, 40, 80, 128, 256])
@pytest.mark.parametrize("page_size", [16, 48, 64, 128])
def test_means_fit_the_room_of_pages(page_size: int, dim: int) -> None:
    room = torch.zeros(2, 3, summary_bytes(page_size, dim), dtype=torch.uint8)
    assert view_means(room, page_size, dim).shape == (2, 3, page_size // 16, dim)


def test_only_gpus_keep_means() -> None:
    problem = make([(1, 40)], num_decodes=1, device="cpu")
    before = problem.k_summary.clone()
    write_index(
        problem.k_cache, problem.v_cache, problem.k_summary, problem.batch, BLOCKS_OF_64, InfLLM()
    )
    assert torch.equal(problem.k_summary, before)


def test_a_rotation_that_kernels_would_misread() -> None:
    problem = make([(1, 40)], num_decodes=1, device="cpu")
    table = infllm_check.rotation(40, 32, "cpu")

    def checked(rotation: torch.Tensor | None) -> None:
        check_rotation(replace(problem.batch, rotation=rotation, _derived={}), problem.k_cache)

    checked(None)
    checked(table)
    with pytest.raises(TypeError, match=r"batch\.rotation"):
        checked(table.double())
    with pytest.raises(ValueError, match=r"batch\.rotation: expected a contiguous tensor"):
        checked(table.t().contiguous().t())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("use_nope", [False, True], ids=["rotated", "use_nope"])
def test_at_real_sizes(use_nope: bool) -> None:
    """MiniCPM4's heads and budget: a decode at 16k beside the last chunk of a prompt."""
    policy = INFLLM(num_sink=64, window_size=2048, top_k=63, dense_below=8192)
    problem = make(
        [(1, 16384), (512, 12000)],
        use_nope=use_nope,
        num_decodes=1,
        heads=2,
        group=16,
        dim=128,
        page_size=64,
        dtype=torch.bfloat16,
        head_major=True,
        query_gain=1.0,
    )
    infllm_check.fill(problem, cuts=(0.1234, 0.5, 0.871, 1.0))
    infllm_check.check_means(problem)
    out = attend(problem, policy)
    assert out.isfinite().all()
    infllm_check.check_rows(problem, policy, out, [0, 1, 2, 257, 511, 512])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_a_million_tokens_of_context() -> None:
    """16,384 blocks compete, and about 200 programs share each KV head's averages."""
    problem = make(
        [(1, 1 << 20)],
        num_decodes=1,
        heads=2,
        group=16,
        dim=128,
        page_size=64,
        dtype=torch.bfloat16,
        head_major=True,
        query_gain=1.0,
    )
    infllm_check.fill(problem)
    policy = INFLLM(num_sink=64, window_size=2048, top_k=63)
    infllm_check.check_rows(problem, policy, attend(problem, policy), [0])


def attend(problem: Problem, policy: SelectionPolicy) -> torch.Tensor:
    """A layer as a server runs it: means of the cells that the step completes, then attention."""
    write_index(
        problem.k_cache, problem.v_cache, problem.k_summary, problem.batch, policy, InfLLM()
    )
    return paged_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.batch,
        StepPolicy(policy, policy),
        k_summary=problem.k_summary,
        indexers=infllm_check.INDEXERS,
        out=torch.full_like(problem.q, float("nan")),
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("use_nope", [False, True], ids=["rotated", "use_nope"])
def test_graph_replay_with_other_lengths(use_nope: bool) -> None:
    problem = make(
        [(1, 4000), (1, 3000), (1, 2000)],
        use_nope=use_nope,
        num_decodes=3,
        heads=2,
        group=16,
        dim=128,
        page_size=64,
        dtype=torch.bfloat16,
        max_seq_len=131072,
    )
    infllm_check.fill(problem)
    out = torch.empty_like(problem.q)

    def step() -> None:
        write_kv(
            problem.keys[0][-1:],
            problem.values[0][-1:],
            problem.k_cache,
            problem.v_cache,
            None,
            problem.slots[0][-1:],
        )
        write_index(
            problem.k_cache,
            problem.v_cache,
            problem.k_summary,
            problem.batch,
            BLOCKS_OF_64,
            InfLLM(),
        )
        paged_attention(
            problem.q,
            problem.k_cache,
            problem.v_cache,
            problem.batch,
            StepPolicy(BLOCKS_OF_64, BLOCKS_OF_64),
            k_summary=problem.k_summary,
            indexers=infllm_check.INDEXERS,
            out=out,
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([4000, 3000, 2000], [1, 70, 1999], [3904, 0, 300], [640, 641, 703]):
        problem.batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        problem.q.normal_()
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, infllm_check.attend(problem, BLOCKS_OF_64))
        exact = replace(
            problem,
            batch=replace(
                problem.batch, max_seq_len=4000, seq_lens_host=tuple(lengths), _derived={}
            ),
        )
        rows = [row for row, length in enumerate(lengths) if length]
        infllm_check.check_rows(exact, BLOCKS_OF_64, replayed, rows)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_a_second_layer_replays_the_launches_of_the_first() -> None:
    """One step: layers share the batch, and the second's tensors lie elsewhere."""
    layers = [
        make([(1, 896), (1, 704)], num_decodes=2, page_size=64, dtype=torch.bfloat16)
        for _ in range(2)
    ]
    layers[1].q.normal_()
    for layer in layers:
        layer.batch = layers[0].batch
        infllm_check.fill(layer, cuts=(0.99,))
        out = attend(layer, BLOCKS_OF_64)
        infllm_check.check_means(layer)
        assert torch.equal(out, infllm_check.attend(layer, BLOCKS_OF_64))
    batch = layers[0].batch
    [segment] = plan_step(batch, StepPolicy(BLOCKS_OF_64, BLOCKS_OF_64))
    for replays in (batch.derived("replays of writes", dict), segment.replays):
        [replay] = replays.values()
        assert replay is not None
