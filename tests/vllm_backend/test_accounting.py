"""Counts of attended keys, and what is told about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_backend.config import resolve_config
from sparsek_backend.config_effects import describe_idle_settings
from sparsek_backend.vllm_backend.accounting import Accounting, query_positions
from sparsek_backend.vllm_backend.keys import Keys
from sparsek_backend.vllm_backend.report import (
    describe_layers,
    describe_model_selection,
    format_ranges,
)
from sparsek_backend.vllm_backend.stats import LOG_INTERVAL, EngineStats
from sparsek_kernels.fallback import count_fallback
from sparsek_kernels.paged.policy import Growth, SelectionPolicy, StepPolicy

policies = st.one_of(
    st.just(SelectionPolicy()),
    st.builds(
        SelectionPolicy,
        num_sink=st.integers(0, 200),
        window_size=st.integers(1, 700),
        top_k=st.sampled_from([0, 1, 2, 7, 32]),
        sel_block_size=st.sampled_from([16, 32, 64, 128]),
        dense_below=st.sampled_from([0, 1, 100, 1024]),
        dense_last=st.sampled_from([0, 1, 64, 1024]),
        query_tile=st.sampled_from([1, 16, 64, 100]),
        last_part=st.sampled_from([0, 8, 16]),
    ),
)


@settings(deadline=None, max_examples=100)
@given(
    policies,
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 90), st.integers(-99, 99)), max_size=6),
    st.integers(0, 6),
    st.booleans(),
)
def test_batches(
    policy: SelectionPolicy, requests: list[tuple[int, int, int]], decodes: int, known: bool
) -> None:
    decodes = min(decodes, len(requests))
    seq_lens = np.array([before + new for before, new, _ in requests], dtype=np.int64)
    query_lens = np.array([new for _, new, _ in requests], dtype=np.int64)
    prompt_left = tuple(left for _, _, left in requests) if known else None
    step = StepPolicy.of(policy)
    expected = [0, 0]
    for index, (before, new, left) in enumerate(requests):
        rule = step.decode if index < decodes else step.prefill
        prompt = before + new + (left if known else 0)
        count, part = step.prefill.dense_last, step.prefill.last_part
        if part:
            count = min(count, max(64, prompt // part) if known else 64)
        for position in range(before, before + new):
            last = prompt - count <= position < prompt
            last &= known or index >= decodes
            first = before if index < decodes else None  # of what decoded tokens share
            keys = position + 1 if last else rule.attended_tokens(position, first)
            expected[index < decodes] += keys
    found = Accounting(step).count(seq_lens, query_lens, decodes, prompt_left)
    assert found == tuple(expected)


def test_positions() -> None:
    found = query_positions(np.array([5, 3, 9]), np.array([2, 0, 3]))
    assert found.tolist() == [3, 4, 6, 7, 8]


def test_share_of_an_8k_decode() -> None:
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=16)
    assert policy.by_records(1024).attended_tokens(8191) / 8192 <= 0.21


def test_totals_share_and_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stats = EngineStats(_last_log=0.0)
    assert stats.attended_share == 1.0
    assert stats.record_step(Keys(50), Keys(100)) is None
    clock[0] = LOG_INTERVAL + 1
    line = stats.record_step(Keys(50), Keys(300))
    assert line is not None
    assert "attended 25.0% of the context in prefill (since start 25.0%), fallback" in line
    assert stats.record_step(Keys(1, 3), Keys(2, 30)) is None
    clock[0] *= 2
    line = stats.record_step(Keys(99, 0), Keys(98, 0))
    assert line is not None
    assert (
        "attended 100.0% of the context in prefill (since start 40.0%) and 10.0% of the context in "
        "decode (since start 10.0%), fallback calls: "
    ) in line
    assert (stats.steps, stats.attended, stats.context) == (4, (200, 3), (500, 30))
    assert stats.attended_share == 203 / 530
    clock[0] *= 2
    assert stats.record_step(Keys(), Keys()) is None


def test_prometheus_metrics() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    from sparsek_backend.config import FIELD_NAMES, SparsityConfig
    from sparsek_backend.vllm_backend.metrics import EngineMetrics

    labels = {"model_name": "a test's model", "engine": "3"}

    def sample(name: str, **more: str) -> float | None:
        value: float | None = prometheus.REGISTRY.get_sample_value(name, {**labels, **more})
        return value

    config = SparsityConfig(top_k=7, dense_layers=(0, 2))
    metrics = EngineMetrics(labels, config)
    settings = {name: str(getattr(config, name)) for name in FIELD_NAMES}
    assert sample("sparsek_settings_info", **settings) == 1
    assert (settings["top_k"], settings["dense_layers"]) == ("7", "(0, 2)")
    metrics.record_step(Keys(), Keys())
    reason = "a test's reason"
    count_fallback(reason)
    for _ in range(2):
        metrics.record_step(Keys(3, 1), Keys(7, 8), selection_seconds=0.25, attention_seconds=1.0)
    assert sample("sparsek_attended_tokens_total", phase="prefill") == 6
    assert sample("sparsek_attended_tokens_total", phase="decode") == 2
    assert sample("sparsek_context_tokens_total", phase="prefill") == 14
    assert sample("sparsek_context_tokens_total", phase="decode") == 16
    assert sample("sparsek_selection_seconds_total") == 0.5
    assert sample("sparsek_attention_seconds_total") == 2.0
    assert sample("sparsek_fallback_total", reason=reason) == 1


def test_ranks_that_share_heads_log_once() -> None:
    stats = EngineStats(_last_log=float("-inf"))
    assert stats.record_step(Keys(3), Keys(7), log=False) is None
    assert stats.attended == (3, 0)
    assert stats.record_step(Keys(3), Keys(7)) is not None


@pytest.mark.parametrize(
    ("settings", "idle", "cause", "only"),
    [
        ({"query_tile": 1}, "top_k", "query_tile 1", "decode_tokens, 512"),
        ({"sparse_phase": "decode"}, "top_k", "sparse_phase decode", "decode_tokens, 512"),
        ({"sparse_phase": "prefill"}, "decode_tokens", "sparse_phase prefill", "top_k, 8"),
        ({"sparse_phase": "prefill", "query_tile": 1}, "top_k", "query_tile 1", "decode_tokens"),
    ],
    ids=str,
)
def test_the_line_of_a_budget_that_nothing_selects_by(
    settings: dict[str, Any], idle: str, cause: str, only: str
) -> None:
    budgets = {"top_k": 8, "decode_tokens": 512}
    resolved = resolve_config({**settings, **budgets}, {})
    (line,) = describe_idle_settings(resolved)
    assert line.startswith(f"SPARSEK setting {idle} (from --additional-config ")
    assert f"has no effect with {cause} (from " in line
    assert f"leaves one budget: {only}" in line
    assert line.endswith(f"remedy: set {only.partition(',')[0]} instead")
    policy = resolved.config.policy_for(0)
    budgets[idle] = 4
    assert resolve_config({**settings, **budgets}, {}).config.policy_for(0) == policy
    del budgets[idle]
    assert describe_idle_settings(resolve_config({**settings, **budgets}, {})) == []
    assert describe_idle_settings(resolve_config(settings, {}, {"topk": 9})) == []


def test_both_budgets_are_selected_by_or_said_to_be_idle() -> None:
    budgets = {"top_k": 8, "decode_tokens": 512}
    assert describe_idle_settings(resolve_config(budgets, {})) == []
    assert describe_idle_settings(resolve_config(None, {"SPARSEK_MODE": "dense"})) == []
    (line,) = describe_idle_settings(resolve_config(None, {"SPARSEK_TOP_K": "8"}, None, None, True))
    assert line.startswith("SPARSEK setting top_k (from SPARSEK_TOP_K) has no effect")
    assert "query_tile 1 (from VLLM_BATCH_INVARIANT)" in line


def test_what_is_of_prompts_alone_is_said_to_be_idle_without_them() -> None:
    for cause in ({"query_tile": 1}, {"sparse_phase": "decode"}):
        for name, value in (("dense_last", 64), ("top_k_deep", 200)):
            (line,) = describe_idle_settings(resolve_config({**cause, name: value}, {}))
            assert line.startswith(f"SPARSEK setting {name} (from --additional-config ")
            assert line.endswith("; remedy: remove it")
        assert describe_idle_settings(resolve_config({**cause, "dense_last": 0}, {})) == []


def test_ranges_of_layers() -> None:
    assert format_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert format_ranges([4]) == "4"
    assert format_ranges([]) == ""


def test_the_line_per_layer_group() -> None:
    tiles = SelectionPolicy(num_sink=64, window_size=512, top_k=32, dense_below=4096)
    policy = StepPolicy.of(tiles)
    assert describe_layers(range(30), policy, None, 128, "cpu", summary_share=1 / 32) == (
        "SPARSEK layers 0-29: block_topk, 1 sink block + window 512 + 32 blocks of 64 per KV head, "
        "decoded tokens choose 2048 by records, dense below 4096, 3.1 % summaries, pages of 128, "
        "CPU path"
    )
    window = StepPolicy.of(SelectionPolicy(num_sink=4, window_size=512))
    whole_blocks = StepPolicy(tiles, tiles.per_token(8, 64))
    fewer = describe_layers([0], whole_blocks, None, 128, "cpu", summary_share=1 / 32)
    assert "32 blocks of 64 per KV head (8 for decoded tokens)" in fewer
    deep = StepPolicy.of(replace(tiles, growth=Growth.by(32, 64)))
    grown = describe_layers([0], deep, None, 128, "cpu")
    assert "window 512 + 32 to 64 blocks of 64 per KV head, decoded tokens" in grown
    assert "sink_window, 4 sink tokens + window 512" in describe_layers(
        [0], window, None, 64, "cuda"
    )
    assert "the model's sliding window of 48" in describe_layers(
        [1], StepPolicy.of(SelectionPolicy(window_size=48)), None, 64, "cpu"
    )
    by_settings = StepPolicy.of(SelectionPolicy(window_size=48))  # or the model's: both may be
    line = describe_layers([1], by_settings, None, 64, "cpu", mode="sink_window")
    assert line == "SPARSEK layers 1: a sliding window of 48, pages of 64, CPU path"
    window = StepPolicy.of(SelectionPolicy(num_sink=0, window_size=48, dense_below=100))
    assert "sink_window, 0 sink tokens + window 48" in describe_layers([1], window, None, 64, "cpu")
    half = describe_layers([0], StepPolicy(tiles, SelectionPolicy()), None, 64, "cpu")
    assert "32 blocks of 64 per KV head, decoded tokens dense, dense below 4096" in half
    line = describe_layers([3], StepPolicy.of(SelectionPolicy()), "ALiBi", 64, "cpu")
    assert line == "SPARSEK layers 3: dense, pages of 64, SDPA fallback (ALiBi)"


def test_the_line_of_a_model_with_its_own_selection() -> None:
    resolved = resolve_config(None, {}, {"kernel_size": 32, "kernel_stride": 16})
    assert resolved.infllm is not None
    assert describe_model_selection(resolved.infllm, resolved.config) == (
        "SPARSEK follows the model's sparse_config (InfLLM-v2): 1 initial, 32 + 1 local, 96 blocks "
        "of 64 in all. Here every 64 queries of a prefill choose blocks by means of 16 rotated "
        "keys and then by attention to keys of those drawn; single tokens choose 2 tokens each by "
        "records of 64; the model was trained with means of 32 tokens every 16, per query"
    )
    nope = resolve_config({"query_tile": 1}, {}, {"use_nope": True})
    assert nope.infllm is not None
    line = describe_model_selection(nope.infllm, nope.config)
    assert "in all. Here single tokens choose 2 tokens each by records of 64" in line
    assert "attention" not in line  # single tokens select in one step
    assert "every 16, without positions, per query" in line
