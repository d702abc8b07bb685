"""Settings: where they come from, what wins, and what every mistake is answered with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparsek_backend.config import (
    BATCH_INVARIANT,
    DECODE_TOKENS,
    FIELD_NAMES,
    ConfigError,
    SparsityConfig,
    read_section,
    resolve_config,
)
from sparsek_backend.vllm_backend.settings import check_page_size
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy

INFLLM = {
    "kernel_size": 32,
    "kernel_stride": 16,
    "init_blocks": 1,
    "block_size": 64,
    "window_size": 2048,
    "topk": 64,
    "dense_len": 8192,
    "use_nope": False,
}


def test_defaults() -> None:
    resolved = resolve_config(None, {})
    config = resolved.config
    assert config.mode == "block_topk"
    assert (config.num_sink, config.window_size, config.top_k) == (64, 512, 96)
    assert config.decode_tokens == DECODE_TOKENS
    assert (config.sel_block_size, config.dense_below, config.query_tile) == (64, 8192, 64)
    assert set(resolved.sources.values()) == {"defaults"}


def test_every_source_and_its_priority() -> None:
    environ = {"SPARSEK_TOP_K": "16", "SPARSEK_WINDOW_SIZE": "256", "HOME": "/", "SPARSEK_MODE": ""}
    resolved = resolve_config({"top_k": 8}, environ, INFLLM)
    config, sources = resolved.config, resolved.sources
    assert config.top_k == 8
    assert "--additional-config" in sources["top_k"]
    assert config.window_size == 256
    assert sources["window_size"] == "SPARSEK_WINDOW_SIZE"
    assert config.dense_below == 8192
    assert sources["dense_below"] == "the model's config"
    assert config.query_tile == 64
    assert sources["query_tile"] == "defaults"


def test_infllm_section_becomes_block_selection() -> None:
    policy = resolve_config(None, {}, INFLLM).config.policy_for(0)
    tiles = SelectionPolicy(
        num_sink=64, window_size=2048, top_k=63, sel_block_size=64, dense_below=8192
    )
    assert policy == StepPolicy(tiles, tiles.by_records(63 * 64))
    changed = resolve_config({"top_k": 40, "decode_tokens": 512}, {}, INFLLM).config.policy_for(0)
    assert (changed.prefill.top_k, changed.decode.top_k) == (40, 256)


@pytest.mark.parametrize("window", [2048, 2000, 512, 64, 40, 0])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(("topk", "init_blocks"), [(64, 1), (16, 2), (8, 0)])
def test_infllm_attends_as_many_blocks_as_the_model(
    window: int, block: int, topk: int, init_blocks: int
) -> None:
    """Counted as InfLLM-v2's kernels mark them: initial, own, and ``window // block`` before it."""
    section = {
        "window_size": window,
        "block_size": block,
        "topk": topk,
        "init_blocks": init_blocks,
        "dense_len": 0,
    }
    policy = replace(resolve_config(None, {}, section).config.policy_for(0).prefill, query_tile=1)
    local = window // block
    for position in (200 * block, 200 * block + 1, 201 * block - 1):
        own = position // block
        forced = {*range(init_blocks), *range(own - local, own + 1)}
        first, last = policy.local_range(position)
        assert {*range(policy.sink_blocks), *range(first, last)} == forced
        assert len(forced) + policy.scored_blocks == topk + local


def test_infllm_dense_length() -> None:
    """The model attends everything while a sequence has fewer than ``dense_len`` tokens."""
    policy = resolve_config(None, {}, INFLLM).config.policy_for(0).prefill
    assert all(policy.sees_all(position) for position in range(8192))
    assert not policy.sees_all(8192)
    pure = resolve_config(None, {}, {**INFLLM, "dense_len": -1}).config
    assert pure.dense_below == 0


def test_infllm_as_it_was_trained() -> None:
    resolved = resolve_config({"mode": "infllm", "dense_layers": 1}, {}, INFLLM)
    assert resolved.config.policy_for(0) == DENSE
    both = resolved.config.policy_for(1)
    assert both.prefill == both.decode
    assert (both.decode.query_tile, both.decode.dense_last, both.decode.sel_block_size) == (
        1,
        0,
        64,
    )
    assert both.decode.budget_blocks == 96


