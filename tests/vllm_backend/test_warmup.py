"""Kernels are run before the first prompt: which shapes, through which layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsek_backend.vllm_backend.engine import engine_of
from sparsek_backend.vllm_backend.sparsek import impl as impl_module
from sparsek_backend.vllm_backend.sparsek.metadata import SparseKMetadataBuilder, take_memory
from sparsek_backend.vllm_backend.sparsek.warmup import (
    _made_up_steps,
    decode_shapes,
    doubled,
    made_up_prefill,
    prefill_policies,
    prefill_shapes,
    warm_up,
)
from sparsek_backend.vllm_backend.stats import STATS
from sparsek_kernels.paged import scratch
from sparsek_kernels.paged.attend.config import decode_config, prefill_config
from sparsek_kernels.paged.config import most_splits
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment, everything, plan_step
from sparsek_kernels.paged.policy import Growth, SelectionPolicy, StepPolicy
from tests.vllm_backend.layers import (
    building,
    make_builder,
    make_cache,
    make_config,
    make_layer,
    make_spec,
)

pytestmark = pytest.mark.usefixtures("registered")

LONG = SelectionPolicy(num_sink=64, window_size=512, top_k=32, dense_below=4096, query_tile=64)


@pytest.fixture
def current(registered: None, tmp_path: Any) -> Iterator[Any]:
    with building(make_config(tmp_path, max_model_len=1000, max_num_seqs=5)) as config:
        yield config


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SelectionPolicy, int, int]]:
    """Policy, context and query tokens of every call of the paged kernels."""
    calls = []
    real = impl_module.attend_segment

    def attend_segment(operands: PagedOperands, segment: Segment, index: Any) -> None:
        batch, tokens = segment.batch, operands.q.shape[0]
        assert max(batch.seq_lens.tolist()) == batch.max_seq_len
        assert tokens == sum(batch.query_lens)
        calls.append((segment.policy, batch.max_seq_len, tokens))
        real(operands, segment, index)

    monkeypatch.setattr(impl_module, "attend_segment", attend_segment)
    return calls


@pytest.mark.parametrize("most", [-1, 0, 1, 2, 3, 33, 64, 65, 640])
def test_doubled_numbers_end_at_the_most(most: int) -> None:
    found = doubled(most)
    assert found[-1:] == ([most] if most > 0 else [])
    assert found[:1] == ([1] if most > 0 else [])
    assert all(a < b <= 2 * a for a, b in pairwise(found))


def test_shapes_of_long_prompts() -> None:
    least = 8192
    assert prefill_shapes(LONG, 20_000, 256, 5) == [
        *((context, tokens, 1, least) for context, tokens in ((least, 64), (16384, 64))),
        (20_000, 32, 1, least),
        *((20_000, tokens, 1, least) for tokens in (64, 128, 256)),
        *((20_000, 256, prompts, least) for prompts in (2, 4, 5)),
    ]


@pytest.mark.parametrize("sms", [78, 132, 148])
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize(
    ("most", "longest"), [(1024, 32768), (1024, 131072), (8192, 131072), (2048, 1 << 20)]
)
@pytest.mark.parametrize("policy", [LONG, everything(LONG)], ids=["sparse", "dense"])
def test_every_prefill_finds_its_kernels(
    policy: SelectionPolicy, heads: int, most: int, longest: int, sms: int
) -> None:
    """Chunks of every length, of any number of prompts, at contexts of every length."""

    @cache
    def compiled(tiles: int, context: int) -> int:
        blocks = -(-context // policy.sel_block_size)
        most_blocks = max(policy.budget_blocks, policy.dense_below // policy.sel_block_size)
        config = prefill_config(
            tiles=tiles, num_kv_heads=heads, group=4, head_dim=128, tile=LONG.query_tile,
            blocks=min(blocks, most_blocks) if policy.selects_blocks else blocks,
            sel_block=policy.sel_block_size, itemsize=2, arch=90, num_sms=sms,
            fits_hopper=policy.selects_blocks,
        )  # fmt: skip
        return most_splits(config.splits)

    def tiles(context: int, tokens: int, prompts: int, least: int) -> int:
        counts = [tokens // prompts + (index < tokens % prompts) for index in range(prompts)]
        lengths = [context, *(max(least, count) for count in counts[1:])]
        tile = LONG.query_tile
        pairs = zip(lengths, counts, strict=True)
        return sum((length - 1) // tile - (length - count) // tile + 1 for length, count in pairs)

    shapes = prefill_shapes(policy, longest, most, 256)
    known = {compiled(tiles(*shape), shape[0]) for shape in shapes}
    asked = {
        compiled(tiles(context, tokens, prompts, context), context)
        for context in range(shapes[0][0], longest + 1, longest // 64)
        for tokens in range(1, most + 1, 64)
        for prompts in (1, 2, 7, 30, 256)
        if prompts <= tokens <= context
    }
    assert asked <= known


@pytest.mark.parametrize(("length", "tokens"), [(2000, 8192), (4096, 8192)])
def test_nothing_to_prepare_where_everything_is_attended(length: int, tokens: int) -> None:
    assert prefill_shapes(LONG, length, tokens, 8) == []


def test_our_kernels_attend_dense_prompts_without_flash_attention() -> None:
    dense, window = SelectionPolicy(), SelectionPolicy(window_size=512)
    last = replace(window, dense_last=64)
    assert prefill_policies(LONG, 20_000, True) == [(LONG, 20_000)]
    assert prefill_policies(LONG, 20_000, False) == [(LONG, 20_000), (everything(LONG), 20_000)]
    assert prefill_policies(dense, 20_000, True) == prefill_policies(last, 20_000, True) == []
    assert prefill_policies(dense, 20_000, False) == [(dense, 20_000)]
    assert prefill_policies(window, 20_000, False) == [(window, 20_000)]
    # chunks have no ends
    assert prefill_policies(last, 20_000, False) == [(window, 20_000), (everything(window), 20_000)]


def test_prompts_whose_tiles_do_not_grow_have_kernels_of_their_own() -> None:
    growing = replace(LONG, growth=Growth(start=16_000, every=8, end=20_000))
    assert prefill_policies(growing, 20_000, True) == [(growing, 20_000), (LONG, 16_512)]
    assert prefill_policies(growing, 16_512, True) == [(LONG, 16_512)]


def test_shapes_of_decodes() -> None:
    rule = LONG.by_records(3072)
    assert decode_shapes(rule, 13, 12, 8) == [
        *((count, context) for count in (1, 4) for context in (1, 2, 4, 8, 13)),
        *((count, 13) for count in (2, 8, 12)),
    ]
    assert decode_shapes(rule, 4, 1, 8) == [(1, 1), (1, 2), (1, 4)]
    assert decode_shapes(rule, 13, 1, 8, 3) == [(1, 3), (1, 4), (1, 8), (1, 13)]
    dense = decode_shapes(SelectionPolicy(), 20_000, 1024, 8)
    assert max(context for _, context in dense) == 8192


@pytest.mark.parametrize("sms", [78, 132, 148])
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("policy", [LONG, SelectionPolicy()], ids=["sparse", "dense"])
@pytest.mark.parametrize("most", [3, 16, 300, 2048])
def test_every_number_of_decodes_finds_its_kernel(
    most: int, policy: SelectionPolicy, heads: int, sms: int
) -> None:
    rule = policy.by_records(3072)

    def compiled(count: int, context: int) -> tuple[int, int]:
        size = rule.sel_block_size
        blocks = -(-context // size)
        config = decode_config(
            tiles=count, num_kv_heads=heads, group=4, head_dim=128, queries=1,
            blocks=min(blocks, rule.budget_blocks) if rule.selects_blocks else blocks,
            sel_block=size, arch=90, num_sms=sms,
        )  # fmt: skip
        return most_splits(config.splits), config.num_warps

    known = {compiled(*shape) for shape in decode_shapes(rule, 131072, most, heads)}
    contexts = [(131072 * step) // 64 for step in range(1, 65)]
    contexts += range(1, 4096, 48)
    counts = [count for count in (*range(1, 100), *range(100, 700, 7)) if count <= most]
    asked = {compiled(count, context) for context in contexts for count in counts}
    assert asked <= known


def test_pages_that_are_built_again_run_nothing(
    current: Any, attended: list[tuple[SelectionPolicy, int, int]]
) -> None:
    """vLLM builds them once to measure CUDA graphs, and once to serve."""
    layer = make_layer()
    _, spec = make_builder(layer, current)
    for _ in range(2):
        warm_up([layer], spec, current, torch.device("cpu"))
        steps = list(attended)
    assert steps
    assert attended == steps
    attended.clear()
    warm_up([layer], replace(spec, block_size=2 * spec.block_size), current, torch.device("cpu"))
    assert attended


def prefill_segments(
    shape: tuple[int, int, int, int], policy: StepPolicy
) -> list[tuple[SelectionPolicy, int, int]]:
    """Policy, context and rows of the calls that attend a made-up prefill."""
    segments = plan_step(made_up_prefill(*shape, 16, torch.device("cpu")), policy)
    return [(x.policy, x.batch.max_seq_len, len(range(shape[1])[x.rows])) for x in segments]


def test_a_batch_invariant_engine_prepares_for_records_of_a_whole_step(
    current: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    impl = make_layer().impl
    monkeypatch.setattr(impl, "batch_invariant", True)
    steps = _made_up_steps(impl, 16, current, torch.device("cpu"), 1)
    assert sorted(sum(batch.query_lens) for batch, _ in steps) == [1, 2, 1000]


def test_each_kind_of_layer_runs_once_and_is_not_counted(
    current: Any, attended: list[tuple[SelectionPolicy, int, int]]
) -> None:
    layers = [make_layer(index) for index in range(3)] + [
        make_layer(3, per_layer_sliding_window=48)
    ]
    for layer in layers:
        make_builder(layer, current)
    before = STATS.forward_calls, STATS.steps
    warm_up(layers, make_spec(layers[0], current), current, torch.device("cpu"))
    assert (STATS.forward_calls, STATS.steps) == before
    expected, heads = [], layers[0].impl.num_kv_heads
    for policy in dict.fromkeys(layer.impl.policy for layer in layers):
        expected += prefill_segments((1000, 1000, 1, 1000), policy)
        for requests, context in decode_shapes(policy.decode, 1000, 5, heads):
            expected += [(policy.decode, context, requests)]
        for prefill, longest in prefill_policies(policy.prefill, 1000, False):
            for shape in prefill_shapes(prefill, longest, 1000, 5):
                expected += prefill_segments(shape, replace(policy, prefill=prefill))
    assert len(expected) > 4
    assert attended == expected


@pytest.mark.parametrize("query_len", [2, 4])
def test_an_engine_that_speculates_prepares_for_its_drafts(
    query_len: int, current: Any, attended: list[tuple[SelectionPolicy, int, int]]
) -> None:
    layer = make_layer()
    _, spec = make_builder(layer, current)
    warm_up([layer], spec, current, torch.device("cpu"), query_len)
    decodes = [call for call in attended if call[0] == layer.impl.policy.decode]
    assert min(context for _, context, _ in decodes) == query_len
    assert {tokens % query_len for _, _, tokens in decodes} == {0}


def test_a_rank_that_attends_for_others_prepares_for_all_of_their_heads(
    current: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer()
    _, spec = make_builder(layer, current)
    monkeypatch.setattr(layer.impl, "dcp_world_size", 2)
    monkeypatch.setattr(layer.impl, "sinks", torch.zeros(layer.impl.num_heads))
    seen = []

    def attend_segment(operands: PagedOperands, *_: Any) -> None:
        assert operands.sinks is not None
        seen.append((operands.q.shape[1], operands.sinks.shape[0]))

    monkeypatch.setattr(impl_module, "attend_segment", attend_segment)
    warm_up([layer], spec, current, torch.device("cpu"))
    assert set(seen) == {(2 * layer.impl.num_heads, 2 * layer.impl.num_heads)}


def test_the_rows_of_every_step_are_written_nowhere(
    current: Any, attended: list[tuple[SelectionPolicy, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer()
    _, spec = make_builder(layer, current)
    written = []

    def write_kv(key: torch.Tensor, value: torch.Tensor, *rest: Any, **_: Any) -> None:
        k_cache, _, k_summary, slots = rest
        assert key.shape == value.shape == (len(slots), *k_cache.shape[1::2])
        assert k_summary is not None
        assert (slots == -1).all()
        written.append(len(slots))

    monkeypatch.setattr(impl_module, "write_kv", write_kv)
    warm_up([layer], spec, current, torch.device("cpu"))
    assert {1, 5} < set(written)  # decodes, as many as there are
    assert max(written) > 256  # rows and records in two launches
    assert set(written) >= {tokens for *_, tokens in attended if tokens <= 5}


def test_pages_are_laid_out_as_the_engines(current: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer()
    _, spec = make_builder(layer, current)
    seen = []
    monkeypatch.setattr(
        type(layer.impl), "dummy_run", lambda self, layer, cache, *_: seen.append(cache)
    )
    warm_up([layer], spec, current, torch.device("cpu"))
    expected = make_cache(spec, 2)
    assert seen
    assert all(cache.stride() == expected.stride() for cache in seen)
    assert all(cache.shape[1:] == expected.shape[1:] for cache in seen)


def test_scratch_is_not_made_in_the_memory_pool_of_sleep_mode(
    current: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That pool takes the allocations of the thread that makes the pages, and of no other."""
    layer = make_layer()
    _, spec = make_builder(layer, current)
    threads = []
    monkeypatch.setattr(
        type(layer.impl), "dummy_run", lambda *_: threads.append(threading.get_ident())
    )
    warm_up([layer], spec, current, torch.device("cpu"))
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


