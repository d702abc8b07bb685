"""What changes the order of the work changes no token, while queries select blocks.

Drafts change what a request's tokens select, so that speculation is held to answers that see every
key; ``test_page_records.py`` holds what is selected with drafts to the oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_backend.drafts import speculation
from tests.vllm_backend.engines import (
    counted_forwards,
    engine,
    generate,
    requires_cpu_vllm,
    tokens,
)
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

pytestmark = [pytest.mark.engine, requires_cpu_vllm, pytest.mark.usefixtures("registered")]

SPARSE = {
    "dense_below": 0,
    "num_sink": 16,
    "window_size": 64,
    "sel_block_size": 32,
    "top_k": 3,
    "decode_tokens": 96,
    "query_tile": 1,
}
COVERING = {"dense_below": 0, "top_k": 32, "window_size": 32, "sel_block_size": 32}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (1, 33, 150, 390)
    ]


def answers(
    model: Path,
    prompts: list[list[int]],
    settings: dict[str, Any] = SPARSE,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Greedy tokens, and what the engine counted; SPARSEK's forward ran."""
    with (
        counted_forwards() as calls,
        engine(
            model,
            "SPARSEK",
            settings,
            max_model_len=500,
            max_num_batched_tokens=128,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **options,
        ) as llm,
    ):
        found = tokens(generate(llm, prompts, together=True, max_tokens=24))
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    assert calls["SPARSEK"] > 0
    return found, counts


@pytest.fixture(scope="module")
def plain(registered: None, llama: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens without asynchronous scheduling."""
    return answers(llama, prompts, async_scheduling=False)[0]


@pytest.fixture(scope="module")
def dense(registered: None, llama: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens without speculation, of a budget that covers the context."""
    return answers(llama, prompts, COVERING)[0]


def test_async_scheduling(llama: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    assert answers(llama, prompts, async_scheduling=True)[0] == plain


@pytest.mark.parametrize("method", ["ngram", "eagle", "eagle3", "draft_model"])
def test_speculation(
    method: str, llama: Path, prompts: list[list[int]], dense: list[list[int]], tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    found, counts = answers(llama, prompts, COVERING, **speculation(method, llama, tmp_path))
    assert found == dense
    assert torch.get_num_threads() == threads, "later tests' threads would wait"
    assert counts["vllm:spec_decode_num_draft_tokens"] > 0
    if method == "draft_model":
        assert counts["vllm:spec_decode_num_accepted_tokens"] > 0


def test_mtp(prompts: list[list[int]], tmp_path: Path) -> None:
    model = make_tiny_model("mtp", tmp_path)
    asked = {"method": "mtp", "num_speculative_tokens": 1}
    found, counts = answers(model, prompts, COVERING, speculative_config=asked)
    assert counts["vllm:spec_decode_num_draft_tokens"] > 0
    assert found == answers(model, prompts, COVERING)[0]


def test_fast_prefill_of_shared_caches(prompts: list[list[int]], tmp_path: Path) -> None:
    """Layers that share another layer's KV attend the last tokens of prompts alone."""
    model = make_tiny_model("shared_kv", tmp_path)
    expected, _ = answers(model, prompts, COVERING)
    assert answers(model, prompts, COVERING, kv_sharing_fast_prefill=True)[0] == expected
