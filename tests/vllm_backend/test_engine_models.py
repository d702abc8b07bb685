"""Every kind of attention in a real engine, against CPU_ATTN: kernels' masks and fallbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from sparsek_backend.vllm_backend.sparsek import impl as impl_module
from sparsek_kernels.fallback import fallback_counts
from sparsek_kernels.paged.index.infllm import InfLLM
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy
from sparsek_kernels.paged.reference import paged_attention_reference, select_infllm_reference
from tests.vllm_backend.engines import (
    counted_forwards,
    engine,
    generate,
    model_runner,
    requires_cpu_vllm,
)
from tests.vllm_backend.tiny_models import (
    SPARSE_CONFIG,
    VOCABULARY,
    make_tiny_model,
    quantise,
)

pytestmark = [pytest.mark.engine, requires_cpu_vllm, pytest.mark.usefixtures("registered")]

LENGTHS = (1, 33, 150, 290)
MAX_LEN = 320
COVERING = {
    "dense_below": 0,
    "top_k": 16,
    "decode_tokens": 512,
    "window_size": 32,
    "sel_block_size": 32,
}
"""Block selection with summaries, and a budget that covers every context here."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS
    ]


def decode(model: Path, backend: str, prompts: list[list[int]], **options: Any) -> torch.Tensor:
    """Log-probabilities of each prompt's tokens and of 8 greedy tokens, in one row."""
    with (
        counted_forwards() as calls,
        engine(
            model,
            backend,
            COVERING if backend == "SPARSEK" else None,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=128,
            skip_tokenizer_init=True,
            **options,
        ) as llm,
    ):
        outputs = generate(llm, prompts, together=True, max_tokens=8, logprobs=0, prompt_logprobs=0)
    assert calls[backend] > 0
    assert calls.total() == calls[backend]
    values = []
    for prompt, output in zip(prompts, outputs, strict=True):
        found = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        values += [entry[token].logprob for token, entry in found]
        values += [
            entry[token].logprob
            for token, entry in zip(
                output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
            )
        ]
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mha", None),
        ("mqa", None),
        ("qk_norm", None),
        ("moe", None),
        ("minicpm", None),
        ("head_dim_80", None),
        ("sliding", None),
        ("hybrid", None),
        ("chunked", None),
        ("shared_kv", None),
        ("soft_cap", "logits soft cap"),
        ("alibi", "ALiBi"),
    ],
)
def test_decoders(kind: str, reason: str | None, prompts: list[list[int]], tmp_path: Path) -> None:
    model = make_tiny_model(kind, tmp_path)
    before = fallback_counts()
    found = decode(model, "SPARSEK", prompts)
    after = fallback_counts()
    torch.testing.assert_close(found, decode(model, "CPU_ATTN", prompts), atol=2e-4, rtol=0)
    if reason:
        (family,) = (one for one in REGISTRY.collect() if one.name == "sparsek_fallback")
        (sample,) = (
            one
            for one in family.samples
            if one.labels["reason"] == reason
            and one.labels["model_name"] == str(model)
            and one.name.endswith("_total")
        )
        assert sample.value > 0
    grown = {name for name, count in after.items() if count > before.get(name, 0)}
    assert grown == ({reason} if reason else set())


def test_shared_pages_without_the_hybrid_kv_manager(
    prompts: list[list[int]], tmp_path: Path
) -> None:
    """Some KV connectors switch it off; then windows and whole contexts have pages of one kind."""
    model = make_tiny_model("shared_kv", tmp_path)
    found, wanted = (
        decode(model, backend, prompts, disable_hybrid_kv_cache_manager=True)
        for backend in ("SPARSEK", "CPU_ATTN")
    )
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


def test_weights_in_4_bits(prompts: list[list[int]], tmp_path: Path) -> None:
    """In 16 bits rounding moves logits a little everywhere; a wrong mask moves most of them far."""
    import vllm._custom_ops  # noqa: F401, which loads torch.ops._C

    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM multiplies weights of 4 bits on processors with AVX-512 alone")
    model = quantise(make_tiny_model("llama", tmp_path), "gptq")
    found = decode(model, "SPARSEK", prompts[2:3], dtype="bfloat16")
    distance = (found - decode(model, "CPU_ATTN", prompts[2:3], dtype="bfloat16")).abs()
    print(f"|d logprob|: mean {distance.mean():.4f}, largest {distance.max():.4f}")
    assert distance.mean() < 0.1


