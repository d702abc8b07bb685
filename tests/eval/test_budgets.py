"""The budget grammar."""

from __future__ import annotations

import numpy as np
import pytest

from sparsek_backend.eval.budgets import parse_budget
from sparsek_backend.eval.options import DEFAULT_BUDGETS, BudgetOptions
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
    assert [x.label for x in BudgetOptions().parsed()] == ["dense", *DEFAULT_BUDGETS]
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
    from sparsek_backend.vllm_backend.accounting import attended_by_requests

    budget = parse_budget(text)
    one, dense = np.array([length]), StepPolicy.of(SelectionPolicy())
    count = attended_by_requests(budget.policy(), one, one, 0)
    assert budget.prefill_share(length) == count / attended_by_requests(dense, one, one, 0)
    longer, single = one + 1, np.array([1])
    count = attended_by_requests(budget.policy(), longer, single, 1)
    assert budget.decode_share(length) == count / (length + 1)


def test_shares_by_hand() -> None:
    dense = parse_budget("dense")
    assert dense.prefill_share(100) == dense.decode_share(100) == 1.0
    window = parse_budget("window:8")
    assert window.prefill_share(32) == sum(min(i + 1, 8) for i in range(32)) / (32 * 33 / 2)
    assert window.decode_share(31) == 8 / 32
    assert parse_budget("block_topk:16").prefill_share(1600) == 1.0
    assert parse_budget("block_topk:16").prefill_share(8192) < 0.5


def test_a_picture_has_arms_of_equal_size() -> None:
    arms = BudgetOptions(["window"], picture=True).parsed()[1:]
    blocks, windows = arms[:4], arms[4:-1]
    assert arms[-1].label == "window"
    for block, window in zip(blocks, windows, strict=True):
        shares = block.decode_share(16384), window.decode_share(16384)
        assert shares[0] == pytest.approx(shares[1], rel=0.02)


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
