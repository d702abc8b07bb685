"""What a request can ask for: answers equal CPU_ATTN's where the budget covers the context."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_backend.engines import (
    counted_forwards,
    engine,
    generate,
    requires_cpu_vllm,
    tokens,
)
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

pytestmark = [pytest.mark.engine, requires_cpu_vllm, pytest.mark.usefixtures("registered")]

COVERING = {"dense_below": 0, "top_k": 16, "window_size": 32, "sel_block_size": 32}
RANK, HIDDEN = 4, 128
LOGPROBS = "logprobs and prompt logprobs"


def _prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def several_samples(llm: Any, _: Path) -> Any:
    (answer,) = generate(llm, [_prompt(150)], together=True, n=3, temperature=1.0, seed=1)
    return [list(sample.token_ids) for sample in answer.outputs]


def beam_search(llm: Any, _: Path) -> Any:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (answer,) = llm.beam_search([{"prompt_token_ids": _prompt(150)}], params)
    return [beam.tokens for beam in answer.sequences]


def structured_output(llm: Any, _: Path) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    wanted = StructuredOutputsParams(choice=["17 400 23", "90 11 5"])
    return tokens(generate(llm, [_prompt(150)], together=True, structured_outputs=wanted))


def prompt_embeds(llm: Any, _: Path) -> Any:
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(2)
    embeds = 0.15 * torch.randn(150, HIDDEN, generator=generator)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    return tokens(llm.generate([{"prompt_embeds": embeds}], params, use_tqdm=False))


def lora(llm: Any, folder: Path) -> Any:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    request = [{"prompt_token_ids": _prompt(150)}]
    adapter = LoRARequest("tiny", 1, str(folder))
    plain = tokens(llm.generate(request, params, use_tqdm=False))
    adapted = tokens(llm.generate(request, params, use_tqdm=False, lora_request=adapter))
    assert adapted != plain
    return adapted


def logprobs(llm: Any, _: Path) -> Any:
    (answer,) = generate(llm, [_prompt(150)], together=True, logprobs=2, prompt_logprobs=2)
    places = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
    held = [{token: entry.logprob for token, entry in one.items()} for one in places]
    return held


def penalties_and_stops(llm: Any, _: Path) -> Any:
    asked = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 4}
    stops = list(range(3, 250))
    found = generate(llm, [_prompt(150)], together=True, stop_token_ids=stops, **asked)
    return tokens(found)


REQUESTS: dict[str, Callable[[Any, Path], Any]] = {
    "n": several_samples,
    "beam search": beam_search,
    "structured output": structured_output,
    "prompt embeds": prompt_embeds,
    "LoRA": lora,
    LOGPROBS: logprobs,
    "penalties and stop tokens": penalties_and_stops,
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the query and value projections, large enough to change tokens."""
    from safetensors.torch import save_file

    folder: Path = tmp_path_factory.mktemp("lora")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    folder.joinpath("adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(4)
    weights = {}
    for layer in range(2):
        for name, rows in (("q_proj", 128), ("v_proj", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def _serve(model: Path, backend: str) -> Any:
    return engine(
        model,
        backend,
        COVERING if backend == "SPARSEK" else None,
        max_model_len=320,
        max_num_batched_tokens=512,
        enable_lora=True,
        max_lora_rank=8,
        enable_prompt_embeds=True,
        max_logprobs=-1,
    )


@pytest.fixture(scope="module")
def expected(
    registered: None, adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The model, and CPU_ATTN's answers to every request."""
    model = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    with counted_forwards() as calls, _serve(model, "CPU_ATTN") as llm:
        answers = {name: ask(llm, adapter) for name, ask in REQUESTS.items()}
    assert set(calls) == {"CPU_ATTN"}
    return model, answers


@pytest.fixture(scope="module")
def llm(expected: tuple[Path, dict[str, Any]]) -> Iterator[Any]:
    with _serve(expected[0], "SPARSEK") as llm:
        yield llm


@pytest.mark.parametrize("name", REQUESTS)
def test_served(name: str, llm: Any, adapter: Path, expected: tuple[Path, dict[str, Any]]) -> None:
    with counted_forwards() as calls:
        found = REQUESTS[name](llm, adapter)
    assert set(calls) == {"SPARSEK"}
    wanted = expected[1][name]
    if name == LOGPROBS:
        wanted = [pytest.approx(one, abs=1e-4) for one in wanted]
    assert found == wanted
