"""Budget >= context is dense attention: SPARSEK's tokens equal CPU_ATTN's, however served.

fp32, SmolLM2-135M, 17 prompts of 1 to 1000 tokens; prefill in chunks of 64 tokens, in a pool of
KV pages that is too small for the concurrent requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_backend.engines import (
    counted_forwards,
    counted_preemptions,
    engine,
    generate,
    model_runner,
    requires_cpu_vllm,
    tokens,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1500),
    requires_cpu_vllm,
    pytest.mark.usefixtures("registered"),
]

LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 191, 300, 383, 640, 1000)
MAX_LEN = 1280
PROBE = LENGTHS.index(383)
EVICTED = [LENGTHS.index(length) for length in (640, 383, 300, 128, 127, 1000)]
ANSWER, LONG_ANSWER = 8, 72


@pytest.fixture(scope="module")
def prompts(text_ids: list[int]) -> list[list[int]]:
    return [text_ids[150 * i : 150 * i + length] for i, length in enumerate(LENGTHS)]


def prompt_logprobs(llm: Any, prompt: list[int]) -> list[float]:
    """Log-probability of every token of a prompt but the first."""
    (output,) = generate(llm, [prompt], together=True, max_tokens=1, prompt_logprobs=0)
    found = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return [entry[token].logprob for token, entry in found]


@dataclass(frozen=True)
class Reference:
    """What CPU_ATTN answers: to every prompt, to one prompt's tokens, at length to some."""

    outputs: list[Any]
    probe: list[float]
    long: list[list[int]]


@pytest.fixture(scope="module")
def reference(smollm2: Path, prompts: list[list[int]]) -> Reference:
    """CPU_ATTN's answers with logprobs, and a check that it answered."""
    with (
        counted_forwards() as calls,
        engine(
            smollm2,
            "CPU_ATTN",
            max_model_len=MAX_LEN,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=512 << 20,
        ) as llm,
    ):
        outputs = generate(llm, prompts, together=True, max_tokens=ANSWER, logprobs=5)
        probe = prompt_logprobs(llm, prompts[PROBE])
        long = generate(llm, [prompts[i] for i in EVICTED], together=True, max_tokens=LONG_ANSWER)
    assert calls["CPU_ATTN"] > 0
    assert calls["SPARSEK"] == 0
    return Reference(outputs, probe, tokens(long))


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[Any]:
    return reference.outputs


@pytest.fixture(scope="module")
def expected_prompt(reference: Reference) -> list[float]:
    return reference.probe


@pytest.fixture(scope="module")
def expected_long(reference: Reference) -> list[list[int]]:
    return reference.long


@pytest.fixture(scope="module")
def small_pool(smollm2: Path, expected: list[Any]) -> Iterator[Any]:
    """SPARSEK with chunks of 64 tokens and 17 pages of 128 tokens; budget >= context."""
    settings = {"dense_below": 0, "top_k": 64, "decode_tokens": 4096}
    with engine(
        smollm2,
        "SPARSEK",
        settings,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=17,
    ) as llm:
        yield llm


def test_sequential_in_chunks(
    small_pool: Any, prompts: list[list[int]], expected: list[Any]
) -> None:
    with counted_forwards() as calls:
        outputs = generate(small_pool, prompts, together=False, max_tokens=ANSWER, logprobs=5)
    assert tokens(outputs) == tokens(expected)
    layers = len(model_runner(small_pool).kv_caches)
    assert calls["SPARSEK"] >= layers * sum(-(-length // 64) for length in LENGTHS)
    assert calls["CPU_ATTN"] == 0
    worst = max(
        abs(entry.logprob - theirs[token].logprob)
        for output, reference in zip(outputs, expected, strict=True)
        for ours, theirs in zip(
            output.outputs[0].logprobs, reference.outputs[0].logprobs, strict=True
        )
        for token, entry in ours.items()
        if token in theirs
    )
    assert worst < 1e-3


def test_eight_at_once(small_pool: Any, prompts: list[list[int]], expected: list[Any]) -> None:
    outputs = generate(small_pool, prompts, together=True, max_tokens=ANSWER)
    assert tokens(outputs) == tokens(expected)


def test_preemption(
    small_pool: Any, prompts: list[list[int]], expected_long: list[list[int]]
) -> None:
    """Prompts are admitted into 16 usable pages, then their answers outgrow them."""
    with counted_preemptions(small_pool) as counter:
        outputs = generate(
            small_pool, [prompts[i] for i in EVICTED], together=True, max_tokens=LONG_ANSWER
        )
    assert counter["preempted"] > 0
    assert tokens(outputs) == expected_long


def test_prefix_hits(small_pool: Any, prompts: list[list[int]], expected: list[Any]) -> None:
    cached = [LENGTHS.index(length) for length in (129, 300, 640)]
    asked = [prompts[i] for i in cached]
    generate(small_pool, asked, together=True, max_tokens=1)
    again = generate(small_pool, asked, together=True, max_tokens=ANSWER)
    assert [output.num_cached_tokens for output in again] == [128, 256, 512]
    assert tokens(again) == tokens([expected[i] for i in cached])


def test_prompt_logprobs_in_chunks(
    small_pool: Any, prompts: list[list[int]], expected_prompt: list[float]
) -> None:
    found = prompt_logprobs(small_pool, prompts[PROBE])
    assert max(abs(a - b) for a, b in zip(found, expected_prompt, strict=True)) < 1e-3
