"""The budget grammar."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sparsek_backend.layer_budgets import LayerBudgets

from sparsek_backend.eval.budgets import (
    DEFAULT_BUDGETS,
    parse_budget,
    parse_budgets,
    pictured,
    with_mixed_phases,
)
from sparsek_kernels.paged.policy import SelectionPolicy
from tests.kernels.paged.cache_cases import make_case, run


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
    tiled = parse_budget("block_topk:8,query_tile=1,dense_layers=2").policy()
    assert (tiled.top_k * tiled.sel_block_size, tiled.query_tile) == ((8 + 32) * 64, 1)
    learned = parse_budget("pattern:8,pattern=/a/file").config
    assert (learned.mode, learned.top_k, learned.pattern) == ("pattern", 8, "/a/file")
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
    budgets = parse_budgets(list(DEFAULT_BUDGETS))
    assert [budget.label for budget in budgets] == ["dense", *DEFAULT_BUDGETS]
    with pytest.raises(ValueError, match="given twice"):
        parse_budgets(["window", "window"])
    with pytest.raises(ValueError, match="at least one"):
        parse_budgets(["dense"])


@pytest.mark.parametrize(
    "text",
    ["window:8", "sink_window:100", "block_topk:4", "block_topk:8,dense_last=0,query_tile=1"],
)
@pytest.mark.parametrize("length", [100, 2000, 5000])
def test_shares_are_what_the_backend_counts(text: str, length: int) -> None:
    from sparsek_backend.vllm_backend.accounting import attended_by_requests

    budget = parse_budget(text)
    one, dense = np.array([length]), SelectionPolicy()
    count = attended_by_requests(budget.policy(), one, one, 0)
    assert budget.prefill_share(length) == count / attended_by_requests(dense, one, one, 0)
    longer, single = one + 1, np.array([1])
    count = attended_by_requests(budget.policy(), longer, single, 1)
    assert budget.decode_share(length) == count / (length + 1)


def test_shares_with_what_was_left_out() -> None:
    """The counts of a prompt and of a token after it, and the share of the keys that they saw."""
    text = "block_topk:4,decode_top_k=4,min_mass=0.1,num_sink=16,window_size=40"
    text += ",sel_block_size=32,dense_last=20"
    budget, length = parse_budget(text), 700
    policy = budget.policy()
    dense = {1: length * (length + 1) / 2, 0: length + 1.0}
    for prefill, measured in ((1, budget.prefill_share), (0, budget.decode_share)):
        tokens = length if prefill else 1
        case = make_case([length + 1 - prefill], [tokens], 1 - prefill)
        left_out = torch.zeros(2, 2, dtype=torch.int64)
        run(case, policy, left_out=left_out)
        keys, selected = left_out[1 - prefill].tolist()
        assert keys > 0
        heads = case.k_cache.shape[1]
        expected = measured(length) - keys / heads / dense[prefill]
        assert measured(length, keys / selected) == pytest.approx(expected, rel=1e-12)


def test_shares_by_hand() -> None:
    dense = parse_budget("dense")
    assert dense.prefill_share(100) == dense.decode_share(100) == 1.0
    window = parse_budget("window:8")
    assert window.prefill_share(32) == sum(min(i + 1, 8) for i in range(32)) / (32 * 33 / 2)
    assert window.decode_share(31) == 8 / 32
    assert parse_budget("block_topk:16").prefill_share(1600) == 1.0
    assert parse_budget("block_topk:16").prefill_share(8192) < 0.5


def test_a_picture_has_arms_of_equal_size() -> None:
    arms = parse_budgets(pictured())[1:]
    blocks, windows = arms[:4], arms[4:]
    for block, window in zip(blocks, windows, strict=True):
        shares = block.decode_share(16384), window.decode_share(16384)
        assert shares[0] == pytest.approx(shares[1], rel=0.02)


def test_budgets_of_heads_count_by_their_mean(tmp_path: Path) -> None:
    fields = {"model": "m", "num_hidden_layers": 2, "num_key_value_heads": 3, "sel_block_size": 64}
    numbers = {0: (4, 8, 12), 1: (16, 20, 24)}
    path = LayerBudgets.make(top_k=numbers, **fields).save(tmp_path / "budgets.json")
    texts = f"block_topk:14,decode_top_k=14,budgets={path}", "block_topk:14,decode_top_k=14"
    budget, equal = map(parse_budget, texts)
    assert budget.decode_share(8192) == pytest.approx(equal.decode_share(8192))
    assert budget.prefill_share(8192) == pytest.approx(equal.prefill_share(8192), rel=0.02)
    path.unlink()  # the settings have its content
    assert budget.policy(1).head_top_k == (16, 20, 24)
    with pytest.raises(ValueError, match="budgets"):
        parse_budget(f"block_topk:14,budgets={path}")


def test_mixed_phases_are_the_halves_of_a_budget() -> None:
    texts = with_mixed_phases(["block_topk:8", "sink_window"])
    assert texts == [
        "block_topk:8",
        "block_topk:8,sparse_phase=prefill",
        "block_topk:8,sparse_phase=decode",
        "sink_window",
    ]
    whole, prefill, decode, _ = map(parse_budget, texts)
    assert prefill.prefill_share(8192) == whole.prefill_share(8192) < 1.0
    assert prefill.decode_share(8192) == 1.0
    assert decode.prefill_share(8192) == 1.0
    assert decode.decode_share(8192) == whole.decode_share(8192) < 1.0
    assert with_mixed_phases(texts[1:2]) == texts[1:2]
