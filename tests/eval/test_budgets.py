"""The budget grammar."""

from __future__ import annotations

import pytest

from sparsek_backend.eval.budgets import DEFAULT_BUDGETS, parse_budget, parse_budgets


def test_modes_and_sizes() -> None:
    top = parse_budget("block_topk:16").settings
    assert top is not None
    assert (top["mode"], top["top_k"], top["window_size"], top["dense_below"]) == (
        "block_topk",
        16,
        512,
        0,
    )
    window = parse_budget("window:256").policy()
    assert (window.num_sink, window.window_size, window.top_k) == (0, 256, 0)
    sinks = parse_budget("sink_window").policy()
    assert (sinks.num_sink, sinks.window_size, sinks.dense_below) == (4, 512, 0)
    tiled = parse_budget("block_topk:8,query_tile=1,score_kind=min_max,dense_layers=2").policy()
    assert (tiled.top_k, tiled.query_tile, tiled.score_kind) == (8, 1, "min_max")
    assert parse_budget("dense").is_dense


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blocks:16", "expected dense"),
        ("block_topk:x", "positive integer"),
        ("block_topk:0", "positive integer"),
        ("block_topk:8,query_tile", "setting=value"),
        ("block_topk:8,query_tyle=1", "query_tyle"),
        ("sink_window,top_k=8", "top_k"),
        ("dense:4", "'dense' alone"),
        ("block_topk:8,window_size=-1", "window_size"),
    ],
)
def test_bad_budgets_name_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_budget(text)


def test_dense_comes_first_and_labels_are_distinct() -> None:
    budgets = parse_budgets(list(DEFAULT_BUDGETS))
    assert [budget.label for budget in budgets] == ["dense", *DEFAULT_BUDGETS]
    with pytest.raises(ValueError, match="given twice"):
        parse_budgets(["window", "window"])
    with pytest.raises(ValueError, match="at least one"):
        parse_budgets(["dense"])


def test_attended_share_is_counted_from_the_policy() -> None:
    assert parse_budget("dense").attended_share(100) == 1.0
    share = parse_budget("window:8").attended_share(32)
    assert share == pytest.approx(sum(min(i + 1, 8) / (i + 1) for i in range(32)) / 32)
    assert parse_budget("block_topk:16").attended_share(1600) == 1.0
    assert parse_budget("block_topk:16").attended_share(8192) < 0.6
