"""The last tokens of a prompt attend everything, however vLLM cuts it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from sparsek_kernels.paged.reference import paged_attention_reference
from tests.vllm_backend.drafts import speculation
from tests.vllm_backend.engines import (
    engine,
    generate,
    model_runner,
    preempting_all,
    requires_cpu_vllm,
    scheduler,
    tokens,
)
from tests.vllm_backend.layers import (
    building,
    keys_and_values,
    make_builder,
    make_cache,
    make_config,
    make_layer,
    make_step,
    run,
)
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

pytestmark = pytest.mark.usefixtures("registered")

SPARSE = {
    "dense_below": 0,
    "num_sink": 16,
    "window_size": 64,
    "sel_block_size": 32,
    "top_k": 3,
    "decode_tokens": 96,
    "query_tile": 32,
}
LENGTHS = (1468, 531, 40, 300)  # the first one's dense end is 91 tokens, the others' 64


@pytest.fixture
def current(tmp_path: Path) -> Iterator[Any]:
    with building(make_config(tmp_path)) as config:
        yield config


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What metadata builders warn of."""
    from sparsek_backend.vllm_backend.sparsek import metadata

    found: list[str] = []
    monkeypatch.setattr(metadata.logger, "warning_once", found.append)
    return found


def test_steps_count_from_the_ends_of_their_prompts(current: Any, warnings: list[str]) -> None:
    builder, _ = make_builder(make_layer(), current)
    builder.engine.prompt_lengths = np.array([250, 400, 700, 280, 99, 99], dtype=np.int32)
    step = make_step([300, 400, 600, 290], [1, 100, 200, 30], 64)
    metadata = builder.build(0, step)
    assert metadata.batch.prompt_left_host == (-50, 0, 100, -10)
    rule, dense = next(iter(builder.policies)), range(260, 290)
    expected = rule.decode.attended_tokens(299)
    for positions, prompt in ((range(300, 400), 400), (range(400, 600), 700), (dense, 280)):
        for position in positions:
            last = prompt - 64 <= position < prompt
            expected += position + 1 if last else rule.prefill.attended_tokens(position)
    assert sum(metadata.attended) == expected
    builder.engine.prompt_lengths = ()  # requests that vLLM makes up have no prompts
    assert builder.build(0, step).batch.prompt_left_host == (-300, -400, -600, -290)
    assert warnings == []


@pytest.mark.parametrize("captured", [True, False])
def test_a_prompt_may_end_in_a_step_of_decodes(captured: bool, current: Any) -> None:
    """But where a CUDA graph may hold the step, and with it its launches."""
    builder, _ = make_builder(make_layer(), current)
    assert not builder.captured_decodes
    builder.captured_decodes = captured
    builder.engine.prompt_lengths = np.array([250, 400])
    metadata = builder.build(0, make_step([300, 400], [1, 1], 64))
    assert metadata.batch.num_decodes == 2
    assert metadata.batch.prompt_left_host == (None if captured else (-50, 0))
    rule = next(iter(builder.policies))
    decoded = [rule.decode.attended_tokens(position) for position in (299, 399)]
    assert decoded[1] < 400
    assert sum(metadata.attended) == (sum(decoded) if captured else decoded[0] + 400)
    builder.engine.prompt_lengths = np.array([400, 300])
    mixed = builder.build(0, make_step([400, 300], [1, 60], 64))
    assert mixed.batch.prompt_left_host == (0, 0)


def test_decodes_over_the_pages_of_several_ranks_end_no_prompt() -> None:
    from sparsek_backend.vllm_backend.step import build_batch

    step, lengths = make_step([400, 300], [1, 60], 64), np.array([400, 300])
    found = [build_batch(step, 1, True, ranks, prompt_lengths=lengths) for ranks in (False, True)]
    assert [one.paged.prompt_left_host for one in found] == [(0, 0), (-400, 0)]