def test_minicpm_takes_its_own_selection(prompts: list[list[int]], tmp_path: Path) -> None:
    from sparsek_backend.vllm_backend.stats import STATS

    model = make_tiny_model("minicpm", tmp_path)
    before = sum(STATS.attended), sum(STATS.context)
    with engine(
        model,
        "SPARSEK",
        max_model_len=MAX_LEN,
        max_num_batched_tokens=128,
        skip_tokenizer_init=True,
    ) as llm:
        generate(llm, prompts[-1:], together=False, max_tokens=8)
        context = model_runner(llm).vllm_config.compilation_config.static_forward_context
        policies = {layer.impl.policy for layer in context.values()}
        layers = len(context)
    tiles = SelectionPolicy(
        num_sink=32, window_size=64, top_k=3, sel_block_size=32, dense_below=128, query_tile=64
    )
    policy = StepPolicy(tiles, tiles.by_records(96))
    assert policies == {policy}
    positions = range(LENGTHS[-1] + 7)
    expected = sum(
        (policy.prefill if position < LENGTHS[-1] else policy.decode).attended_tokens(position)
        for position in positions
    )
    assert sum(STATS.attended) - before[0] == layers * expected
    assert sum(STATS.context) - before[1] == layers * sum(p + 1 for p in positions)


def unrotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``[n, heads, D]`` before the rotary embedding of the tiny models, float64."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 1e4 ** -(torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), -angles)
    return torch.cat([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("use_nope", [False, True], ids=["rotated", "use_nope"])
def test_minicpm_as_it_was_trained(
    use_nope: bool, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer, in prefill and decode, attends what the oracle of InfLLM-v2 chooses."""
    real, errors = impl_module.attend_segment, []

    def select(q: torch.Tensor, k: torch.Tensor, positions: list[int], *rest: Any) -> Any:
        if use_nope:
            q, k = unrotated(q, torch.tensor(positions)), unrotated(k, torch.arange(len(k)))
        return select_infllm_reference(q, k, positions, *rest)

    def held_against_oracle(of: PagedOperands, segment: Segment, index: Any) -> None:
        real(of, segment, index)
        assert index is None if segment.policy.is_dense else isinstance(index, InfLLM)
        policy = StepPolicy(segment.policy, segment.policy)
        expected = paged_attention_reference(
            of.q, of.k_cache, of.v_cache, segment.batch, policy,
            softmax_scale=of.softmax_scale, select=select,
        )  # fmt: skip
        rows = slice(segment.batch.cu_seqlens_q[0], segment.batch.cu_seqlens_q[-1])
        errors.append(float((of.out.double() - expected)[rows].abs().max()))

    monkeypatch.setattr(impl_module, "attend_segment", held_against_oracle)
    model = make_tiny_model("minicpm", tmp_path)
    section = {**SPARSE_CONFIG, "use_nope": use_nope}
    with engine(
        model,
        "SPARSEK",
        {"mode": "infllm"},
        hf_overrides={"sparse_config": section},
        max_model_len=MAX_LEN,
        max_num_batched_tokens=128,
        skip_tokenizer_init=True,
    ) as llm:
        generate(llm, prompts[-1:], together=False, max_tokens=4)
    assert len(errors) >= 2 * (3 + 3)
    assert max(errors) < 1e-4


def embed(model: Path, backend: str, prompts: list[list[int]]) -> torch.Tensor:
    """A row for each prompt."""
    settings = COVERING if backend == "SPARSEK" else None
    with (
        counted_forwards() as calls,
        engine(model, backend, settings, runner="pooling", max_model_len=MAX_LEN) as llm,
    ):
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.embed(requests, use_tqdm=False)
    assert set(calls) == {backend}
    return torch.tensor([output.outputs.embedding for output in outputs])


@pytest.mark.parametrize("kind", ["encoder", "sliding_encoder"])
def test_encoder_only_models(kind: str, prompts: list[list[int]], tmp_path: Path) -> None:
    model = make_tiny_model(kind, tmp_path)
    before = fallback_counts().get("encoder-only attention", 0)
    found, expected = (embed(model, backend, prompts) for backend in ("SPARSEK", "CPU_ATTN"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert fallback_counts()["encoder-only attention"] > before


def test_embeddings_of_a_decoder(prompts: list[list[int]], tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path)
    found, expected = (embed(model, backend, prompts) for backend in ("SPARSEK", "CPU_ATTN"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
