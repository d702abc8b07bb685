"""Kernels are run before the first prompt: which shapes, through which layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparsek_backend.vllm_backend.sparsek import impl as impl_module
from sparsek_backend.vllm_backend.sparsek.warmup import (
    decode_shapes,
    made_up_prefill,
    prefill_shapes,
    warm_up,
)
from sparsek_backend.vllm_backend.stats import STATS
from sparsek_kernels.paged.attend.config import decode_config, prefill_config
from sparsek_kernels.paged.index.two_step.config import score_config
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment, plan_step
from sparsek_kernels.paged.policy import SelectionPolicy
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
        assert set(batch.seq_lens.tolist()) == {batch.max_seq_len}
        assert tokens == sum(batch.query_lens)
        calls.append((segment.policy, batch.max_seq_len, tokens))
        real(operands, segment, index)

    monkeypatch.setattr(impl_module, "attend_segment", attend_segment)
    return calls


def test_shapes_of_long_prompts() -> None:
    found = prefill_shapes(LONG, 20_000, 256, 5)
    assert [shape for shape in found if shape[0] == 6144] == [
        *((6144, tokens, 1) for tokens in (1, 64, 128, 192, 256)),
        *((6144, 256, prompts) for prompts in (2, 3, 4, 5)),
    ]
    contexts = [6144, 8192, 12288, 16384, 20_000]
    assert list(dict.fromkeys(context for context, *_ in found)) == contexts
    longer = prefill_shapes(LONG, 20_000, 8192, 1)
    assert [shape for shape in longer if shape[1] == min(shape[0], 8192)] == [
        (context, min(context, 8192), 1) for context in contexts
    ]


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize(
    ("most", "longest"), [(1024, 32768), (1024, 131072), (8192, 131072), (2048, 1 << 20)]
)
def test_every_prefill_finds_its_kernels(heads: int, most: int, longest: int) -> None:
    """Chunks of every length, of any number of prompts, at contexts of every length."""

    def compiled(tiles: int, context: int) -> tuple[int, int]:
        blocks = -(-context // LONG.sel_block_size)
        common = {"tiles": tiles, "num_kv_heads": heads, "group": 4, "head_dim": 128}
        common |= {"itemsize": 2, "arch": 90, "num_sms": 132}
        scored = score_config(
            samples=LONG.samples,
            blocks=-(-blocks // 16) * 16,
            **common,
        )
        attended = prefill_config(
            tile=LONG.query_tile,
            blocks=min(blocks, max(LONG.budget_blocks, LONG.dense_below // LONG.sel_block_size)),
            sel_block=LONG.sel_block_size,
            **common,
        )
        return scored.splits, attended.splits

    def tiles(tokens: int, prompts: int) -> int:
        return tokens // LONG.query_tile + 2 * prompts

    shapes = prefill_shapes(LONG, longest, most, 256)
    known = {compiled(tiles(tokens, prompts), context) for context, tokens, prompts in shapes}
    sparse = range(shapes[0][0], longest + 1, longest // 64)
    asked = {
        compiled(tiles(tokens, prompts), context)
        for context in sparse
        for tokens in range(1, most + 1, 64)
        for prompts in (1, 2, 7, 30, 256)
        if prompts <= tokens <= context
    }
    for kernel in (0, 1):  # each kernel is compiled by itself
        assert {one[kernel] for one in asked} <= {one[kernel] for one in known}


@pytest.mark.parametrize(("policy", "length"), [(SelectionPolicy(), 1 << 20), (LONG, 2000)])
def test_nothing_to_prepare_where_everything_is_attended(
    policy: SelectionPolicy, length: int
) -> None:
    assert prefill_shapes(policy, length, 8192, 8) == []


def test_shapes_of_decodes() -> None:
    found = decode_shapes(LONG.per_token(), 20_000, 1024)
    assert found[:2] == [(1, 8192), (2, 8192)]
    assert found[-2:] == [(1, 16384), (1, 20_000)]
    assert decode_shapes(LONG.per_token(), 20_000, 3)[:4] == [
        *((1, 8192), (2, 8192), (3, 8192)),
        (1, 16384),
    ]
    dense = decode_shapes(SelectionPolicy(), 20_000, 1024)
    assert {context for _, context in dense} == {8192}


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("policy", [LONG, SelectionPolicy()], ids=["sparse", "dense"])
def test_every_number_of_decodes_finds_its_kernel(policy: SelectionPolicy, heads: int) -> None:
    rule = policy.per_token()

    def compiled(count: int, context: int) -> tuple[int, int]:
        size = rule.sel_block_size
        blocks = -(-context // size)
        config = decode_config(
            tiles=count, num_kv_heads=heads, group=4, head_dim=128, queries=1,
            blocks=min(blocks, rule.budget_blocks) if rule.selects_blocks else blocks,
            sel_block=size, arch=90, num_sms=132,
        )  # fmt: skip
        return config.splits, config.num_warps

    known = {compiled(*shape) for shape in decode_shapes(rule, 131072, 2048)}
    assert known == {compiled(count, 131072) for count in range(1, 2049)}


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
    expected = []
    for policy in dict.fromkeys(layer.impl.policy for layer in layers):
        for requests, context in decode_shapes(policy.decode, 1000, 5):
            expected += [(policy.decode, context, requests)]
        for shape in prefill_shapes(policy.prefill, 1000, 1000, 5):
            batch = made_up_prefill(*shape, 16, torch.device("cpu"))
            for segment in plan_step(batch, policy):
                rows = range(shape[1])[segment.rows]
                expected += [(segment.policy, shape[0], len(rows))]
    assert len(expected) > 4
    assert attended == expected


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


def test_pages_are_laid_out_as_the_engines(current: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer()
    _, spec = make_builder(layer, current)
    seen = []
    monkeypatch.setattr(
        type(layer.impl), "dummy_run", lambda self, layer, cache, batch: seen.append(cache)
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