@pytest.mark.parametrize(
    ("settings", "section", "words"),
    [
        ({}, None, "needs a model trained with InfLLM-v2"),
        ({}, {**INFLLM, "kernel_size": 64}, "expected kernel_size 32 in the sparse_config"),
        ({}, {**INFLLM, "kernel_stride": 32}, "expected kernel_stride 16 in the sparse_config"),
        ({}, {**INFLLM, "block_size": 24}, "sel_block_size"),
        ({"top_k": 4}, INFLLM, "top_k .* has no effect in mode 'infllm'"),
        ({"query_tile": 64}, INFLLM, "query_tile .* has no effect in mode 'infllm'"),
    ],
)
def test_what_mode_infllm_needs(settings: dict[str, Any], section: object, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"{words}.*remedy"):
        resolve_config({"mode": "infllm", **settings}, {}, section)


def test_mode_infllm_is_not_batch_invariant() -> None:
    with pytest.raises(ConfigError, match="mode infllm is not served with VLLM_BATCH_INVARIANT"):
        resolve_config({"mode": "infllm"}, {}, INFLLM, batch_invariant=True)


def test_infllm_section_is_ignored_when_the_user_chooses_another_mode() -> None:
    resolved = resolve_config({"mode": "sink_window"}, {}, INFLLM)
    assert resolved.config.window_size == 512
    assert resolved.infllm is None


@pytest.mark.parametrize("section", [None, INFLLM], ids=["defaults", "infllm"])
def test_batch_invariance_selects_per_token(section: dict[str, Any] | None) -> None:
    resolved = resolve_config(None, {}, section, batch_invariant=True)
    assert resolved.batch_invariant
    assert (resolved.config.query_tile, resolved.config.dense_last) == (1, 0)
    assert resolved.sources["query_tile"] == resolved.sources["dense_last"] == BATCH_INVARIANT
    policy = resolved.config.policy_for(0)
    assert policy.prefill == policy.decode
    usual = resolve_config(None, {}, section)
    assert not usual.batch_invariant
    assert policy.decode == usual.config.policy_for(0).decode


def test_null_leaves_out_what_has_no_default() -> None:
    for given in ({"dense_last": None}, {"mode": "sink_window", "dense_last": None}):
        resolved = resolve_config(given, {"SPARSEK_PATTERN": " "})
        assert resolved.sources["dense_last"] == "defaults"
    for environ in ({"SPARSEK_DENSE_LAST": "null"}, {"SPARSEK_DENSE_LAST": ""}):
        assert resolve_config(None, environ, batch_invariant=True).config.dense_last == 0
    with pytest.raises(ConfigError, match=r"top_k .*a valid integer, got None.*default 96"):
        resolve_config({"top_k": None}, {})
    with pytest.raises(ConfigError, match=r"DENSE_LAST.*got 'None'; .* \(not set by default"):
        resolve_config(None, {"SPARSEK_DENSE_LAST": "None"})


@pytest.mark.parametrize(("text", "last", "part"), [("64", 64, 0), ("0", 0, 0), ("", 1024, 16)])
def test_the_variable_of_a_prompts_end(text: str, last: int, part: int) -> None:
    prefill = resolve_config(None, {"SPARSEK_DENSE_LAST": text}).config.policy_for(0).prefill
    assert (prefill.dense_last, prefill.last_part) == (last, part)


def test_batch_invariance_takes_what_agrees_with_it() -> None:
    settings = {"query_tile": 1, "dense_last": 0}
    assert resolve_config(settings, {}, batch_invariant=True).config.query_tile == 1
    for mode in ("dense", "sink_window"):
        assert resolve_config({"mode": mode}, {}, batch_invariant=True).config.mode == mode


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SPARSEK_QUERY_TILE": "64"}, ("query_tile (from SPARSEK_QUERY_TILE)", "expected 1")),
        ({"SPARSEK_DENSE_LAST": "8"}, ("dense_last (from SPARSEK_DENSE_LAST)", "expected 0")),
    ],
    ids=["tile", "last"],
)
def test_batch_invariance_refuses_what_follows_chunks(
    environ: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(None, environ, batch_invariant=True)
    for word in (*words, "unset VLLM_BATCH_INVARIANT"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"block_size": "many"}, "block_size: expected a valid integer, got 'many'"),
        ({"topk": float("inf")}, "topk: expected a valid integer, got inf"),
        ({"topk": float("nan")}, "topk: expected a valid integer, got nan"),
        ({"topk": 2.5}, "topk: expected a valid integer, got 2.5"),
        ({"topk": None}, "topk: expected a valid integer, got None"),
        ({"block_size": 0}, "block_size: expected greater than or equal to 1, got 0"),
        ({"window_size": -64}, "window_size: expected greater than or equal to 0, got -64"),
        ({"init_blocks": -1}, "init_blocks: expected greater than or equal to 0, got -1"),
        ({"kernel_stride": 0}, "kernel_stride: expected greater than or equal to 1, got 0"),
        ({"topk": 0}, "topk: expected 2 or more, of which 1 are attended anyway, got 0"),
        ({"topk": 1}, "topk: expected 2 or more, of which 1 are attended anyway, got 1"),
        ({"topk": 2, "window_size": 0}, "topk: expected 3 or more, .* got 2"),
        ({"use_nope": "false"}, "use_nope: expected a valid boolean, got 'false'"),
        ([64], r"expected a valid dictionary .*, got \[64\]"),
        ("64", "expected a valid dictionary .*, got '64'"),
    ],
    ids=str,
)
def test_unreadable_infllm_section(section: object, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"sparse_config of the model's.*{words}.*set the"):
        resolve_config(None, {}, section)


