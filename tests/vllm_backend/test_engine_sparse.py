"""The sparse regime in a real engine: what must not change a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_backend.engines import (
    counted_preemptions,
    engine,
    generate,
    model_runner,
    requires_cpu_vllm,
    scheduler,
    shuffle_free_pages,
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
LENGTHS = (1100, 700, 40, 513, 300)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def dense(tiny: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What dense attention answers; its engine ends before another one starts."""
    with engine(
        tiny, "SPARSEK", {"mode": "dense"}, max_model_len=1200, skip_tokenizer_init=True
    ) as llm:
        return tokens(generate(llm, prompts, together=True))


@pytest.fixture(scope="module")
def llm(tiny: Path, dense: list[list[int]]) -> Iterator[Any]:
    """A small pool of pages of 64 tokens, prefill in one chunk unless a test says otherwise."""
    with engine(
        tiny,
        "SPARSEK",
        SPARSE,
        max_model_len=1200,
        max_num_batched_tokens=1200,
        block_size=64,
        num_gpu_blocks_override=31,
        skip_tokenizer_init=True,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Each request on its own, prefilled at once."""
    return tokens(generate(llm, prompts, together=False))


def test_selection_matters(dense: list[list[int]], alone: list[list[int]]) -> None:
    """The negative control: the sparse regime answers differently, so equality below counts."""
    assert dense != alone


def test_page_placement(llm: Any, prompts: list[list[int]], alone: list[list[int]]) -> None:
    shuffle_free_pages(llm, seed=1)
    assert tokens(generate(llm, prompts, together=False)) == alone


def test_batch_composition_and_preemption(
    llm: Any, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    assert llm.reset_prefix_cache()
    with counted_preemptions(llm) as counter:
        outputs = generate(llm, prompts, together=True, max_tokens=40)
    assert counter["preempted"] > 0
    assert [found[:16] for found in tokens(outputs)] == alone


@pytest.mark.parametrize("chunk", [64, 37])
def test_chunking(llm: Any, prompts: list[list[int]], alone: list[list[int]], chunk: int) -> None:
    assert llm.reset_prefix_cache()
    target = scheduler(llm)
    before = target.max_num_scheduled_tokens
    target.max_num_scheduled_tokens = chunk
    try:
        assert tokens(generate(llm, prompts, together=True)) == alone
    finally:
        target.max_num_scheduled_tokens = before


def test_prefix_hits(llm: Any, prompts: list[list[int]], alone: list[list[int]]) -> None:
    assert llm.reset_prefix_cache()
    generate(llm, prompts[:1], together=False)
    outputs = generate(llm, prompts[:1], together=False)
    assert outputs[0].num_cached_tokens > 0
    assert tokens(outputs) == alone[:1]


def test_summaries_live_in_accounted_page_bytes(llm: Any) -> None:
    """Every page is larger than K and V by its records, and vLLM's page size says so."""
    runner = model_runner(llm)
    (group,) = runner.kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    plain = spec.num_kv_heads * spec.block_size * 2 * spec.head_size * spec.dtype.itemsize
    assert spec.page_size_bytes * 32 == plain * 33
    assert spec.page_size_padded is None
    for cache in runner.kv_caches:
        assert cache.stride(0) * cache.element_size() >= spec.page_size_bytes
    assert runner.kv_caches[0].untyped_storage().nbytes() == (
        runner.kv_cache_config.num_blocks * len(runner.kv_caches) * spec.page_size_bytes
    )
