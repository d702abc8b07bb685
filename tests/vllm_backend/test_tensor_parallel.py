"""Two ranks give the tokens of one, and both select blocks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.bench.serve_worker import read_stats
from sparsek_backend.eval.engine import ensure_entry_point
from tests.vllm_backend.engines import (
    engine,
    generate,
    generate_by_both,
    requires_cpu_vllm,
    tokens,
)
from tests.vllm_backend.nsa_models import CONFIG, complete, make_model
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

pytestmark = [pytest.mark.engine, requires_cpu_vllm, pytest.mark.usefixtures("registered")]

SETTINGS = {
    "dense_below": 0,
    "num_sink": 16,
    "window_size": 32,
    "sel_block_size": 32,
    "top_k": 2,
    "decode_tokens": 64,
    "query_tile": 1,
}


def read_counter(_worker: Any) -> float | None:
    """Attended keys that a rank reports to Prometheus; ``None`` where it reports nothing."""
    from prometheus_client import REGISTRY

    families = (one for one in REGISTRY.collect() if one.name == "sparsek_attended_tokens")
    values = [s.value for f in families for s in f.samples if s.name.endswith("_total")]
    return sum(values) if values else None


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in processes of their own, on a machine with one NUMA node."""
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", before or "")
    ensure_entry_point()


def test_tokens_of_two_ranks(
    two_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model("llama", tmp_path)
    generator = torch.Generator().manual_seed(6)
    prompts = [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (1, 33, 150, 700)
    ]
    options: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 128,
        "skip_tokenizer_init": True,
    }
    with engine(model, "SPARSEK", SETTINGS, **options) as llm:
        expected = tokens(generate(llm, prompts, together=True))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")  # two ranks share one NUMA node
    with engine(model, "SPARSEK", SETTINGS, tensor_parallel_size=2, **options) as llm:
        found = tokens(generate(llm, prompts, together=True))
        ranks = llm.collective_rpc(read_stats)
        told = llm.collective_rpc(read_counter)
    assert found == expected
    assert len(ranks) == 2
    assert told[0] > 0
    assert told[1] is None  # ranks attend the same keys, which are counted once
    for forward_calls, attended_share in ranks:
        assert forward_calls > 0
        assert attended_share < 0.7


def test_tokens_of_ranks_that_hold_the_context_between_them(
    two_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles and tokens select as on one rank, in chunks and after a hit of whole pages.

    Two ranks hold the pages of each of two KV heads between them.
    """
    size = 4
    model = make_tiny_model("llama", tmp_path)
    generator = torch.Generator().manual_seed(6)
    prompts = [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (1, 33, 150, 700)
    ]
    options: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "block_size": 64,
        "skip_tokenizer_init": True,
    }
    settings = {**SETTINGS, "query_tile": 32}
    with engine(model, "SPARSEK", settings, **options) as llm:
        expected = tokens(generate(llm, prompts, together=True))
    cores = sorted(os.sched_getaffinity(0))  # ranks may share one
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(size))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
    monkeypatch.delenv("VLLM_CPU_SIM_MULTI_NUMA")
    with engine(
        model,
        "SPARSEK",
        settings,
        tensor_parallel_size=size,
        decode_context_parallel_size=2,
        cp_kv_cache_interleave_size=64,
        worker_extension_cls="tests.vllm_backend.context_parallel.Extension",
        **options,
    ) as llm:
        found = tokens(generate(llm, prompts, together=True))
        alone = tokens(generate(llm, prompts[3:], together=True))
        ranks = llm.collective_rpc(read_stats)
    assert found == expected
    assert alone == expected[3:]
    for forward_calls, attended_share in ranks:
        assert forward_calls > 0
        assert attended_share < 0.7


def test_a_natively_sparse_model_gives_the_modules_tokens(
    two_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has one KV head of every branch, and its gates."""
    model = make_model(CONFIG, tmp_path)
    generator = torch.Generator().manual_seed(6)
    prompts = [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (33, 400)
    ]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    with engine(
        tmp_path,
        "SPARSEK",
        tensor_parallel_size=2,
        max_model_len=512,
        max_num_batched_tokens=128,
        skip_tokenizer_init=True,
    ) as llm:
        found = tokens(generate(llm, prompts, together=True))
        ranks = llm.collective_rpc(read_stats)
    assert found == [complete(model, prompt, 16) for prompt in prompts]
    assert [calls > 0 for calls, _ in ranks] == [True, True]


def test_tokens_of_data_parallel_engines(
    two_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two engines behind one front end gives the tokens of an engine alone."""
    model = make_tiny_model("llama", tmp_path)
    generator = torch.Generator().manual_seed(6)
    prompts = [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (33, 700)
    ]
    options: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 128,
        "skip_tokenizer_init": True,
    }
    with engine(model, "SPARSEK", SETTINGS, **options) as llm:
        expected = tokens(generate(llm, prompts, together=True))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    found, stats = generate_by_both(model, SETTINGS, prompts, **options)
    assert found == [*expected, *expected]
    for forward_calls, attended_share in stats:
        assert forward_calls > 0
        assert attended_share < 0.7
