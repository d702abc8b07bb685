"""The attended share that an engine reports, against a count from the reference's selection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsek_backend.vllm_backend.accounting import Accounting
from sparsek_backend.vllm_backend.keys import NO_KEYS
from sparsek_backend.vllm_backend.stats import STATS
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy
from sparsek_kernels.paged.reference import list_logs, select_blocks_reference
from tests.vllm_backend.drafts import speculation
from tests.vllm_backend.engines import engine, generate, requires_cpu_vllm
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("registered")]


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


@requires_cpu_vllm
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


@pytest.mark.parametrize(
    ("version", "method"),
    [
        pytest.param("0", "draft_model", id="first-draft_model"),
        pytest.param("0", "eagle", id="first-eagle"),
        # vLLM 0.26 refuses draft models in its second runner
        pytest.param("1", "eagle", marks=pytest.mark.gpu, id="second-eagle"),
    ],
)
def test_layers_of_a_draft_are_counted_as_often_as_they_attend(
    version: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each of vLLM's model runners, of which the second needs a GPU.

    The first layer of the draft attends everything, its second one less.
    """
    from sparsek_backend.vllm_backend.sparsek.impl import SparseKImpl

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", version)
    attended = context = NO_KEYS
    calls = 0
    forward = SparseKImpl.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal attended, context, calls
        step = args[5]
        if step is not None:
            batch = step.batch
            lens = np.array(step.seq_lens), np.array(batch.query_lens_host)
            of_prompts = batch.num_decodes, batch.prompt_left_host
            attended = attended.plus(Accounting(self.policy).count(*lens, *of_prompts))
            everything = Accounting(StepPolicy.of(SelectionPolicy()))
            context = context.plus(everything.count(*lens, *of_prompts))
            calls += 1
        return forward(self, *args, **kwargs)

    folders = [tmp_path / name for name in ("model", "draft")]
    for folder in folders:
        folder.mkdir()
    model = make_tiny_model("llama", folders[0])
    drafts = speculation(method, model, folders[1])
    drafts["speculative_config"]["attention_backend"] = "SPARSEK"
    settings = {"window_size": 64, "top_k": 2, "decode_tokens": 64, "dense_below": 0}
    settings["dense_layers"] = [2]
    options = {"max_model_len": 1024, "skip_tokenizer_init": True, **drafts}
    with engine(model, "SPARSEK", settings, **options) as llm:
        before = STATS.attended, STATS.context, STATS.forward_calls
        monkeypatch.setattr(SparseKImpl, "forward", counting)
        prompts = [torch.randint(3, VOCABULARY, (length,)).tolist() for length in (700, 300)]
        generate(llm, prompts, together=True, max_tokens=8)
    assert calls == STATS.forward_calls - before[2] > 0
    assert STATS.context.plus(before[1], -1) == context
    assert STATS.attended.plus(before[0], -1) == attended