def test_graphs_of_decodes_may_hold_their_steps(current: Any) -> None:
    from vllm.config import CUDAGraphMode

    from sparsek_backend.vllm_backend.sparsek.metadata import may_capture_decodes

    for mode, device, captured in (
        ("FULL_AND_PIECEWISE", "cuda", True),
        ("FULL_DECODE_ONLY", "cuda", True),
        ("PIECEWISE", "cuda", False),
        ("NONE", "cuda", False),
        ("FULL_AND_PIECEWISE", "cpu", False),
    ):
        current.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
        assert may_capture_decodes(current, torch.device(device)) == captured


@pytest.mark.parametrize("splits", [True, False], ids=["micro-batches", "unknown"])
def test_where_vllm_does_not_say_chunks_count_and_a_warning_says_so(
    splits: bool, current: Any, warnings: list[str]
) -> None:
    from sparsek_backend.vllm_backend.report import NO_PROMPT_LENGTHS

    builder, _ = make_builder(make_layer(), current)
    builder.splits_steps = splits
    builder.engine.prompt_lengths = np.array([900]) if splits else None
    builder.build(0, make_step([300], [1], 8))
    assert warnings == []
    metadata = builder.build(0, make_step([4000], [200], 64))
    assert metadata.batch.prompt_left_host is None
    assert warnings == [NO_PROMPT_LENGTHS]
    rule = next(iter(builder.policies)).prefill
    sparse = sum(rule.attended_tokens(position) for position in range(3800, 3936))
    assert metadata.attended.prefill == sparse + sum(range(3937, 4001))  # 64, and no sixteenth


def test_layers_without_dense_ends_ask_nothing(tmp_path: Path, warnings: list[str]) -> None:
    settings = {"sparsek": {**SPARSE, "dense_last": 0}}
    with building(make_config(tmp_path, additional_config=settings)) as config:
        builder, _ = make_builder(make_layer(), config)
    builder.engine.prompt_lengths = np.array([900])
    assert builder.build(0, make_step([400], [100], 64)).batch.prompt_left_host is None
    assert warnings == []


def test_prompts_that_are_dense_end_dense(tmp_path: Path) -> None:
    """As in mode ``seer``, without ``dense_last``; what follows the prompt selects."""
    settings = {"sparsek": {**SPARSE, "dense_last": 0, "sparse_phase": "decode"}}
    with building(make_config(tmp_path, additional_config=settings)) as config:
        layer = make_layer()
        builder, spec = make_builder(layer, config)
    builder.reorder_batch_threshold = 2
    cache = make_cache(spec, 64)
    run(layer, builder, cache, make_step([399, 400, 499], [399, 400, 499], 64), seed=1)
    outputs = []
    for prompts in ([400, 401, 600], [600, 600, 600], None):  # a token of an answer, or none
        builder.engine.prompt_lengths = None if prompts is None else np.array(prompts)
        step = make_step([401, 402, 500], [2, 2, 1], 64)
        metadata, q, _, _, output = run(layer, builder, cache, step)
        caches = (*keys_and_values(cache), metadata.batch)
        wanted = paged_attention_reference(q, *caches, layer.impl.policy)
        torch.testing.assert_close(output.double(), wanted, atol=1e-5, rtol=1e-5)
        counted = (metadata.attended.decode, metadata.context.decode)
        outputs.append((output, counted[0] / counted[1]))
    (first, some), (whole, every), (selected, few) = outputs
    same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(first, whole, strict=True)]
    assert same == [True, False, True, False, True]
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in zip(whole, selected, strict=True))
    assert few < some < every == 1.0


