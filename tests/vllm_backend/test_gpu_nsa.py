"""Natively sparse checkpoints on a GPU: the torch module's own tokens, CUDA graphs on and off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.nn import NSAConfig, NSALlamaConfig, NSALlamaForCausalLM
from tests.vllm_backend.engines import engine, generate
from tests.vllm_backend.nsa_models import CONFIG, complete, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.usefixtures("registered")]

LENGTHS = (1, 15, 33, 64, 700, 1500, 3001)
COUNT = 32
TIE = 0.01
"""Logprob gap within which two tokens are a tie in fp32."""
LIMITS: dict[str, Any] = {
    "max_model_len": 4096,
    "skip_tokenizer_init": True,
}
VARIANTS: dict[str, NSALlamaConfig] = {
    "independent": replace(
        CONFIG, head_dim=64, num_attention_heads=8, nsa=NSAConfig(top_n=6, window_size=128)
    ),
    "shared": replace(
        CONFIG,
        num_key_value_heads=1,
        nsa=replace(CONFIG.nsa, shared_kv=True, compression="mean"),
    ),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"enforce_eager": False},
    "graphs, chunks of 500, prefix hits": {
        "enforce_eager": False,
        "max_num_batched_tokens": 500,
        "enable_prefix_caching": True,
    },
    "speculating": {
        "enforce_eager": False,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
        },
    },
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(3, CONFIG.vocab_size, (max(LENGTHS),), generator=generator).tolist()
    return [drawn[:length] for length in LENGTHS]


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS.keys())
def trained(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
) -> tuple[Path, list[list[int]]]:
    """A model's folder, and what the module answers in fp32 on the GPU."""
    folder = tmp_path_factory.mktemp("nsa")
    model = make_model(request.param, folder).cuda()
    return folder, [complete(model, prompt, COUNT) for prompt in prompts]


def gap_where_parted(answer: Any, expected: list[int]) -> float | None:
    """How much better the engine holds its first token that differs from the module's."""
    found = answer.outputs[0]
    for place, (ours, theirs) in enumerate(zip(found.token_ids, expected, strict=True)):
        if ours != theirs:
            known = found.logprobs[place]
            return known[ours].logprob - known[theirs].logprob if theirs in known else float("inf")
    return None


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_tokens_are_the_modules(
    trained: tuple[Path, list[list[int]]], prompts: list[list[int]], options: dict[str, Any]
) -> None:
    folder, expected = trained
    with engine(folder, "SPARSEK", **{**LIMITS, "enable_prefix_caching": False, **options}) as llm:
        for _ in range(2):  # the second time over cached prefixes, where they are kept
            answers = generate(llm, prompts, together=True, max_tokens=COUNT, logprobs=5)
            gaps = [gap_where_parted(*pair) for pair in zip(answers, expected, strict=True)]
            print("answers part at logprob gaps", gaps)
            # In fp32 two blocks may tie for the last place of a selection, once in a while.
            assert all(gap is None or gap <= TIE for gap in gaps)
            assert sum(gap is not None for gap in gaps) <= 1


def test_bfloat16_is_as_exact_as_the_module(tmp_path: Path, prompts: list[list[int]]) -> None:
    """Log-probabilities of a prompt, in chunks, against the module in fp32."""
    model = make_model(replace(CONFIG, nsa=replace(CONFIG.nsa, top_n=64)), tmp_path).cuda()
    ids = torch.tensor([prompts[-1]], device="cuda")

    def logprobs(module: NSALlamaForCausalLM) -> torch.Tensor:
        found = module(ids)[0, :-1].float().log_softmax(-1)
        return found.gather(1, ids[0, 1:, None])[:, 0].cpu()

    exact, theirs = logprobs(model), logprobs(model.bfloat16())
    with engine(tmp_path, "SPARSEK", **LIMITS, dtype="bfloat16", max_num_batched_tokens=512) as llm:
        (output,) = generate(llm, prompts[-1:], together=True, max_tokens=1, prompt_logprobs=0)
    pairs = zip(prompts[-1][1:], output.prompt_logprobs[1:], strict=True)
    ours = torch.tensor([entry[token].logprob for token, entry in pairs])
    ours_off, theirs_off = ((x - exact).abs().mean() for x in (ours, theirs))
    print(f"mean |d logprob| against fp32: served {ours_off:.5f}, module {theirs_off:.5f}")
    assert ours_off <= 1.5 * theirs_off
