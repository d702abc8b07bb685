"""MiniCPM4's blocks on a GPU, ranked as the model was trained.

Held against a dense backend, in chunks and graphs, and block by block against a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.vllm_backend.sparsek import impl as impl_module
from sparsek_kernels.paged import Indexers, InfLLM, StepPolicy, select_blocks
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from tests.vllm_backend.engines import engine, generate, tokens
from tests.vllm_backend.features import test_gpu_features as features
from tests.vllm_backend.features.test_gpu_features import LIMITS, check_close, logprobs, ran
from tests.vllm_backend.tiny_models import SPARSE_CONFIG, make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.usefixtures("registered")]

prompts, remote_calls = features.prompts, features.remote_calls  # fixtures
INFLLM = {"mode": "infllm"}


def as_trained(use_nope: bool, **changes: Any) -> dict[str, Any]:
    """Options of an engine whose blocks are ranked as the tiny MiniCPM's section says."""
    section = {**SPARSE_CONFIG, "use_nope": use_nope, **changes}
    return {**LIMITS, "hf_overrides": {"sparse_config": section}}


@pytest.mark.parametrize("use_nope", [False, True], ids=["rotated", "use_nope"])
def test_within_the_budget(use_nope: bool, prompts: list[list[int]], tmp_path: Path) -> None:
    model = make_tiny_model("minicpm", tmp_path)
    expected = logprobs(model, "TRITON_ATTN", prompts)
    options = as_trained(use_nope, topk=64)
    check_close(logprobs(model, "SPARSEK", prompts, INFLLM, **options), expected)


@pytest.mark.parametrize("use_nope", [False, True], ids=["rotated", "use_nope"])
def test_chunks_and_graphs(use_nope: bool, prompts: list[list[int]], tmp_path: Path) -> None:
    """Tokens are chosen for one by one, so that chunks, prefix hits and graphs change nothing."""
    model, options = make_tiny_model("minicpm", tmp_path), as_trained(use_nope)
    with engine(model, "SPARSEK", INFLLM, **options) as llm:
        before = ran(llm)
        expected = tokens(generate(llm, prompts, together=True))
        assert ran(llm) > before
    options |= {"max_num_batched_tokens": 200, "enforce_eager": False}
    with engine(model, "SPARSEK", INFLLM, **options) as llm:
        assert tokens(generate(llm, prompts, together=True)) == expected
        again = generate(llm, prompts[3:], together=True)
        assert tokens(again) == expected[3:]
        assert again[0].num_cached_tokens >= len(prompts[3]) // 2


@pytest.mark.parametrize("use_nope", [False, True], ids=["rotated", "use_nope"])
def test_choices_are_those_of_a_cpu(
    use_nope: bool, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer, in prefill and decode, chooses what a CPU does, but for near ties.

    A CPU, which is held against the oracle elsewhere, scores means that are not rounded.
    """
    real, same = impl_module.attend_segment, []

    def held_against_cpu(of: PagedOperands, segment: Segment, index: Any) -> None:
        assert isinstance(index, InfLLM)
        both, rule = Indexers(index, index), StepPolicy(segment.policy, segment.policy)
        chosen, expected = (
            select_blocks(
                queries, keys, some, rule, k_summary=kept, softmax_scale=of.softmax_scale,
                indexers=both,
            )
            for queries, keys, some, kept in (
                (of.q, of.k_cache, segment.batch, of.summary),
                (of.q.cpu(), of.k_cache.cpu(), on_host(segment.batch), of.summary.cpu()),
            )
        )  # fmt: skip
        for mine, theirs in zip(chosen, expected, strict=True):
            mine = mine.cpu()
            assert torch.equal(mine < 0, theirs < 0)
            found = (mine[..., None] == theirs[..., None, :]).any(-1)
            same.append(found[theirs >= 0].float())
        real(of, segment, index)

    model = make_tiny_model("minicpm", tmp_path)
    options = as_trained(use_nope) | {"kv_cache_memory_bytes": 1 << 25}
    with engine(model, "SPARSEK", INFLLM, **options) as llm:
        monkeypatch.setattr(impl_module, "attend_segment", held_against_cpu)
        generate(llm, prompts[2:], together=True, max_tokens=4)
    shares = torch.cat(same)
    print(f"{len(shares)} blocks, {shares.mean():.4f} of them chosen by both")
    assert len(shares) > 1000
    assert shares.mean() > 0.97


def on_host(batch: Any) -> Any:
    """A step as a CPU takes it."""
    names = ("block_table", "seq_lens", "cu_seqlens_q", "rotation")
    given = {name: getattr(batch, name) for name in names}
    moved = {name: None if x is None else x.cpu() for name, x in given.items()}
    lengths = tuple(batch.seq_lens.tolist())
    return replace(batch, **moved, seq_lens_host=lengths, _derived={})
