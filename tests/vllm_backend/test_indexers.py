"""An indexer that is no part of the package: registered from this file, and served by an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.config import SparsityConfig
from sparsek_backend.vllm_backend.sparsek import impl as impl_module
from sparsek_backend.vllm_backend.sparsek.selection import register_indexer
from sparsek_kernels.paged import Chosen, Indexer, Indexers, StepPolicy
from sparsek_kernels.paged.batch import host_lengths
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.reference import paged_attention_reference
from tests.vllm_backend.engines import engine, generate, requires_cpu_vllm
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model


class Earliest(Indexer):
    """Chooses the first blocks that compete, whatever the queries are."""

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return consecutive blocks from the first candidate on."""
        policy, first = segment.policy, []
        for length, count in zip(*host_lengths(segment.batch), strict=True):
            start, tile = length - count, policy.query_tile
            first += [
                max(start, position) for position in range(start // tile * tile, length, tile)
            ]
        rows = [
            [-1] * policy.scored_blocks
            if policy.sees_all(position)
            else [policy.sink_blocks + slot for slot in range(policy.scored_blocks)]
            for position in first
        ]
        indices = torch.tensor(rows, dtype=torch.int32)[:, None]
        return Chosen(indices.expand(-1, operands.heads, -1).contiguous())


def earliest(q: Any, k: torch.Tensor, positions: list[int], policy: Any, scale: float) -> Any:
    """The same as an oracle."""
    if policy.sees_all(positions[0]):
        return None
    return [[policy.sink_blocks + slot for slot in range(policy.scored_blocks)]] * k.shape[1]


@pytest.mark.engine
@requires_cpu_vllm
@pytest.mark.usefixtures("registered")
def test_an_engine_serves_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_indexer("earliest", lambda policy, engine, site: Indexers(Earliest(), Earliest()))
    assert SparsityConfig(mode="earliest").selects_blocks
    real, errors, phases = impl_module.attend_segment, [], []

    def held_against_oracle(of: PagedOperands, segment: Segment, index: Any) -> None:
        real(of, segment, index)
        if index is not None:
            assert isinstance(index, Earliest)
            phases.append(segment.decodes)
        alone = segment.policy if segment.decodes else segment.policy.per_token(2, 32)
        expected = paged_attention_reference(
            of.q, of.k_cache, of.v_cache, segment.batch, StepPolicy(segment.policy, alone),
            softmax_scale=of.softmax_scale, select=earliest,
        )  # fmt: skip
        rows = slice(segment.batch.cu_seqlens_q[0], segment.batch.cu_seqlens_q[-1])
        errors.append(float((of.out.double() - expected)[rows].abs().max()))

    monkeypatch.setattr(impl_module, "attend_segment", held_against_oracle)
    settings = {
        "mode": "earliest",
        "num_sink": 16,
        "window_size": 32,
        "top_k": 2,
        "decode_tokens": 64,
    }
    settings |= {"sel_block_size": 32, "query_tile": 32, "dense_below": 0, "dense_last": 0}
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(3, VOCABULARY, (300,), generator=generator).tolist()
    with engine(
        make_tiny_model("llama", tmp_path), "SPARSEK", settings, block_size=32,
        max_model_len=400, max_num_batched_tokens=128, skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        generate(llm, [prompt, prompt[:90]], together=True, max_tokens=4)
    assert {*phases} == {False, True}
    assert max(errors) < 1e-5
