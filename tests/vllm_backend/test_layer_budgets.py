"""Files of budgets per layer and KV head, and the setting that names one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparsek_backend.config import ConfigError, resolve_config
from sparsek_backend.layer_budgets import LayerBudgets, load_budgets
from sparsek_kernels.paged.policy import SelectionPolicy

TOP_K = {0: (8, 24), 1: (16, 16), 3: (4, 28)}


def make(**changes: Any) -> LayerBudgets:
    fields: dict[str, Any] = {
        "top_k": TOP_K,
        "model": "tiny",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "sel_block_size": 64,
        "made_by": {"seed": 0},
    }
    return LayerBudgets.make(**{**fields, **changes})


def settings(path: object, **more: Any) -> dict[str, Any]:
    return {"budgets": str(path), **more}


def test_a_file_says_what_was_saved(tmp_path: Path) -> None:
    budgets = make()
    path = budgets.save(tmp_path / "b" / "budgets.json")
    assert load_budgets(path) == budgets
    assert json.loads(path.read_text())["mean"] == budgets.mean == 16.0
    assert str(budgets).startswith("tiny, mean 16, ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": 15.0}, "mean: expected 16, got 15"),
        ({"model": "other"}, "checksum: the content was changed"),
        ({"kind": "budgets"}, "kind: Input should be 'sparsek budgets'"),
        ({"version": 2}, "version: Input should be 1"),
        ({"more": 1}, "more: Extra inputs"),
        ({"top_k": {"0": [8]}}, "top_k of layer 0: expected 2 numbers"),
        ({"top_k": {"4": [8, 8]}}, "top_k: expected layers below 4, got 4"),
        ({"top_k": {"0": [8, 0]}}, "top_k.0.1: Input should be greater than 0"),
        ({"top_k": {}}, "top_k: Dictionary should have at least 1 item"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = make().save(tmp_path / "budgets.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=r"setting budgets \(from SPARSEK_BUDGETS") as caught:
        resolve_config(None, {"SPARSEK_BUDGETS": str(path)})
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"that `sparsek calibrate` wrote.*nowhere\.json"):
        resolve_config(settings(tmp_path / "nowhere.json"), {})
    path = make().save(tmp_path / "budgets.json")
    with pytest.raises(ConfigError, match="no effect in mode 'sink_window'"):
        resolve_config(settings(path, mode="sink_window"), {})


def test_each_layer_has_its_own_policy(tmp_path: Path) -> None:
    path = make().save(tmp_path / "budgets.json")
    resolved = resolve_config(settings(path), {})
    config = resolved.config
    assert (config.top_k, resolved.sources["top_k"]) == (16, resolved.sources["budgets"])
    found = [config.policy_for(layer) for layer in range(5)]
    assert [(p.top_k, p.head_top_k) for p in found] == [
        (24, (8, 24)),
        (16, ()),
        (16, ()),  # none of its own: the mean
        (28, (4, 28)),
        (16, ()),  # a draft model's
    ]
    assert found[0].per_token().head_top_k == (96, 288)  # three times as many
    assert resolve_config({"budgets": make().model_dump(mode="json")}, {}).config == config


def test_decoded_tokens_follow_the_budgets_of_a_model_with_its_own_selection() -> None:
    given = {"budgets": make().model_dump(mode="json")}
    resolved = resolve_config(given, {}, {"topk": 64})  # whose decode_top_k is 63
    assert resolved.config.decode_top_k is None
    assert resolved.sources["decode_top_k"] == resolve_config(given, {}).sources["decode_top_k"]
    own = resolve_config({**given, "decode_top_k": 63}, {}, {"topk": 64})
    assert own.config.decode_top_k == 63


@pytest.mark.parametrize(("name", "value"), [("top_k", 32), ("sel_block_size", 32)])
def test_settings_that_the_file_is_not_for_are_refused(
    tmp_path: Path, name: str, value: int
) -> None:
    path = make().save(tmp_path / "budgets.json")
    with pytest.raises(ConfigError, match=f"setting {name} .*budgets"):
        resolve_config(settings(path, **{name: value}), {})
    assert resolve_config(settings(path, top_k=16), {}).config.top_k == 16


def test_lists_of_a_pattern_are_as_long_for_every_head(tmp_path: Path) -> None:
    path = make().save(tmp_path / "budgets.json")
    with pytest.raises(ConfigError, match=r"budgets \(from .*has no effect in mode 'pattern'"):
        resolve_config(settings(path, mode="pattern", pattern="f"), {})


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from sparsek_backend.vllm_backend.validate import _check_budgets

    resolved = resolve_config(settings(make().save(tmp_path / "budgets.json")), {})

    def model(layers: int, heads: int) -> Any:
        text = SimpleNamespace(num_hidden_layers=layers)
        return SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: heads)

    _check_budgets(model(4, 2), resolved)
    for layers, heads in ((5, 2), (4, 1)):
        with pytest.raises(ConfigError, match=f"{layers} layers and {heads} KV heads, got one of"):
            _check_budgets(model(layers, heads), resolved)


def test_a_rank_has_its_own_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from sparsek_backend.vllm_backend import compat
    from sparsek_backend.vllm_backend.sparsek.impl import SparseKImpl

    policy = SelectionPolicy(num_sink=64, window_size=64, top_k=4, head_top_k=(1, 2, 3, 4))

    def heads(rank: int, ranks: int, count: int) -> tuple[int, ...]:
        monkeypatch.setattr(compat, "tensor_rank", lambda: (rank, ranks))
        own = SparseKImpl._own_heads(SimpleNamespace(num_kv_heads=count), 4)  # type: ignore[arg-type]
        return policy.of_heads(own).head_top_k

    assert [heads(rank, 2, 2) for rank in range(2)] == [(1, 2), (3, 4)]
    assert [heads(rank, 8, 1) for rank in range(8)] == [(h,) for h in (1, 1, 2, 2, 3, 3, 4, 4)]
