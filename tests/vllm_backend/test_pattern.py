"""Mode ``pattern``: prefills follow a learned file, decodes select as ever."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("safetensors", reason="safetensors is not installed (the patterns extra)")

from sparsek_backend.patterns.prefill import PrefillPattern
from sparsek_backend.vllm_backend.sparsek import selection
from sparsek_kernels.paged.index import vertical_slash
from sparsek_kernels.paged.reference import listed_reference, paged_attention_reference
from tests.vllm_backend.engines import engine, generate, requires_cpu_vllm, tokens
from tests.vllm_backend.layers import (
    SETTINGS,
    building,
    keys_and_values,
    make_builder,
    make_cache,
    make_config,
    make_layer,
    make_step,
    run,
)
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

pytestmark = pytest.mark.usefixtures("registered")

ENTRIES = torch.tensor([[3, -4, 1, -9], [-6, -5, 7, 2]], dtype=torch.int32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    PrefillPattern({0: ENTRIES, 1: ENTRIES.flip(0)}, 32).save(tmp_path / "pattern")
    return tmp_path / "pattern"


def settings(file: Path, **more: Any) -> dict[str, Any]:
    return {**SETTINGS, "mode": "pattern", "pattern": str(file), **more}


@pytest.mark.parametrize("layer_index", [0, 1, 2])
def test_a_layer_follows_the_file(layer_index: int, file: Path, tmp_path: Path) -> None:
    """Layer 2, which the file does not have, selects by score."""
    section = {"sparsek": settings(file)}
    with building(make_config(tmp_path, additional_config=section)) as config:
        layer = make_layer(layer_index)
        builder, spec = make_builder(layer, config)
    cache = make_cache(spec, 64)
    run(layer, builder, cache, make_step([299, 220], [299, 220], 64), seed=1)
    step = make_step([300, 221, 600], [1, 1, 600], 64)
    metadata, q, _, _, output = run(layer, builder, cache, step)
    policy, caches = layer.impl.policy, (*keys_and_values(cache), metadata.batch)
    by_score = paged_attention_reference(q, *caches, policy)
    wanted = by_score
    if layer_index < 2:
        ranked = (ENTRIES, ENTRIES.flip(0))[layer_index].tolist()
        wanted = paged_attention_reference(q, *caches, policy, select=listed_reference(ranked))
        assert not torch.allclose(wanted[2:], by_score[2:], atol=1e-3)
    torch.testing.assert_close(output.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(wanted[:2], by_score[:2])


def test_lists_outlive_a_sleeping_engines_pages(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may drop what the thread that makes the pages puts on the device meanwhile."""
    threads, real = [], selection.block_lists

    class Lists(torch.Tensor):
        def to(self, *args: Any, **options: Any) -> Any:
            threads.append(threading.get_ident())
            return super().to(*args, **options)

    monkeypatch.setattr(selection, "block_lists", lambda *args: Lists(real(*args)))
    with building(make_config(tmp_path, additional_config={"sparsek": settings(file)})) as config:
        make_builder(make_layer(0), config)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_decoded_tokens_alone_need_no_lists(file: Path, tmp_path: Path) -> None:
    """Where ``sparse_phase`` leaves prompts dense, as to measure what decoding loses."""
    section = {"sparsek": settings(file, sparse_phase="decode")}
    with building(make_config(tmp_path, additional_config=section)) as config:
        layer = make_layer(0)
        builder, spec = make_builder(layer, config)
    cache = make_cache(spec, 64)
    run(layer, builder, cache, make_step([299], [299], 64), seed=1)
    step = make_step([300, 400], [1, 400], 64)
    metadata, q, _, _, output = run(layer, builder, cache, step)
    caches = (*keys_and_values(cache), metadata.batch)
    wanted = paged_attention_reference(q, *caches, layer.impl.policy)
    torch.testing.assert_close(output.double(), wanted, atol=1e-5, rtol=1e-5)
    assert layer.impl.policy.prefill.is_dense
    assert layer.impl.policy.decode.selects_blocks


@pytest.mark.parametrize(
    ("entries", "size", "message"),
    [
        (ENTRIES, 64, "expected blocks of 32 tokens, got 64"),
        (ENTRIES[:1], 32, "expected up to 2 layers of 2 KV heads, as the model has, got 1 of 1"),
    ],
)
def test_a_file_that_does_not_fit_stops_the_start(
    entries: torch.Tensor, size: int, message: str, tmp_path: Path
) -> None:
    PrefillPattern({0: entries}, size).save(tmp_path / "pattern")
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, additional_config={"sparsek": settings(tmp_path / "pattern")})


@pytest.mark.parametrize("name", ["top_k", "num_sink", "window_size"])
def test_a_budget_over_every_context_stops_the_start(name: str, file: Path, tmp_path: Path) -> None:
    """Its lists would take terabytes, and it would attend everything."""
    length = 1024
    most = length // 32 if name == "top_k" else length
    for value in (most, most + 1):
        given = {"sparsek": settings(file, **{name: value})}
        if value == most:
            make_config(tmp_path, additional_config=given, max_model_len=length)
            continue
        words = rf"{name} \(from .*\): expected at most {most} in mode 'pattern'.*got {value};"
        with pytest.raises(ValueError, match=words):
            make_config(tmp_path, additional_config=given, max_model_len=length)
    defaults = {"mode": "pattern", "pattern": str(file), "sel_block_size": 32}
    make_config(tmp_path, additional_config={"sparsek": defaults}, max_model_len=length)


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pattern \(from .*\): path: expected a pattern file"):
        make_config(tmp_path, additional_config={"sparsek": settings(tmp_path / "gone")})
    with pytest.raises(ValueError, match=r"pattern \(from .*\): .* too long.*; remedy: make"):
        make_config(tmp_path, additional_config={"sparsek": settings(Path("a" * 300))})


def test_a_file_may_lie_in_a_users_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_config(tmp_path, additional_config={"sparsek": settings(Path("~") / file.name)})
    with pytest.raises(ValueError, match=r"pattern \(from .*\): .*home directory.*; remedy: make"):
        make_config(tmp_path, additional_config={"sparsek": settings(Path("~nobody.here/x"))})


@pytest.mark.engine
@requires_cpu_vllm
def test_an_engine_is_dense_within_its_budget_and_follows_the_file_beyond(
    file: Path, tmp_path: Path
) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (40, 100, 700)
    ]
    options = {"max_model_len": 800, "skip_tokenizer_init": True}
    with engine(folder, "CPU_ATTN", **options) as llm:
        dense = tokens(generate(llm, prompts, together=True))
    section = settings(file, window_size=64, top_k=3)
    with (
        mock.patch.object(
            vertical_slash, "listed_blocks", side_effect=vertical_slash.listed_blocks
        ) as listed,
        engine(folder, "SPARSEK", section, block_size=64, **options) as llm,
    ):
        sparse = tokens(generate(llm, prompts, together=True))
    assert sparse[:2] == dense[:2]
    assert sparse[2] != dense[2]
    assert listed.call_count == 2, "once in each layer"
