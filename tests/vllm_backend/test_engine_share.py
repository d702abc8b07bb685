"""The attended share that an engine reports, against a count from the reference's selection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import list_logs, select_blocks_reference
from tests.vllm_backend.engines import engine, generate, requires_cpu_vllm
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

pytestmark = [pytest.mark.engine, requires_cpu_vllm, pytest.mark.usefixtures("registered")]


def keep_steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The metadata of every step from now on."""
    from sparsek_backend.vllm_backend.sparsek.metadata import SparseKMetadataBuilder

    steps: list[Any] = []
    build = SparseKMetadataBuilder.build

    def keeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(self, *args, **kwargs)
        steps.append(metadata)
        return metadata

    monkeypatch.setattr(SparseKMetadataBuilder, "build", keeping)
    return steps


def test_attended_share_at_8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks of 64, window 512, 1024 more: at most 21 % of 8k, as the reference counts it."""
    steps = keep_steps(monkeypatch)
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=16).by_records(1024)
    settings = {"num_sink": 64, "window_size": 512, "top_k": 16, "decode_tokens": 1024}
    settings["dense_below"] = 0
    context = 8185
    prompt = torch.randint(3, VOCABULARY, (context,)).tolist()
    with engine(
        make_tiny_model("llama", tmp_path),
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
        choice = q, k[: position + 1], [position], policy, 8**-0.5
        entries = select_blocks_reference(*choice)
        assert entries is not None
        seen = list_logs(entries, position + 1, position, policy).isfinite().sum(-1)
        most = sum(step.attended) / layers  # shares are rounded down, by a 32nd of an octave
        assert (seen <= most).all()
        assert (seen >= 0.98 * most).all()
        assert sum(step.context) == layers * (position + 1)
        assert sum(step.attended) <= 0.21 * sum(step.context)
