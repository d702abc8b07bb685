"""The attended share that an engine reports, against a count from the reference's selection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.layer_budgets import LayerBudgets
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import visible_reference
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
    """One sink block, window 512, 16 blocks: at most 20 % of 8k, as the reference counts it."""
    steps = keep_steps(monkeypatch)
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=16)
    settings = {"num_sink": 64, "window_size": 512, "top_k": 16, "decode_top_k": 16}
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
        visible = visible_reference(
            q, k[: position + 1], [position], policy.per_token(), softmax_scale=8**-0.5
        )
        counts = set(visible.sum(-1).flatten().tolist())
        assert counts == {step.attended_tokens / layers}
        assert step.context_tokens == layers * (position + 1)
        assert step.attended_share <= 0.20


def test_budgets_of_layers_and_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer and KV head attends its own number of blocks, and the count is the reference's."""
    steps = keep_steps(monkeypatch)
    budgets = LayerBudgets.make(
        top_k={0: (2, 7), 1: (3, 4)},
        model="llama",
        num_hidden_layers=2,
        num_key_value_heads=2,
        sel_block_size=64,
    )
    path = budgets.save(tmp_path / "budgets.json")
    window = {"num_sink": 64, "window_size": 128, "dense_below": 0, "dense_last": 0}
    single = {"decode_top_k": 4}  # as many as the mean
    context = 1000
    with engine(
        make_tiny_model("llama", tmp_path),
        "SPARSEK",
        {**window, **single, "budgets": str(path)},
        max_model_len=1400,
        max_num_batched_tokens=1400,
        skip_tokenizer_init=True,
    ) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        served = [layer.impl.policy.head_top_k for layer in layers.values()]
        generate(
            llm, [torch.randint(3, VOCABULARY, (context,)).tolist()], together=True, max_tokens=3
        )
    assert served == [(2, 7), (3, 4)]
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(context + 3, 2, 8, generator=generator)
    by_position = {}
    for step in steps:
        first = step.seq_lens[0] - step.batch.query_lens[0]
        by_position[first] = step.attended_tokens
    for first, count in ((0, context), (context, 1), (context + 1, 1)):
        total = 0.0
        for heads in budgets.top_k.values():
            policy = SelectionPolicy(
                **{n: window[n] for n in ("num_sink", "window_size")},
                top_k=max(heads),
                head_top_k=heads,
            )
            rule = policy.per_token() if count == 1 else policy
            q = torch.randn(count, 4, 8, generator=generator)
            positions = list(range(first, first + count))
            seen_keys = visible_reference(q, k[: first + count], positions, rule, 8**-0.5)
            total += seen_keys.double().sum(-1).mean(1).sum().item()
        assert by_position[first] == total


def test_what_min_mass_leaves_out_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.eval.engine import backend_report, count_left_out
    from sparsek_backend.vllm_backend.stats import STATS

    steps = keep_steps(monkeypatch)
    settings = {"num_sink": 64, "window_size": 128, "top_k": 8, "decode_top_k": 8}
    settings |= {"dense_below": 0, "min_mass": 0.06}
    prompts = [torch.randint(3, VOCABULARY, (length,)).tolist() for length in (1000, 900)]
    STATS.finish()
    before, counts = (STATS.attended_tokens, STATS.context_tokens), count_left_out()
    with engine(
        make_tiny_model("llama", tmp_path),
        "SPARSEK",
        settings,
        max_model_len=1100,
        max_num_batched_tokens=600,  # chunks
        skip_tokenizer_init=True,
    ) as llm:
        generate(llm, prompts, together=True, max_tokens=4)
        assert "of the context attended" in backend_report(settings)
    left_out = 0.0
    for phase, (keys, selected) in count_left_out().items():
        keys, selected = keys - counts[phase][0], selected - counts[phase][1]
        assert 0 < keys <= selected
        left_out += keys
    most = sum(step.attended_tokens for step in steps)
    assert STATS.attended_tokens - before[0] == most - left_out
    assert STATS.context_tokens - before[1] == sum(step.context_tokens for step in steps)
