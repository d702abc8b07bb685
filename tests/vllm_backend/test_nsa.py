"""Natively sparse checkpoints in a real engine on a CPU: the torch module's own tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.nn import NSALlamaConfig
from sparsek_backend.vllm_backend.settings import engine_config
from tests.vllm_backend.engines import (
    counted_preemptions,
    engine,
    generate,
    layers,
    model_runner,
    requires_cpu_vllm,
    scheduler,
    shuffle_free_pages,
    tokens,
)
from tests.vllm_backend.nsa_models import CONFIG, VARIANTS, complete, make_model

pytestmark = [pytest.mark.engine, requires_cpu_vllm, pytest.mark.usefixtures("registered")]

LENGTHS = (600, 7, 16, 129, 333)
OPTIONS: dict[str, Any] = {
    "max_model_len": 800,
    "max_num_batched_tokens": 800,
    "block_size": 32,
    "num_gpu_blocks_override": 41,
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, CONFIG.vocab_size, (length,), generator=generator).tolist()
        for length in LENGTHS
    ]


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS.keys())
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
) -> Iterator[tuple[Any, list[list[int]]]]:
    """An engine of a variant, and what the module answers."""
    folder = tmp_path_factory.mktemp("nsa")
    model = make_model(request.param, folder)
    expected = [complete(model, prompt, 16) for prompt in prompts]
    with engine(folder, "SPARSEK", **OPTIONS) as llm:
        yield llm, expected


def test_whole_prefill(served: tuple[Any, list[list[int]]], prompts: list[list[int]]) -> None:
    from sparsek_backend.vllm_backend.nsa.impl import NSAImpl
    from sparsek_backend.vllm_backend.stats import STATS

    llm, expected = served
    before = STATS.forward_calls, sum(STATS.attended)
    assert tokens(generate(llm, prompts, together=False)) == expected
    assert STATS.forward_calls > before[0]
    assert sum(STATS.attended) > before[1]
    layers = model_runner(llm).vllm_config.compilation_config.static_forward_context.values()
    assert all(type(layer.impl) is NSAImpl for layer in layers)


def test_selection_and_compression_matter(
    prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The negative control: without either the module answers differently, so equality counts."""
    folder = tmp_path_factory.mktemp("nsa")
    model = make_model(CONFIG, folder)
    answer = complete(model, prompts[0], 16)
    every = make_model(replace(CONFIG, nsa=replace(CONFIG.nsa, top_n=64)), folder)
    assert complete(every, prompts[0], 16) != answer
    for layer in model.model.layers:
        layer.self_attn.gate_out.bias[: CONFIG.num_attention_heads] = -30.0
    assert complete(model, prompts[0], 16) != answer


@pytest.mark.parametrize("chunk", [64, 37])
def test_chunked_prefill_beside_decodes(
    served: tuple[Any, list[list[int]]], prompts: list[list[int]], chunk: int
) -> None:
    llm, expected = served
    shuffle_free_pages(llm, seed=chunk)
    target = scheduler(llm)
    before = target.max_num_scheduled_tokens
    target.max_num_scheduled_tokens = chunk
    try:
        assert tokens(generate(llm, prompts, together=True)) == expected
    finally:
        target.max_num_scheduled_tokens = before


def test_prefix_hits(served: tuple[Any, list[list[int]]], prompts: list[list[int]]) -> None:
    llm, expected = served
    assert llm.reset_prefix_cache()
    other = [*prompts[0][:200], *prompts[4]]
    generate(llm, [other], together=False)
    outputs = generate(llm, prompts[:1], together=False)
    assert outputs[0].num_cached_tokens == 192
    assert tokens(outputs) == expected[:1]


def test_preemption(served: tuple[Any, list[list[int]]], prompts: list[list[int]]) -> None:
    llm, expected = served
    assert llm.reset_prefix_cache()
    with counted_preemptions(llm) as counter:
        outputs = generate(llm, prompts[:1] * 2 + prompts[3:], together=True, max_tokens=60)
    assert counter["preempted"] > 0
    found = [answer[:16] for answer in tokens(outputs)]
    assert found == expected[:1] * 2 + expected[3:]


def test_compressed_rows_live_in_accounted_page_bytes(
    served: tuple[Any, list[list[int]]],
) -> None:
    runner = model_runner(served[0])
    (group,) = runner.kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    nsa = runner.model_config.hf_config.nsa
    branches = 1 if nsa["shared_kv"] else 3
    extra = spec.page_size_bytes - spec.unpadded_page_size_bytes
    assert extra * branches * nsa["cmp_stride"] == spec.unpadded_page_size_bytes


def draft_of(folder: Path) -> dict[str, Any]:
    """Options of an engine that drafts by a model of ours."""
    asked = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    return {**OPTIONS, "speculative_config": {**asked, "attention_backend": "SPARSEK"}}


def test_a_natively_sparse_draft(prompts: list[list[int]], tmp_path: Path) -> None:
    """On a GPU vLLM's lengths on the host lack what it adds, as with drafts of other models."""
    model = make_model(CONFIG, tmp_path)
    expected = [complete(model, prompt, 16) for prompt in prompts]
    with engine(tmp_path, "SPARSEK", **draft_of(tmp_path)) as llm:
        assert tokens(generate(llm, prompts, together=True)) == expected
        runner = model_runner(llm)
        groups = runner.attn_groups[0][-1], runner.drafter.draft_attn_groups[0]
        assert [group.get_metadata_builder().lacking for group in groups] == [0, 1]


