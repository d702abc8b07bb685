"""The sparse regime in a real engine: what must not change a token, and what is reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import visible_reference
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
    "query_tile": 1,
}
LENGTHS = (1100, 700, 40, 513, 900, 300, 640, 257)


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
def llm(tiny: Path) -> Iterator[Any]:
    """A small pool of pages of 32 tokens, prefill in one chunk unless a test says otherwise."""
    with engine(
        tiny,
        "SPARSEK",
        SPARSE,
        max_model_len=1200,
        max_num_batched_tokens=1200,
        block_size=32,
        num_gpu_blocks_override=64,
        skip_tokenizer_init=True,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Each request on its own, prefilled at once."""
    return tokens(generate(llm, prompts, together=False))


def test_selection_matters(tiny: Path, prompts: list[list[int]], alone: list[list[int]]) -> None:
    """The negative control: dense attention gives other tokens, so equality below means something."""
    with engine(
        tiny, "SPARSEK", {"mode": "dense"}, max_model_len=1200, skip_tokenizer_init=True
    ) as dense:
        assert tokens(generate(dense, prompts, together=True)) != alone


@pytest.mark.parametrize("seed", [1, 2])
def test_page_placement(
    llm: Any, prompts: list[list[int]], alone: list[list[int]], seed: int
) -> None:
    shuffle_free_pages(llm, seed)
    assert tokens(generate(llm, prompts, together=False)) == alone


def test_batch_composition_and_preemption(
    llm: Any, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    assert llm.reset_prefix_cache()
    with counted_preemptions(llm) as counter:
        outputs = generate(llm, prompts, together=True, max_tokens=200)
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
    """Every page is 1/32 larger than K and V, and vLLM's page size says so."""
    runner = model_runner(llm)
    (group,) = runner.kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    assert spec.page_size_bytes * 32 == spec.unpadded_page_size_bytes * 33
    for cache in runner.kv_caches:
        assert cache.stride(0) * cache.element_size() >= spec.page_size_bytes
    assert runner.kv_caches[0].untyped_storage().nbytes() == (
        runner.kv_cache_config.num_blocks * len(runner.kv_caches) * spec.page_size_bytes
    )


def test_attended_share_at_8k(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sink block, window 512, 16 blocks: at most 20 % of 8k, as the reference counts it."""
    from sparsek_backend.vllm_backend.metadata import SparseKMetadataBuilder

    steps = []
    build = SparseKMetadataBuilder.build

    def keeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(self, *args, **kwargs)
        steps.append(metadata)
        return metadata

    monkeypatch.setattr(SparseKMetadataBuilder, "build", keeping)
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=16)
    settings = {"num_sink": 64, "window_size": 512, "top_k": 16, "dense_below": 0}
    context = 8185
    prompt = torch.randint(3, VOCABULARY, (context,)).tolist()
    with engine(
        tiny,
        "SPARSEK",
        settings,
        max_model_len=8300,
        max_num_batched_tokens=8300,
        skip_tokenizer_init=True,
    ) as llm:
        generate(llm, [prompt], together=True, max_tokens=12)
    decodes = [step for step in steps if step.batch.max_query_len == 1]
    assert len(decodes) == 11
    layers = 2
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(context + 12, 2, 8, generator=generator)
    for offset, step in enumerate(decodes):
        position = context + offset
        q = torch.randn(1, 4, 8, generator=generator)
        visible = visible_reference(
            q, k[: position + 1], [position], policy.per_token(), softmax_scale=8**-0.5
        )
        counts = set(visible.sum(-1).flatten().tolist())
        assert counts == {step.attended_tokens / layers}
        assert step.context_tokens == layers * (position + 1)
        assert step.attended_share <= 0.20