@pytest.mark.parametrize("change", [{"topk": 2}, {"topk": 3, "window_size": 0}], ids=str)
def test_the_smallest_infllm_selection(change: dict[str, int]) -> None:
    policy = resolve_config(None, {}, {**INFLLM, **change}).config.policy_for(0)
    assert policy.prefill.top_k == 1


def test_settings_out_of_range_of_the_models_section() -> None:
    with pytest.raises(ConfigError, match=r"num_sink \(from the model's config\).*2147483647"):
        resolve_config(None, {}, {"init_blocks": 10**12, "topk": 10**13})


@pytest.mark.parametrize(
    ("additional", "words"),
    [
        ([1], ("expected a JSON object", "got [1]")),
        ({"spasek": {"top_k": 8}}, ("spasek", "did you mean the section sparsek?")),
        ({"SparseK": {"top_k": 8}}, ("SparseK", "did you mean the section sparsek?")),
        ({"sparsek_backend": {}, "sparsek": {}}, ("sparsek_backend", "did you mean")),
        ({"top_k": 8}, ("top_k", "outside of the sparsek section", '{"sparsek": {"top_k": 16}}')),
        ({"sparsek": {}, "window-size": 8}, ("window-size", "write window_size as in")),
        ({"topk": 8}, ("topk", "write top_k as in")),
    ],
    ids=str,
)
def test_near_misses_of_the_section_are_named(additional: object, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^SPARSEK setting .*--additional-config") as caught:
        read_section(additional)
    for word in words:
        assert word in str(caught.value)


def test_the_section_among_others() -> None:
    assert read_section(None) is None
    assert read_section({"gc": True, "graph": {"level": 1}}) is None
    assert read_section({"other": {}, "sparsek": {"top_k": 8}}) == {"top_k": 8}


def test_paths_from_the_environment_stay_as_they_are() -> None:
    environ = {"SPARSEK_MODE": "pattern", "SPARSEK_PATTERN": "2026"}
    assert resolve_config(None, environ).config.pattern == "2026"


@pytest.mark.parametrize(
    ("text", "value"), [("2", 2), ("0,1,5", (0, 1, 5)), ("[3]", (3,)), (" 4 ", 4)]
)
def test_dense_layers_from_the_environment(text: str, value: object) -> None:
    assert resolve_config(None, {"SPARSEK_DENSE_LAYERS": text}).config.dense_layers == value


def test_kubernetes_service_links_are_no_settings() -> None:
    links = {
        "SPARSEK_PORT": "tcp://10.0.0.1:8000",
        "SPARSEK_SERVICE_HOST": "10.0.0.1",
        "SPARSEK_SERVICE_PORT_HTTP": "8000",
        "SPARSEK_PORT_8000_TCP_ADDR": "10.0.0.1",
        "SPARSEK_SERVER_SERVICE_HOST": "10.0.0.1",
    }
    assert resolve_config(None, links).config == resolve_config(None, {}).config


NESTED: list[Any] = []
for _ in range(10**5):
    NESTED = [NESTED]

DENSE = StepPolicy.of(SelectionPolicy())

BAD: list[tuple[str, Any, dict[str, str], tuple[str, ...]]] = [
    ("unknown", {"topk": 4}, {}, ("topk", "--additional-config", "did you mean top_k")),
    ("unknown-env", None, {"SPARSEK_TOPK": "4"}, ("SPARSEK_TOPK", "did you mean SPARSEK_TOP_K")),
    ("unknown-mode", {"mode": "nsa"}, {}, ("mode", "block_topk", "'nsa'", "remedy")),
    ("negative", {"num_sink": -1}, {}, ("num_sink", "greater than or equal to 0", "-1", "remedy")),
    ("zero-window", {"window_size": 0}, {}, ("window_size", "greater than 0", "got 0")),
    ("zero-top-k", {"top_k": 0}, {}, ("top_k", "greater than 0")),
    ("text", None, {"SPARSEK_TOP_K": "many"}, ("SPARSEK_TOP_K", "integer", "'many'")),
    ("fraction", {"top_k": 2.5}, {}, ("top_k", "integer", "2.5")),
    ("boolean", {"top_k": True}, {}, ("top_k", "integer", "True")),
    ("block-size", {"sel_block_size": 24}, {}, ("sel_block_size", "multiple of 16", "24")),
    ("gone", {"score_kind": "min_max"}, {}, ("score_kind", "is unknown", "remedy")),
    (
        "replaced",
        {"decode_top_k": 32},
        {},
        ("decode_top_k", "--additional-config", "replaced", "remedy: use decode_tokens"),
    ),
    (
        "replaced-env",
        None,
        {"SPARSEK_DECODE_TOP_K": "32"},
        ("SPARSEK_DECODE_TOP_K", "the environment", "remedy: use decode_tokens"),
    ),
    ("one-token", {"decode_tokens": 1}, {}, ("decode_tokens", "greater than or equal to 2", "1")),
    ("gone-share", {"min_mass": 0.001}, {}, ("min_mass", "is unknown", "remedy")),
    ("gone-heads", None, {"SPARSEK_BUDGETS": "b.json"}, ("SPARSEK_BUDGETS", "is unknown")),
    ("layers", {"dense_layers": [0, -2]}, {}, ("indices such as [0, 1, 5]", "got [0, -2];")),
    ("layer", {"dense_layers": -1}, {}, ("number of first layers", "got -1;")),
    ("layer-kind", {"dense_layers": [True]}, {}, ("an integer from 0", "got [True];")),
    ("layer-range", None, {"SPARSEK_DENSE_LAYERS": "0-3"}, ("an integer from 0", "got '0-3';")),
    ("blocks", {"top_k": 10**12}, {}, ("top_k", "less than or equal to 1048576", "10000000")),
    ("tokens", {"num_sink": 2**31}, {}, ("num_sink", "less than or equal to 2147483647")),
    ("digits", None, {"SPARSEK_TOP_K": "9" * 5000}, ("SPARSEK_TOP_K", "(5002 characters)")),
    ("huge", {"top_k": 10**5000}, {}, ("top_k", "type int that is too long to print")),
    ("brackets", None, {"SPARSEK_DENSE_LAYERS": "[" * 10**5}, ("got '[[[", "characters)")),
    ("nested", {"dense_layers": NESTED}, {}, ("type list that is too long to print",)),
    ("infinite", None, {"SPARSEK_TOP_K": "Infinity"}, ("top_k", "finite", "inf")),
    ("section", ["top_k"], {}, ("--additional-config", "object", "list")),
    ("no-pattern", {"mode": "pattern"}, {}, ("'pattern' needs a file", "patterns learn")),
    (
        "pattern-per-token",
        {"mode": "pattern", "pattern": "f", "query_tile": 1},
        {},
        ("query_tile", "more than 1", "mode block_topk"),
    ),
    ("pattern-unused", {"pattern": "f"}, {}, ("contradict", "pattern", "block_topk")),
    (
        "contradiction",
        {"mode": "sink_window", "top_k": 4},
        {},
        ("contradict", "top_k", "sink_window", "remedy"),
    ),
    (
        "contradiction-env",
        {"mode": "dense"},
        {"SPARSEK_WINDOW_SIZE": "64"},
        ("contradict", "SPARSEK_WINDOW_SIZE", "dense", "--additional-config"),
    ),
]


@pytest.mark.parametrize(
    ("section", "environ", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_mistakes_are_named(section: Any, environ: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(section, environ)
    message = str(caught.value)
    assert message.startswith("SPARSEK setting")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_several_mistakes_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config({"top_k": -1, "window_size": "x"}, {})
    assert "top_k" in str(caught.value)
    assert "window_size" in str(caught.value)


def test_mode_pattern_attends_as_much_as_block_topk() -> None:
    resolved = resolve_config({"mode": "pattern", "top_k": 8}, {"SPARSEK_PATTERN": "/a/file"})
    assert (resolved.config.mode, resolved.config.pattern) == ("pattern", "/a/file")
    assert resolved.config.policy_for(0) == SparsityConfig(mode="block_topk", top_k=8).policy_for(0)
    with pytest.raises(ConfigError, match="rules out"):
        resolve_config({"mode": "pattern", "pattern": "f"}, {}, batch_invariant=True)


def test_policies_per_layer() -> None:
    config = SparsityConfig(mode="block_topk", dense_layers=2)
    assert [config.policy_for(layer) == DENSE for layer in range(4)] == [True, True, False, False]
    config = SparsityConfig(mode="sink_window", num_sink=4, window_size=100, dense_layers=(1,))
    assert config.policy_for(1) == DENSE
    window = SelectionPolicy(num_sink=4, window_size=100, dense_below=8192)
    assert config.policy_for(0) == StepPolicy(window, window)
    assert SparsityConfig(mode="dense").policy_for(7) == DENSE


@pytest.mark.parametrize("query_tile", [1, 2, 64])
def test_prefills_are_dense_where_decodes_alone_are_sparse(query_tile: int) -> None:
    settings = {"sparse_phase": "decode", "query_tile": query_tile}
    policy = resolve_config(settings, {}).config.policy_for(0)
    assert policy.prefill.is_dense
    assert policy.decode == resolve_config(None, {}).config.policy_for(0).decode


def test_fields_are_documented() -> None:
    from pathlib import Path

    text = Path(__file__).parents[2].joinpath("docs/configuration.md").read_text(encoding="utf-8")
    for name in FIELD_NAMES:
        assert f"`{name}`" in text
        assert f"SPARSEK_{name.upper()}" in text


def test_decoded_tokens_have_a_budget_of_their_own() -> None:
    for top_k in (2, 40):
        settings = {"top_k": top_k, "decode_tokens": 301}
        policy = resolve_config(settings, {}).config.policy_for(0)
        assert policy.decode == policy.prefill.by_records(300)
    same = resolve_config(None, {"SPARSEK_DECODE_TOKENS": "300"}).config
    assert same.policy_for(0).decode.top_k == 150
    default = SparsityConfig().policy_for(0)
    assert default.decode == default.prefill.by_records(DECODE_TOKENS)


def test_deep_tiles_select_more_up_to_top_k_deep() -> None:
    usual = resolve_config({"top_k": 90}, {}).config.policy_for(0)
    deep = resolve_config({"top_k": 90, "top_k_deep": 122}, {}).config.policy_for(0)
    few = usual.prefill.scored_blocks
    assert [deep.prefill.places(1024 * tokens) - few for tokens in (31, 33, 40, 48, 49, 999)] == [
        0, 2, 16, 32, 32, 32,
    ]  # fmt: skip
    assert deep.decode == usual.decode
    assert resolve_config({"top_k": 90, "top_k_deep": 90}, {}).config.policy_for(0) == usual
    with pytest.raises(ConfigError, match=r"top_k_deep .* expected at least top_k, 90"):
        resolve_config({"top_k": 90, "top_k_deep": 89}, {})
    with pytest.raises(ConfigError, match=r"top_k_deep .* has no effect in mode 'pattern'"):
        resolve_config({"mode": "pattern", "pattern": "f", "top_k_deep": 99}, {})


@pytest.mark.parametrize(
    ("settings", "by_records"),
    [
        ({}, True),
        ({"sparse_phase": "decode"}, True),
        ({"sparse_phase": "prefill"}, False),
        ({"mode": "pattern", "pattern": "f"}, True),
        ({"mode": "sink_window"}, False),
        ({"mode": "dense"}, False),
    ],
)
def test_who_needs_pages_of_whole_segments(settings: dict[str, Any], by_records: bool) -> None:
    resolved = resolve_config(settings, {})
    assert resolved.config.by_records == by_records
    assert (resolved.config.policy_for(0).decode.alignment > 0) == by_records
    if not by_records:
        check_page_size(resolved, 16)
        return
    check_page_size(resolved, 192)
    with pytest.raises(ConfigError, match=r"decode_tokens .*multiple of 64.*got 32.*--block-size"):
        check_page_size(resolved, 32)