def test_a_draft_with_another_section(tmp_path: Path) -> None:
    """Its layers would follow the served model's."""
    folders = tmp_path / "served", tmp_path / "draft"
    for folder, window in zip(folders, (48, 64), strict=True):
        make_model(replace(CONFIG, nsa=replace(CONFIG.nsa, window_size=window)), folder)
    with (
        pytest.raises(ValueError, match=r"draft model: expected the nsa section .*: 48.* got .*64"),
        engine(folders[0], "SPARSEK", **draft_of(folders[1])),
    ):
        pass


REFUSED: dict[str, tuple[NSALlamaConfig, dict[str, Any], dict[str, Any], str]] = {
    "another mode": (
        CONFIG,
        {"mode": "block_topk"},
        {},
        "SPARSEK setting mode .* got 'block_topk'",
    ),
    "another mode's field": (CONFIG, {"top_k": 3}, {}, "top_k .* has no effect in mode 'nsa'"),
    "page": (CONFIG, {}, {"block_size": 16 * 3}, "sel_block_size: expected a multiple of 16"),
    "forced blocks": (
        replace(CONFIG, nsa=replace(CONFIG.nsa, top_n=3)),
        {},
        {},
        "top_n: expected more than the 3 forced",
    ),
    "fp8 cache": (CONFIG, {}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    "ranks": (
        CONFIG,
        {},
        {"tensor_parallel_size": 4, "distributed_executor_backend": "mp"},
        "tensor_parallel_size: expected a divisor of the 2 KV heads",
    ),
    "another cache": (
        CONFIG,
        {},
        {"kv_cache_dtype": "bfloat16"},
        "kv_cache_dtype: expected auto for a model with an nsa section, got bfloat16",
    ),
}


@pytest.mark.parametrize("way", ["load_weights", "reload_weights"])
def test_weights_that_come_while_it_runs(
    way: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    """From a trainer, or by vLLM's reload: constants follow, where captured steps read them."""
    first, second = tmp_path / "first", tmp_path / "second"
    make_model(CONFIG, first)
    model = make_model(CONFIG, second)
    compression = {name: x for name, x in model.named_parameters() if ".phi_" in name}
    for weight in compression.values():
        weight.copy_(0.3 * torch.randn_like(weight))
    model.save_pretrained(second)
    expected = complete(model, prompts[0], 16)

    def constants(llm: Any) -> list[torch.Tensor]:
        found = [layer.impl.compression.constants for layer in layers(llm)]
        return [x for pair in found for x in pair if x is not None]

    with engine(first, "SPARSEK", **OPTIONS) as llm:
        before = constants(llm)
        addresses = [x.data_ptr() for x in before]
        assert tokens(generate(llm, prompts[:1], together=True)) != [expected]
        llm.reset_prefix_cache()
        if way == "load_weights":
            model_runner(llm).model.load_weights(compression.items())
        else:
            model_runner(llm).reload_weights(weights_path=str(second))
        assert tokens(generate(llm, prompts[:1], together=True)) == [expected]
        renewed = constants(llm)
    with engine(second, "SPARSEK", **OPTIONS) as llm:
        wanted = constants(llm)
    assert [x.data_ptr() for x in renewed] == addresses
    torch.testing.assert_close(renewed, wanted)
    assert len(wanted) == 2 * CONFIG.num_hidden_layers


@pytest.mark.parametrize(
    ("config", "settings", "options", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_refusals(
    config: NSALlamaConfig,
    settings: dict[str, Any],
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    make_model(config, tmp_path)
    options = {"block_size": 32, **options}
    arguments = EngineArgs(
        model=str(tmp_path),
        attention_backend="SPARSEK",
        additional_config={"sparsek": settings},
        skip_tokenizer_init=True,
        dtype="float32",
        **options,
    )
    with pytest.raises(Exception, match=message):
        arguments.create_engine_config()


def test_refused_configs(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    make_model(CONFIG, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))

    def configure(**changes: Any) -> None:
        path.write_text(json.dumps({**values, **changes}), encoding="utf-8")
        EngineArgs(
            model=str(tmp_path), attention_backend="SPARSEK", skip_tokenizer_init=True
        ).create_engine_config()

    with pytest.raises(Exception, match=r"nsa section .* invalid: nsa: expected fields .* window"):
        configure(nsa={"window": 3})
    with pytest.raises(Exception, match="architectures: expected NSALlamaForCausalLM"):
        configure(architectures=["LlamaForCausalLM"])


@pytest.mark.parametrize("model_type", ["nsa_llama", "llama"])  # the latter from release 0.1.0
def test_model_types_of_saved_folders(model_type: str, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    make_model(CONFIG, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, "model_type": model_type}), encoding="utf-8")
    found = EngineArgs(
        model=str(tmp_path), attention_backend="SPARSEK", skip_tokenizer_init=True
    ).create_engine_config()
    assert found.model_config.hf_config.model_type == model_type
    assert engine_config(found).nsa == CONFIG.nsa


@pytest.mark.parametrize("backend", ["CPU_ATTN", None])
def test_needs_the_flag(backend: str | None, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    make_model(CONFIG, tmp_path)
    arguments = EngineArgs(model=str(tmp_path), attention_backend=backend, skip_tokenizer_init=True)
    with pytest.raises(Exception, match="needs --attention-backend SPARSEK"):
        arguments.create_engine_config()