@pytest.mark.parametrize("known", [True, False])
def test_steps_of_the_first_runner(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class GPUModelRunner:
        vllm_config = "a configuration"
        input_batch = SimpleNamespace(**{"num_prompt_tokens": [7]} if known else {})

        def _build_attention_metadata(self, *, num_reqs: int) -> int:
            return num_reqs

    kept = hooked("vllm.v1.worker.gpu_model_runner", GPUModelRunner, monkeypatch)
    assert GPUModelRunner()._build_attention_metadata(num_reqs=3) == 3
    assert kept == [("a configuration", [7] if known else None)]


def test_steps_of_the_second_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    class GPUModelRunner:
        vllm_config = "a configuration"
        req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.arange(10, 20)))

        def prepare_attn(self, input_batch: Any) -> Any:
            return input_batch

        def prepare_dummy_attn(self, input_batch: Any, valid_state_slots: bool = False) -> Any:
            return valid_state_slots

    kept = hooked("vllm.v1.worker.gpu.model_runner", GPUModelRunner, monkeypatch)
    batch = SimpleNamespace(idx_mapping_np=np.array([4, 1]))
    assert GPUModelRunner().prepare_attn(batch) is batch
    assert GPUModelRunner().prepare_dummy_attn(batch, valid_state_slots=True) is True
    assert [list(lengths) for _, lengths in kept] == [[14, 11], []]


