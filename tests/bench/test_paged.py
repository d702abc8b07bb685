"""Serving ops of `sparsek bench kernels`: every provider that runs on a CPU passes its gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparsek_backend.bench.ops import OPS
from sparsek_backend.bench.ops.paged import (
    BY_LIST,
    attended_pairs,
    decode_cost,
    prefill_tiles,
    scoring_cost,
)
from sparsek_backend.bench.ops.paged_inputs import make_inputs, wrong_selection
from sparsek_backend.bench.ops.paged_lists import Lists, make_lists
from sparsek_backend.bench.registry import OURS, Case, Param, Provider, Unavailable
from sparsek_backend.bench.spec import parse_spec
from sparsek_backend.bench.workload import load_workloads
from sparsek_backend.patterns.prefill import PrefillPattern
from sparsek_kernels.paged.api import paged_attention, select_blocks
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import select_tile_reference
from sparsek_kernels.paged.sample import CELL_BITS

SMALL: dict[str, Param] = {
    **OPS["paged_prefill"].defaults,
    **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": "float32", "page_size": 64},
    **{"num_sink": 16, "window_size": 64, "top_k": 2, "sel_block_size": 32},
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("max_len", [0, 4096])
@pytest.mark.parametrize("spec", ["1q1s1k", "2q1s1k", "2q1s64", "3q2s300"])
def test_decode_gates(spec: str, max_len: int) -> None:
    case = Case("t", parse_spec(spec), {**SMALL, "max_len": max_len})
    passed = set()
    for provider in OPS["paged_decode"].build(case, CPU):
        try:
            call = provider.prepare()
        except Unavailable:
            continue
        verdict = provider.gate(call())
        assert verdict.passed, (provider.name, verdict.detail)
        passed.add(provider.name)
    assert {OURS, "sparsek_dense"} <= passed


def test_select_gates() -> None:
    for provider in OPS["paged_select"].build(Case("t", parse_spec("2q1s1k"), SMALL), CPU):
        verdict = provider.gate(provider.prepare()())
        assert verdict.passed, (provider.name, verdict.detail)


def test_a_decode_reads_records_and_what_it_attends() -> None:
    inputs = make_inputs(Case("t", parse_spec("1q1s1k"), SMALL), CPU)
    rule = inputs.policy.by_records(2 * 32)
    row = 2 * 32 * 4  # K of a token: two KV heads, 32 dimensions, float32
    records = 1023 * 2 * inputs.k_summary.shape[2] / 64
    _, read = decode_cost(inputs, rule)
    assert read == 2 * row * rule.attended_tokens(1023) + records + 2 * inputs.q.numel() * 4
    _, dense = decode_cost(inputs, SelectionPolicy())
    assert dense == 2 * row * 1024 + 2 * inputs.q.numel() * 4


@pytest.mark.parametrize("query_tile", [32, 64])
def test_prefill_gates(query_tile: int) -> None:
    params = {**SMALL, "chunk": 192, "query_tile": query_tile}
    providers = OPS["paged_prefill"].build(Case("t", parse_spec("q400"), params), CPU)
    ours = next(provider for provider in providers if provider.name == OURS)
    verdict = ours.gate(ours.prepare()())
    assert verdict.passed, verdict.detail


def by_list_case(spec: str = "q512", **params: Param) -> Case:
    """A small prefill by lists, beside the one by scores."""
    options: dict[str, Param] = {
        "chunk": 192,
        "query_tile": 32,
        "dense_last": 32,
        "lists": "random",
    }
    return Case("t", parse_spec(spec), {**SMALL, **options, **params})


def both(case: Case) -> tuple[Provider, Provider]:
    """By scores and by lists."""
    providers = {one.name: one for one in OPS["paged_prefill"].build(case, CPU)}
    return providers[OURS], providers[BY_LIST]


@pytest.mark.parametrize("dense_last", [0, 64])
def test_prefill_by_lists_gates_beside_the_one_by_scores(dense_last: int) -> None:
    ours, by_list = both(by_list_case(dense_last=dense_last))
    out, listed = ours.prepare()(), by_list.prepare()()
    for provider, outputs in ((ours, out), (by_list, listed)):
        verdict = provider.gate(outputs)
        assert verdict.passed, (provider.name, verdict.detail)
    assert not torch.equal(out[0], listed[0])
    assert not by_list.gate(out).passed, "blocks by score are not the list's"
    assert ours.note == by_list.note
    assert "attends" in ours.note
    assert ours.flops > by_list.flops, "a list costs no scoring"


def test_there_are_lists_only_where_a_case_names_them() -> None:
    case = by_list_case(lists="")
    assert BY_LIST not in [provider.name for provider in OPS["paged_prefill"].build(case, CPU)]


def test_the_attended_share_by_lists_is_the_one_that_is_counted() -> None:
    case = by_list_case()
    inputs = make_inputs(case, CPU)
    policy, lists = inputs.policy, make_lists(case, inputs)
    assert lists is not None
    length = 512
    seen = 0
    inputs.v_cache.zero_()
    for key in range(length):  # a key is seen by the queries whose output it moves
        page, row = int(inputs.block_table[0, key // 64]), key % 64
        inputs.v_cache[page, 0, row] = 1.0
        for batch, rows in inputs.chunks([(0, 192), (192, 384), (384, 512)]):
            out = paged_attention(
                inputs.q[rows], inputs.k_cache, inputs.v_cache, batch, policy,
                k_summary=inputs.k_summary, indexers=lists.indexers,
            )  # fmt: skip
            seen += int((out[:, 0, 0] != 0).sum())
        inputs.v_cache[page, 0, row] = 0.0
    assert seen == attended_pairs(policy, range(length), prompt=length)
    assert seen > attended_pairs(policy, range(length))


def test_lists_come_from_a_file_with_heads_in_turn(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    file = tmp_path / "pattern.safetensors"
    entries = torch.tensor([[3, -5, 2], [-4, 1, -6]], dtype=torch.int32)
    PrefillPattern({4: entries}, 32).save(file)
    case = by_list_case(lists=str(file), layer=4, num_heads=6, num_kv_heads=3)
    inputs = make_inputs(case, CPU)
    lists = make_lists(case, inputs)
    assert lists is not None
    assert torch.equal(lists.entries, entries[[0, 1, 0]])
    (found,) = select_blocks(
        inputs.q, inputs.k_cache, inputs.batch((512,), (512,), 0), inputs.policy,
        k_summary=inputs.k_summary, indexers=lists.indexers,
    )  # fmt: skip
    tile = prefill_tiles(inputs)[-1]
    chosen = found[-1, tile.head]
    assert not lists.wrong(chosen, inputs, tile, inputs.policy)
    other = Lists(entries.flip(0)[[0, 1, 0]], lists.indexers)
    assert "its list says" in other.wrong(chosen, inputs, tile, inputs.policy)

    for change, words in (({"layer": 3}, "layer"), ({"sel_block_size": 16}, "lists: expected")):
        with pytest.raises(ValueError, match=words):
            both(by_list_case(lists=str(file), **{"layer": 4, **change}))


def test_a_prefill_that_cannot_be_gated_is_refused() -> None:
    with pytest.raises(ValueError, match="dense_last"):
        both(by_list_case(dense_last=16))


def test_the_workload_of_lists_has_the_default_budget() -> None:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "pattern_prefill.yaml"
    cases = [case for _, case in load_workloads(path)]
    assert [case.spec.text for case in cases] == ["q32k", "q128k"]
    assert cases[0].providers == (OURS, BY_LIST)
    assert cases[0].params["lists"] == "random"


def test_a_wrong_selection_of_a_tile_fails_its_gate() -> None:
    inputs = make_inputs(Case("t", parse_spec("q1k"), {**SMALL, "top_k": 8}), CPU)
    tile, policy = prefill_tiles(inputs)[-1], replace(inputs.policy, top_k=3)
    rule = (*inputs.of_tile(tile), policy, inputs.softmax_scale)
    chosen = torch.tensor(select_tile_reference(*rule).entries[0])
    assert int((chosen >= 0).sum()) > 1

    def verdict(chosen: torch.Tensor) -> str:
        return wrong_selection(chosen, inputs, tile, policy)

    assert not verdict(chosen)
    assert "order" in verdict(chosen.flip(0).where(chosen >= 0, -1))
    assert "is not drawn" in verdict(torch.cat([chosen[1:], chosen.new_tensor([-1])]))
    assert verdict(chosen % (1 << CELL_BITS))


def test_the_cost_of_choosing_counts_means() -> None:
    policy = SelectionPolicy(num_sink=64, window_size=64, top_k=2)
    products, keys = scoring_cost(policy, [(0, 512), (512, 1024)])
    sparse = [base for base in range(0, 1024, 64) if not policy.sees_all(base)]
    means = sum(16 * (base // 16) for base in sparse)  # 16 samples, cells before the tile's block
    assert products == means
    assert keys == 512 + 1024


def test_max_len_is_the_longest_context_that_a_launch_must_serve() -> None:
    inputs = make_inputs(Case("t", parse_spec("2q1s100"), {**SMALL, "max_len": 4096}), CPU)
    batch = inputs.batch((1, 1), (100, 100), 2)
    assert (batch.max_seq_len, batch.seq_lens.tolist()) == (4096, [100, 100])
    assert batch.block_table.shape == (2, 4096 // 64)
    assert len(inputs.k_cache) == 2 * 2  # pages of what is there alone
