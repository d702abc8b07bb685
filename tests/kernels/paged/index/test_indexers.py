"""Indexers as the other half sees them: one from this file, those of no use, one cut a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from sparsek_kernels.paged import (
    CellMeans,
    Chosen,
    Indexer,
    Indexers,
    InfLLM,
    PageRecords,
    SelectionPolicy,
    StepPolicy,
    attend_segment,
    paged_attention,
    plan,
    select_blocks,
)
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment, each_segment, plan_step
from sparsek_kernels.paged.reference import gather_sequence
from tests.kernels.paged.cache_cases import Case, make_case, run

MIXED = ([400, 61, 300, 333, 129], [1, 3, 300, 40, 64], 2)
TILE, SIZE, SLOTS = 32, 16, 2
TILES = SelectionPolicy(num_sink=16, window_size=32, top_k=3, sel_block_size=SIZE, query_tile=TILE)
STEP = StepPolicy(TILES, TILES.per_token())
BY_RECORDS = StepPolicy(TILES, TILES.by_records(48))


class Backwards(Indexer):
    """KV head ``h`` takes every ``h + 1``-th block, from the newest on; no key is looked at."""

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        policy, batch, rows = segment.policy, segment.batch, []
        for length, count in zip(batch.seq_lens.tolist(), batch.query_lens, strict=True):
            first = (length - count) // policy.query_tile * policy.query_tile
            for position in range(first, length, policy.query_tile):
                newest = policy.candidate_range(position)[1] - 1
                back = torch.arange(policy.scored_blocks - 1, -1, -1)
                blocks = newest - back * torch.arange(1, operands.heads + 1)[:, None]
                rows.append(blocks.clamp(-1, -1) if policy.sees_all(position) else blocks)
        return Chosen(torch.stack(rows).to(torch.int32))


def seen_by_hand(position: int, tile: int, head: int) -> torch.Tensor:
    """Keys that a query sees: sinks in block 0, a window of three blocks, two blocks that it chose.

    Of a tile all queries see what the first one chose.
    """
    own = position // tile * tile // SIZE
    block = torch.arange(position + 1) // SIZE
    if own - 3 <= SLOTS:  # blocks between sinks and window
        return torch.ones(position + 1, dtype=torch.bool)
    return (block == 0) | (block >= own - 2) | (block == own - 3) | (block == own - 4 - head)


def attention_by_hand(case: Case) -> torch.Tensor:
    out, row = torch.full(case.q.shape, float("nan"), dtype=torch.float64), 0
    group = case.q.shape[1] // case.k_cache.shape[1]
    for request, length in enumerate(case.batch.seq_lens.tolist()):
        pages, count = case.batch.block_table[request], case.batch.query_lens[request]
        tile = 1 if request < case.batch.num_decodes else TILE
        keys, values = (gather_sequence(x, pages, length) for x in (case.k_cache, case.v_cache))
        for position in range(length - count, length):
            for head in range(case.k_cache.shape[1]):
                seen = seen_by_hand(position, tile, head).nonzero()[:, 0]
                heads = slice(head * group, (head + 1) * group)
                out[row, heads] = F.scaled_dot_product_attention(
                    case.q[row, heads, None].double(),
                    keys[seen, head].double().expand(group, -1, -1),
                    values[seen, head].double().expand(group, -1, -1),
                )[:, 0]
            row += 1
    return out


def test_an_indexer_from_one_file_is_served() -> None:
    case = make_case(*MIXED)
    indexers = Indexers(Backwards(), Backwards())
    found = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, STEP, indexers=indexers)
    torch.testing.assert_close(found.double(), attention_by_hand(case), atol=2e-5, rtol=1e-4)
    chosen = select_blocks(case.q, case.k_cache, case.batch, STEP, indexers=indexers)
    assert [len(rows) for rows in chosen] == [1, 3, 10, 2, 3]
    assert chosen[0].tolist() == [[[20, 21], [19, 21]]]
    assert chosen[3].tolist() == [  # tiles at 288 and 320
        [[14, 15], [13, 15]],
        [[16, 17], [15, 17]],
    ]


def test_a_phase_without_its_indexer() -> None:
    case = make_case(*MIXED)
    alone = Indexers(None, PageRecords())
    for phase, given in (("prefill", alone), ("decode", Indexers(CellMeans()))):
        with pytest.raises(ValueError, match=f"indexers.{phase}: expected an indexer .*, got None"):
            run(case, BY_RECORDS, indexers=given)
    run(case, StepPolicy(SelectionPolicy(), BY_RECORDS.decode), indexers=alone)


def test_two_indexers_do_not_share_the_bytes_of_a_page() -> None:
    with pytest.raises(ValueError, match="one kind that reads the pages, got InfLLM and PageRec"):
        Indexers(InfLLM(), PageRecords())


def test_indexers_of_the_other_phase() -> None:
    case = make_case(*MIXED)
    with pytest.raises(ValueError, match="policy: expected query_tile > 1 with CellMeans, got 1"):
        run(case, STEP, indexers=Indexers(CellMeans(), CellMeans()))
    with pytest.raises(ValueError, match=r"policy: .* query_tile = 1 with PageRecords, got 32"):
        run(case, BY_RECORDS, indexers=Indexers(PageRecords(), PageRecords()))


def test_indexers_that_follow_no_alignment() -> None:
    step, case = StepPolicy(SelectionPolicy(), BY_RECORDS.decode), make_case(*MIXED)
    with pytest.raises(ValueError, match=r"policy: expected alignment 0 with InfLLM, got 64"):
        run(case, step, indexers=Indexers(decode=InfLLM()))
    whole_blocks = StepPolicy(SelectionPolicy(), STEP.decode)
    with pytest.raises(ValueError, match=r"policy: expected alignment 64 and sel_block_size 2 .*"):
        run(case, whole_blocks, indexers=Indexers(decode=PageRecords()))


def test_a_step_is_cut_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[StepPolicy] = []
    cut = plan._segments

    def spy(batch: object, policy: StepPolicy, *rest: object) -> tuple[Segment, ...]:
        cuts.append(policy)
        return cut(batch, policy, *rest)

    monkeypatch.setattr(plan, "_segments", spy)
    layers = [make_case(*MIXED, seed=seed, permute=0) for seed in range(3)]
    step = StepPolicy(replace(TILES, dense_last=20), BY_RECORDS.decode)
    indexers = Indexers(CellMeans(), PageRecords())
    for layer in layers:
        layer.batch = layers[0].batch
        out = torch.full_like(layer.q, float("nan"))
        operands = PagedOperands(
            layer.q, layer.k_cache, layer.v_cache, out, 32**-0.5, layer.k_summary
        )
        for mine, segment in each_segment(operands, plan_step(layer.batch, step)):
            attend_segment(mine, segment, indexers.of(segment))
        assert torch.equal(out, run(layer, replace(TILES, dense_last=20)))
    assert cuts == [step]
    run(layers[0], TILES)
    assert cuts == [step, BY_RECORDS]
