"""SeerAttention-R's gates on a GPU: against a dense backend, in graphs, and against a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.vllm_backend.sparsek import impl as impl_module
from sparsek_kernels.paged import Gates, Indexers, Seer, StepPolicy, select_blocks
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from tests.vllm_backend.engines import engine, generate, tokens
from tests.vllm_backend.features import test_gpu_features as features
from tests.vllm_backend.features.test_gpu_features import LIMITS, check_close, logprobs, ran
from tests.vllm_backend.features.test_gpu_infllm import on_host
from tests.vllm_backend.gate_files import make_gates_folder
from tests.vllm_backend.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.usefixtures("registered")]

prompts, remote_calls = features.prompts, features.remote_calls  # fixtures
SEER = {"mode": "seer"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_gates_folder(make_tiny_model("qk_norm", tmp_path))


def test_within_the_budget(model: Path, prompts: list[list[int]]) -> None:
    expected = logprobs(model, "TRITON_ATTN", prompts)
    found = logprobs(model, "SPARSEK", prompts, {**SEER, "decode_tokens": 64 * 64}, **LIMITS)
    check_close(found, expected)


def test_chunks_and_graphs(model: Path, prompts: list[list[int]]) -> None:
    """Prefills attend everything, so that chunks, prefix hits and graphs change nothing."""
    with engine(model, "SPARSEK", SEER, **LIMITS) as llm:
        before = ran(llm)
        expected = tokens(generate(llm, prompts, together=True))
        assert ran(llm) > before
    options = {**LIMITS, "max_num_batched_tokens": 200, "enforce_eager": False}
    with engine(model, "SPARSEK", SEER, **options) as llm:
        assert tokens(generate(llm, prompts, together=True)) == expected
        again = generate(llm, prompts[3:], together=True)
        assert tokens(again) == expected[3:]
        assert again[0].num_cached_tokens >= len(prompts[3]) // 2


def test_choices_are_those_of_a_cpu(
    model: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer chooses for every decoded token what a CPU does, but for near ties."""
    real, same = impl_module.attend_segment, []

    def held_against_cpu(of: PagedOperands, segment: Segment, index: Any) -> None:
        if not isinstance(index, Seer):
            real(of, segment, index)
            return
        batch, rule = segment.batch, StepPolicy(segment.policy, segment.policy)
        host = Seer(Gates(*(None if x is None else x.cpu() for x in index.tensors)))
        chosen, expected = (
            select_blocks(
                queries, keys, some, rule, k_summary=kept, softmax_scale=of.softmax_scale,
                indexers=Indexers(None, mine),
            )
            for queries, keys, some, kept, mine in (
                (of.q, of.k_cache, batch, of.summary, index),
                (of.q.cpu(), of.k_cache.cpu(), on_host(batch), of.summary.cpu(), host),
            )
        )  # fmt: skip
        for mine, theirs in zip(chosen, expected, strict=True):
            mine = mine.cpu()
            assert torch.equal(mine < 0, theirs < 0)
            found = (mine[..., None] == theirs[..., None, :]).any(-1)
            same.append(found[theirs >= 0].float())
        real(of, segment, index)

    options = {**LIMITS, "kv_cache_memory_bytes": 1 << 25}
    with engine(model, "SPARSEK", SEER, **options) as llm:
        monkeypatch.setattr(impl_module, "attend_segment", held_against_cpu)
        generate(llm, prompts[2:], together=True, max_tokens=32)
    shares = torch.cat(same)
    print(f"{len(shares)} blocks, {shares.mean():.4f} of them chosen by both")
    assert len(shares) > 300
    assert shares.mean() > 0.99