def hooked(module: str, runner: type, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Configurations and prompt lengths that the hooks of a runner hand over."""
    from sparsek_backend.vllm_backend import compat

    kept: list[tuple[Any, Any]] = []
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(GPUModelRunner=runner))
    for _ in range(2):  # hooked once
        compat.hook_prompt_lengths(lambda *found: kept.append(found))
    return kept


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS
    ]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("0", id="first"),
        pytest.param("1", marks=pytest.mark.gpu, id="second"),
    ],
)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine by each of vLLM's model runners, of which the second needs a GPU."""
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    version = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", version)
        with engine(
            folder,
            "SPARSEK",
            SPARSE,
            max_model_len=1600,
            max_num_batched_tokens=1600,
            block_size=64,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
        ) as llm:
            modules = {kind.__module__ for kind in type(model_runner(llm)).__mro__}
            assert ("vllm.v1.worker.gpu.model_runner" in modules) == (version == "1")
            yield llm


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Keys, new tokens and tokens left of the prompt of each prefill."""
    from sparsek_backend.vllm_backend.sparsek.metadata import SparseKMetadataBuilder

    found = []
    assemble = SparseKMetadataBuilder.assemble

    def spying(self: Any, common: Any) -> Any:
        metadata = assemble(self, common)
        batch = metadata.batch
        requests = zip(metadata.seq_lens, batch.query_lens, batch.prompt_left_host, strict=True)
        found.extend(list(requests)[batch.num_decodes :])
        return metadata

    monkeypatch.setattr(SparseKMetadataBuilder, "assemble", spying)
    return found


@contextmanager
def chunks_of(llm: Any, tokens: int) -> Iterator[None]:
    """Prompts are cut into chunks meanwhile."""
    target = scheduler(llm)
    with mock.patch.object(target, "max_num_scheduled_tokens", tokens):
        yield


def attended(llm: Any, prompts: list[list[int]], **options: Any) -> tuple[list[Any], int]:
    """Answers, and the keys that are attended for them."""
    from sparsek_backend.vllm_backend.stats import STATS

    before = sum(STATS.attended)
    outputs = generate(
        llm, prompts, **{"together": False, "max_tokens": 4, "logprobs": 0, **options}
    )
    return outputs, sum(STATS.attended) - before


def likelihoods(outputs: list[Any]) -> list[list[float]]:
    """Log-probabilities of the tokens of each answer."""
    answers = [output.outputs[0] for output in outputs]
    return [
        [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
        for one in answers
    ]


@pytest.mark.engine
@pytest.mark.parametrize("chunk", [96, 64])
def test_steps_know_what_is_left_of_prompts(
    llm: Any, prompts: list[list[int]], prefills: list[tuple[int, int, int]], chunk: int
) -> None:
    assert llm.reset_prefix_cache()
    _, whole = attended(llm, prompts)
    assert prefills == [(length, length, 0) for length in LENGTHS]
    prefills.clear()
    assert llm.reset_prefix_cache()
    with chunks_of(llm, chunk):
        _, cut = attended(llm, prompts)
    assert prefills == [
        (min(end, length), min(chunk, length - end + chunk), max(length - end, 0))
        for length in LENGTHS
        for end in range(chunk, length + chunk, chunk)
    ]
    assert cut == whole
    prefills.clear()
    attended(llm, prompts[:1])  # whose first 22 pages are cached
    assert prefills == [(1468, 60, 0)]


@pytest.mark.engine
def test_answers_that_are_computed_again_are_no_ends_of_prompts(
    llm: Any, prompts: list[list[int]], prefills: list[tuple[int, int, int]]
) -> None:
    assert llm.reset_prefix_cache()
    with preempting_all(llm, step=30) as counter:
        attended(llm, prompts[3:], max_tokens=50)
    assert counter["preempted"] == 1
    (_, again) = prefills
    done = -again[2]
    assert 20 < done < 30
    assert again == (300 + done, 300 + done, -done)


@requires_cpu_vllm
@pytest.mark.engine
@pytest.mark.parametrize("chunk", [96, 64])
def test_chunks_are_answered_as_whole_prompts(
    llm: Any, prompts: list[list[int]], chunk: int
) -> None:
    """Chunks end where tiles do: 28 tokens and 19 are left for the last ones, of 91 and 64."""
    assert llm.reset_prefix_cache()
    whole, _ = attended(llm, prompts)
    assert llm.reset_prefix_cache()
    with chunks_of(llm, chunk):
        cut, _ = attended(llm, prompts)
    assert tokens(cut) == tokens(whole)
    torch.testing.assert_close(likelihoods(cut), likelihoods(whole), atol=1e-4, rtol=0)


@requires_cpu_vllm
@pytest.mark.engine
def test_a_prompt_whose_last_token_comes_alone_is_answered_as_whole(
    llm: Any, prompts: list[list[int]], prefills: list[tuple[int, int, int]]
) -> None:
    """A step of that token is one of decodes, to vLLM."""
    some = [prompts[0][:641]]
    assert llm.reset_prefix_cache()
    whole, keys = attended(llm, some)
    prefills.clear()
    assert llm.reset_prefix_cache()
    with chunks_of(llm, 128):
        cut, again = attended(llm, some)
    assert [new for _, new, _ in prefills] == [128] * 5
    assert tokens(cut) == tokens(whole)
    torch.testing.assert_close(likelihoods(cut), likelihoods(whole), atol=1e-4, rtol=0)
    assert again == keys


@requires_cpu_vllm
@pytest.mark.engine
def test_prompts_that_end_in_one_step_are_answered_as_alone(
    llm: Any, prompts: list[list[int]], prefills: list[tuple[int, int, int]]
) -> None:
    some = [prompts[1], prompts[3]]
    assert llm.reset_prefix_cache()
    alone, keys = attended(llm, some)
    prefills.clear()
    assert llm.reset_prefix_cache()
    found, again = attended(llm, some, together=True)
    assert prefills == [(531, 531, 0), (300, 300, 0)]
    assert tokens(found) == tokens(alone)
    torch.testing.assert_close(likelihoods(found), likelihoods(alone), atol=1e-4, rtol=0)
    assert again == keys


@requires_cpu_vllm
@pytest.mark.engine
@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_speculation_knows_what_is_left_of_prompts(
    method: str,
    prompts: list[list[int]],
    prefills: list[tuple[int, int, int]],
    warnings: list[str],
    tmp_path: Path,
) -> None:
    """Steps of the draft model too; several requests at once, all of them preempted."""
    model, draft = (tmp_path / name for name in ("model", "draft"))
    draft.mkdir()
    model = make_tiny_model("llama", model)
    options = {"max_num_batched_tokens": 128, **speculation(method, model, draft)}
    limits = {"max_model_len": 1600, "block_size": 64, "skip_tokenizer_init": True}
    with (
        engine(model, "SPARSEK", SPARSE, **limits, **options) as llm,
        preempting_all(llm, step=20) as counter,
    ):
        generate(llm, prompts, together=True, max_tokens=30)
    assert counter["preempted"] > 1
    assert {keys + left for keys, _, left in prefills} == set(LENGTHS)
    assert any(left < 0 for _, _, left in prefills)
    assert warnings == []