def test_layers_run_while_vllm_measures_memory(
    current: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, by the pages that they will have; a window's are settled later."""
    layers = [make_layer(index) for index in range(2)]
    make_layer(2, per_layer_sliding_window=48)
    built: list[Any] = []
    monkeypatch.setattr(SparseKMetadataBuilder, "__init__", lambda _, *given: built.append(given))
    with FakeTensorMode():
        query = torch.empty(8, 4, 32, device="cuda")
        key = torch.empty(8, 2, 32, device="cuda")
        for layer in (*layers, *layers):
            layer.impl.forward(layer, query, key, key, key, None, torch.empty_like(query))
    (names,) = [names for _, names, *_ in built]
    assert names == [layer.layer_name for layer in layers]
    ((spec, _, config, device),) = built
    assert (spec, config, device.type) == (make_spec(layers[0], current), current, "cuda")


def test_what_ran_while_memory_was_measured_is_not_run_for_the_pages(
    current: Any, attended: list[tuple[SelectionPolicy, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer()
    never = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(SparseKMetadataBuilder, "on_host", never, raising=False)
    take_memory(current, torch.device("cpu"))
    assert layer.impl.policy.selects_blocks
    assert attended
    attended.clear()
    make_builder(layer, current)
    assert not attended


def test_on_a_cpu_nothing_runs_for_memory(
    current: Any, attended: list[tuple[SelectionPolicy, int, int]]
) -> None:
    layer, query = make_layer(), torch.zeros(8, 4, 32)
    key = torch.zeros(8, 2, 32)
    layer.impl.forward(layer, query, key, key, key, None, torch.empty_like(query))
    assert not attended
    assert not engine_of(current).dummy_run_done


def test_held_scratch_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_workspaces", {})
    cpu = torch.device("cpu")
    scratch.workspace(cpu, "parts", 3000, torch.float32)
    scratch.workspace(cpu, "parts", 2500, torch.float32)  # is the same
    scratch.workspace(cpu, "keys", 100, torch.int8)
    assert scratch.held_bytes(cpu) == 4 * 4096 + 1024
    assert scratch.held_bytes(torch.device("cuda", 0)) == 0
