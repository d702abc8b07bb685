"""The budget grammar."""

from __future__ import annotations

import numpy as np
import pytest

from sparsek_backend.eval.budgets import parse_budget
from sparsek_backend.eval.options import BudgetOptions, EngineOptions, arms_of
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy


def test_modes_and_sizes() -> None:
    top = parse_budget("block_topk:16").settings
    assert top is not None
    assert (top["mode"], top["top_k"], top["window_size"], top["dense_below"]) == (
        "block_topk",
        16,
        512,
        0,
    )
    window = parse_budget("window:256").policy().prefill
    assert (window.num_sink, window.window_size, window.top_k) == (0, 256, 0)
    sinks = parse_budget("sink_window").policy().prefill
    assert (sinks.num_sink, sinks.window_size, sinks.dense_below) == (4, 512, 0)
    tiled = parse_budget("block_topk:8,query_tile=1,dense_layers=2").policy().prefill
    assert (tiled.top_k * tiled.sel_block_size, tiled.query_tile) == (2048, 1)
    learned = parse_budget("pattern:8,pattern=/a/file").config
    assert (learned.mode, learned.top_k, learned.pattern) == ("pattern", 8, "/a/file")
    assert parse_budget("dense").settings is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blocks:16", "expected dense alone, or block_topk"),
        ("block_topk:x", "top_k.*valid integer"),
        ("block_topk:0", "top_k.*greater than 0"),
        ("block_topk:8,query_tile", "setting=value"),
        ("block_topk:8,query_tyle=1", "query_tyle"),
        ("sink_window,top_k=8", "top_k"),
        ("dense:4", "expected dense alone"),
        ("pattern:8", "'pattern' needs a file"),
        ("block_topk:8,window_size=-1", "window_size"),
        ("block_topk:8,sparse_phase=decoding", "sparse_phase"),
        ("sink_window,sparse_phase=decode", "sparse_phase"),
    ],
)
def test_bad_budgets_name_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_budget(text)


def test_dense_comes_first_and_labels_are_distinct() -> None:
    arms = arms_of("block_topk:16,decode_tokens=512")
    assert [x.label for x in BudgetOptions().parsed()] == ["dense", *arms]
    assert [x.label for x in BudgetOptions(["window", "dense"]).parsed()] == ["dense", "window"]
    with pytest.raises(ValueError, match="given twice"):
        BudgetOptions(["window", "window"]).parsed()
    with pytest.raises(ValueError, match="at least one"):
        BudgetOptions(["dense"]).parsed()


@pytest.mark.parametrize(
    "text",
    ["window:8", "sink_window:100", "block_topk:4", "block_topk:8,dense_last=0,query_tile=1"],
)
@pytest.mark.parametrize("length", [100, 2000, 5000])
def test_shares_are_what_the_backend_counts(text: str, length: int) -> None:
    from sparsek_backend.vllm_backend.accounting import Accounting

    budget = parse_budget(text)
    one, dense = np.array([length]), StepPolicy.of(SelectionPolicy())
    count = Accounting(budget.policy()).count(one, one, 0, (0,))
    every = Accounting(dense).count(one, one, 0)
    assert budget.prefill_share(length) == count.prefill / every.prefill
    longer, single = one + 1, np.array([1])
    count = Accounting(budget.policy()).count(longer, single, 1)
    assert budget.decode_share(length) == count.decode / (length + 1)


def test_shares_by_hand() -> None:
    dense = parse_budget("dense")
    assert dense.prefill_share(100) == dense.decode_share(100) == 1.0
    window = parse_budget("window:8")
    assert window.prefill_share(32) == sum(min(i + 1, 8) for i in range(32)) / (32 * 33 / 2)
    assert window.decode_share(31) == 8 / 32
    assert parse_budget("block_topk:16").prefill_share(1600) == 1.0
    assert parse_budget("block_topk:16").prefill_share(8192) < 0.5


def test_arms_are_half_and_twice_a_budget_and_a_window_of_as_many_tokens() -> None:
    labels = arms_of("block_topk:96")
    assert labels == [
        "block_topk:96",
        "block_topk:48,decode_tokens=1024",
        "block_topk:192,decode_tokens=4096",
        "sink_window:6656,num_sink=64",
    ]
    chosen, half, twice, window = map(parse_budget, labels)
    shares = [x.policy().prefill.attended_tokens(65535) for x in (half, chosen, twice, window)]
    assert shares == [57 * 64, 105 * 64, 201 * 64, 6656 + 64]
    given = BudgetOptions(["window"], arms="block_topk:8,query_tile=1")
    assert [x.label for x in given.parsed()[1:]] == [
        "block_topk:8,query_tile=1",
        "block_topk:4,decode_tokens=1024,query_tile=1",
        "block_topk:16,decode_tokens=4096,query_tile=1",
        "sink_window:2624,num_sink=64",
        "window",
    ]
    with pytest.raises(ValueError, match="arms: expected a block_topk budget, got 'window'"):
        BudgetOptions(arms="window").parsed()
    for small in ("block_topk:1", "block_topk:8,decode_tokens=2"):
        with pytest.raises(ValueError, match=f"arms: expected 2 blocks .* got '{small}'"):
            BudgetOptions(arms=small).parsed()


@pytest.mark.parametrize(
    ("visible", "count", "size", "groups"),
    [
        (None, 0, None, [None]),
        (None, 4, None, ["0", "1", "2", "3"]),
        (None, 5, 2, ["0,1", "2,3"]),
        ("GPU-a,3", 9, None, ["GPU-a", "3"]),
    ],
)
def test_every_engine_has_gpus_of_its_own(
    visible: str | None,
    count: int,
    size: int | None,
    groups: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert EngineOptions(tensor_parallel=size).gpus() == groups
    if count:
        with pytest.raises(ValueError, match="tensor-parallel: expected at most"):
            EngineOptions(tensor_parallel=10).gpus()


def test_mixed_phases_are_the_halves_of_a_budget() -> None:
    budgets = BudgetOptions(["block_topk:8", "sink_window"], mixed=True).parsed()[1:]
    assert [budget.label for budget in budgets] == [
        "block_topk:8",
        "block_topk:8,sparse_phase=prefill",
        "block_topk:8,sparse_phase=decode",
        "sink_window",
    ]
    whole, prefill, decode, _ = budgets
    assert prefill.prefill_share(8192) == whole.prefill_share(8192) < 1.0
    assert prefill.decode_share(8192) == 1.0
    assert decode.prefill_share(8192) == 1.0
    assert decode.decode_share(8192) == whole.decode_share(8192) < 1.0
    assert BudgetOptions([prefill.label], mixed=True).parsed()[1:] == [prefill]
