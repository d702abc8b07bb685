"""Models with recurrent layers: their pages and those of full attention have one size.

CPU_ATTN serves the same steps: vLLM's short convolution on a CPU rounds by the cut of a step.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_backend.engines import (
    counted_forwards,
    counted_preemptions,
    engine,
    generate,
    model_runner,
    requires_cpu_vllm,
    tokens,
)
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

pytestmark = [pytest.mark.engine, requires_cpu_vllm, pytest.mark.usefixtures("registered")]

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "long_prompts.py"
COVERING = {"dense_below": 0, "top_k": 32, "window_size": 32, "sel_block_size": 32}
LENGTHS = (700, 33, 150, 400)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS
    ]


def serve(model: Path, backend: str, blocks: int) -> tuple[list[Any], dict[str, int]]:
    """Answers to prompts in chunks, too many for the pages, and with prefixes that are known."""
    asked = prompts()
    with (
        counted_forwards() as calls,
        engine(
            model,
            backend,
            COVERING if backend == "SPARSEK" else None,
            max_model_len=900,
            max_num_batched_tokens=128,
            block_size=64,
            enable_prefix_caching=True,
            mamba_cache_mode="align",
            num_gpu_blocks_override=blocks,
            skip_tokenizer_init=True,
        ) as llm,
    ):
        with counted_preemptions(llm) as counter:
            found = generate(llm, asked, together=True, max_tokens=200)
        assert llm.reset_prefix_cache()
        found += generate(llm, [[*asked[0][:320], *asked[1]]], together=False)
        found += generate(llm, asked[:1] * 2, together=False)
        groups = model_runner(llm).kv_cache_config.kv_cache_groups
    assert set(calls) == {backend}
    kinds = {type(group.kv_cache_spec).__name__ for group in groups}
    assert kinds == {"MambaSpec", "FullAttentionSpec"}
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
    return found, dict(counter)


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [("short_conv", 32), ("granite_hybrid", 14), ("falcon_h1", 14), ("nemotron_h", 14)],
)
def test_chunks_preemption_and_prefix_hits(kind: str, blocks: int, tmp_path: Path) -> None:
    model = make_tiny_model(kind, tmp_path)
    expected, their_preemptions = serve(model, "CPU_ATTN", blocks)
    found, preemptions = serve(model, "SPARSEK", blocks)
    assert tokens(found) == tokens(expected)
    assert preemptions == their_preemptions
    assert preemptions["preempted"] > 0
    hits = [answer.num_cached_tokens for answer in found]
    assert hits == [answer.num_cached_tokens for answer in expected]
    assert hits[-1] > 0


@pytest.mark.parametrize("name", ["granite-4.0-h-micro", "lfm2-1.2b"])
def test_shapes_of_the_benchmark(name: str, tmp_path: Path) -> None:
    """A layer of each kind: vLLM builds them, and their pages nest with blocks of 64 tokens."""
    shape = runpy.run_path(str(SCRIPT))["HYBRIDS"][name]
    kinds = sorted(set(shape["layer_types"]))
    shape = {**shape, "num_hidden_layers": len(kinds), "layer_types": kinds, "vocab_size": 1024}
    tmp_path.joinpath("config.json").write_text(json.dumps(shape), encoding="utf-8")
    with engine(
        tmp_path,
        "SPARSEK",
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=131072,
        kv_cache_memory_bytes=1 << 30,
        max_num_batched_tokens=256,
        skip_tokenizer_init=True,
    ) as llm:
        groups = model_runner(llm).kv_cache_config.kv_cache_groups
        generate(llm, [list(range(100))], together=True, max_tokens=2)
    (size,) = {group.kv_cache_spec.block_size for group in groups}
    assert size % 64 == 0
