"""What only a GPU can show: graphs, several GPUs, sleep, weights on the host or quantised.

Engines in fp32 that select blocks per query give the same tokens however the work is done; in 16
bits log-probabilities are held against Triton attention's, at a budget that covers the context.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.bench.serve_worker import read_stats
from sparsek_backend.eval.engine import ensure_entry_point
from sparsek_backend.plugin import register
from sparsek_backend.vllm_backend import compat
from sparsek_kernels.paged import scratch
from tests.vllm_backend.drafts import speculation
from tests.vllm_backend.engines import (
    engine,
    generate,
    generate_by_both,
    layers,
    model_runner,
    multiply_experts_in_fp32,
    pages_of_request,
    preempting_all,
    tokens,
)
from tests.vllm_backend.test_gpu_nsa import gap_where_parted
from tests.vllm_backend.tiny_models import (
    IMAGE_SIZE,
    IMAGE_TOKEN,
    VOCABULARY,
    make_tiny_model,
    quantise,
)

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.usefixtures("registered")]

COVERING = {"dense_below": 0, "top_k": 64, "decode_tokens": 4096}
SPARSE = {
    "dense_below": 0,
    "num_sink": 16,
    "window_size": 64,
    "sel_block_size": 64,
    "top_k": 3,
    "decode_tokens": 96,
    "query_tile": 1,
}
TIES = {"float32": 0.02, "bfloat16": 0.1}
"""Logprob gap within which two tokens are a tie; in fp32 some kernels multiply in TF32."""
LIMITS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module", autouse=True)
def remote_calls(engine_environment: None) -> Iterator[None]:
    """Workers run functions of the tests and know the plugin; NCCL alone joins GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
        patch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        patch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        ensure_entry_point()
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (1, 65, 300, 900)
    ]


def ran(llm: Any) -> list[int]:
    """Calls of SPARSEK's forward in every worker; replays of graphs are not calls."""
    return [calls for calls, _ in llm.collective_rpc(read_stats)]


def answer(model: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    with engine(model, "SPARSEK", SPARSE, **{**LIMITS, **options}) as llm:
        before = ran(llm)
        found = tokens(generate(llm, prompts, together=True))
        pairs = zip(ran(llm), before, strict=True)
        assert all(now > earlier for now, earlier in pairs)  # prefills are never replayed
    return found


@pytest.fixture(scope="module")
def plain(registered: None, llama: Path, prompts: list[list[int]]) -> list[list[int]]:
    with engine(llama, "SPARSEK", SPARSE, **LIMITS) as llm:
        return tokens(generate(llm, prompts, together=True))


@pytest.fixture(scope="module")
def dense(registered: None, llama: Path, prompts: list[list[int]]) -> list[list[int]]:
    with engine(llama, "SPARSEK", COVERING, **LIMITS) as llm:
        return tokens(generate(llm, prompts, together=True))


@pytest.mark.parametrize(
    "mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
)
def test_graphs(mode: str, llama: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    options = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": mode}}
    assert answer(llama, prompts, **options) == plain


def test_one_place(llama: Path, prompts: list[list[int]]) -> None:
    settings = {**SPARSE, "top_k": 1, "decode_tokens": 64}
    found = []
    for eager in (True, False):
        with engine(llama, "SPARSEK", settings, **{**LIMITS, "enforce_eager": eager}) as llm:
            found.append(tokens(generate(llm, prompts, together=True)))
    assert found[0] == found[1]


@pytest.mark.parametrize("version", ["1", "2"])
def test_model_runners(
    version: str,
    llama: Path,
    prompts: list[list[int]],
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(version) - 1))
    with engine(llama, "SPARSEK", SPARSE, **LIMITS) as llm:
        module = type(model_runner(llm)).__module__
        assert module.endswith(".gpu.model_runner" if version == "2" else ".gpu_model_runner")
        assert tokens(generate(llm, prompts, together=True)) == plain


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", ["ngram", "eagle", "eagle3", "draft_model"])
def test_speculation(
    method: str,
    eager: bool,
    llama: Path,
    prompts: list[list[int]],
    dense: list[list[int]],
    tmp_path: Path,
) -> None:
    """Drafts change what a request's tokens select, but nothing where all keys are attended."""
    options = {**LIMITS, "enforce_eager": eager, "disable_log_stats": False}
    options |= speculation(method, llama, tmp_path)
    with engine(llama, "SPARSEK", COVERING, **options) as llm:
        assert tokens(generate(llm, prompts, together=True)) == dense
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    assert counts["vllm:spec_decode_num_draft_tokens"] > 0


OPTIONS: dict[str, dict[str, Any]] = {
    "weights on the host": {"cpu_offload_gb": 1},
    "asynchronous scheduling": {"async_scheduling": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(
    options: dict[str, Any], llama: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    assert answer(llama, prompts, **options) == plain


def test_sleep(llama: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    """Waking up gives the same tokens, from pages that were freed and written again.

    In a process of its own, for what vLLM's allocator for sleep maps outlives the engine: others in
    the process then failed, with "resource already mapped", whatever their backend.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        alone.submit(sleep_and_wake, llama, prompts, plain).result()


def sleep_and_wake(llama: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    """The kernels' scratch is not among what sleeping frees: its counters have to be zero."""
    register()
    with engine(llama, "SPARSEK", SPARSE, enable_sleep_mode=True, **LIMITS) as llm:
        assert tokens(generate(llm, prompts, together=True)) == plain
        llm.sleep(level=1)
        assert scratch._workspaces
        for (_, name, _), tensor in scratch._workspaces.items():
            assert int(tensor.count_nonzero()) == 0 or name != "tickets"
        llm.wake_up()
        before = ran(llm)
        assert tokens(generate(llm, prompts, together=True)) == plain
        assert ran(llm) > before


TWO_GPUS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tensor parallel": ("llama", SPARSE, {"tensor_parallel_size": 2}),
    "pipeline parallel": ("llama", SPARSE, {"pipeline_parallel_size": 2}),
    "expert parallel": (
        "moe",
        SPARSE,
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "expert parallel, all keys attended": (
        "moe",
        COVERING,
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "workers of Ray": (
        "llama",
        SPARSE,
        {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
    ),
}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("kind", "settings", "options"), TWO_GPUS.values(), ids=TWO_GPUS.keys())
def test_two_gpus(
    kind: str,
    settings: dict[str, Any],
    options: dict[str, Any],
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "distributed_executor_backend" in options:
        pytest.importorskip("ray")
    if kind == "moe":
        multiply_experts_in_fp32(monkeypatch)
    model = make_tiny_model(kind, tmp_path)
    with engine(model, "SPARSEK", settings, **LIMITS) as llm:
        expected = tokens(generate(llm, prompts, together=True))
    options = {**LIMITS, **options, "disable_custom_all_reduce": True}
    with engine(model, "SPARSEK", settings, **options) as llm:
        answers = generate(llm, prompts, together=True, logprobs=5)
        pairs = zip(answers, expected, strict=True)
        print("answers part at logprob gaps", [gap_where_parted(*pair) for pair in pairs])
        assert tokens(answers) == expected
        assert [calls > 0 for calls in ran(llm)] == [True, True]


@pytest.mark.parametrize(
    ("kind", "gpus"), [("mqa", 2), ("llama", 4)], ids=["a head on 2 GPUs", "2 heads on 4 GPUs"]
)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_decode_context_parallel(
    eager: bool, kind: str, gpus: int, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Two ranks hold the pages of a KV head between them; prompts in chunks, and a prefix hit."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    model = make_tiny_model(kind, tmp_path)
    limits = {**LIMITS, "max_num_batched_tokens": 256, "block_size": 64}
    expected = answer(model, prompts, **limits)
    ranks = {
        "tensor_parallel_size": gpus,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 64,
        "disable_custom_all_reduce": True,
        "enforce_eager": eager,
    }
    with engine(model, "SPARSEK", SPARSE, **limits, **ranks) as llm:
        assert tokens(generate(llm, prompts, together=True)) == expected
        again = generate(llm, prompts[3:], together=True)
        assert tokens(again) == expected[3:]
        assert again[0].num_cached_tokens >= len(prompts[3]) // 2
        assert [calls > 0 for calls in ran(llm)] == [True] * gpus


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel(llama: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    found, stats = generate_by_both(llama, SPARSE, prompts, **LIMITS)
    assert found == [*plain, *plain]
    assert all(calls > 0 for calls, _ in stats)


def logprobs(
    model: Path,
    backend: str,
    prompts: list[list[int]],
    settings: dict[str, Any] = COVERING,
    **options: Any,
) -> torch.Tensor:
    """Of every token of the prompts but the first."""
    options = {"dtype": "bfloat16", **LIMITS, **options}
    with engine(model, backend, settings if backend == "SPARSEK" else None, **options) as llm:
        before = ran(llm)
        found = generate(llm, prompts, together=True, max_tokens=1, prompt_logprobs=0)
        assert (ran(llm) > before) == (backend == "SPARSEK")
    pairs = zip(prompts, found, strict=True)
    return torch.tensor(
        [
            entry[token].logprob
            for prompt, output in pairs
            for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounding moves logits a little everywhere; a wrong mask moves most of them far."""
    assert expected.isfinite().all(), "the other backend's"
    assert found.isfinite().all()
    distance = (found - expected).abs()
    print(f"|d logprob|: mean {distance.mean():.4f}, largest {distance.max():.4f}")
    assert distance.mean() < 0.1


CONNECTORS: dict[str, dict[str, Any]] = {
    "OffloadingConnector": {"cpu_bytes_to_use": 1 << 30},
    "SimpleCPUOffloadConnector": {"cpu_bytes_to_use": 1 << 30},
}


def needs_declared_content() -> None:
    if not compat.declares_content():
        pytest.skip("vLLM before 0.29 pads pages")


def needs_kernels_for_experts() -> None:
    """Skip where vLLM lacks them: then no backend runs such a model."""
    import vllm._custom_ops  # noqa: F401  loads vLLM's libraries

    if not hasattr(torch.ops._moe_C, "topk_softmax"):
        pytest.skip("this vLLM has no kernels for mixtures of experts")


@pytest.mark.parametrize("name", CONNECTORS)
def test_connectors(
    name: str, llama: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """A prompt's pages are stored, given to others, wiped and loaded: the same bits, and tokens."""
    from vllm.config import KVTransferConfig

    needs_declared_content()
    transfer = KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=CONNECTORS[name]
    )
    page = 64
    options = {**LIMITS, "block_size": page, "kv_transfer_config": transfer}
    options |= {"num_gpu_blocks_override": 20}
    with engine(llama, "SPARSEK", SPARSE, **options) as llm:
        assert tokens(generate(llm, prompts[:-1], together=False)) == plain[:-1]
        answer, stored = pages_of_request(llm, prompts[-1])
        generate(llm, [prompt[::-1] for prompt in prompts], together=False)  # evicts the first
        assert llm.reset_prefix_cache()
        for layer in layers(llm):
            layer.kv_cache.fill_(float("nan"))
        torch.cuda.synchronize()  # a connector loads on a stream of its own
        again, loaded = pages_of_request(llm, prompts[-1])
    assert tokens([answer, again]) == 2 * plain[-1:]
    assert again.num_cached_tokens >= len(prompts[-1]) // 2
    whole = again.num_cached_tokens // page
    for before, after in zip(stored, loaded, strict=True):
        assert torch.equal(before[:whole], after[:whole])


HYBRIDS = ("linear_attention", "short_conv", "granite_hybrid", "falcon_h1", "nemotron_h")
WITH_EXPERTS = ("sinks", "moe", "linear_attention")
"""Tiny gpt-oss, Qwen3-MoE and Qwen3-Next."""


def needs(kind: str) -> None:
    """Skip a model that the installed vLLM does not serve, or not with pages of SPARSEK's."""
    if kind in HYBRIDS:
        needs_declared_content()
    if kind in WITH_EXPERTS:
        needs_kernels_for_experts()


def options_of(kind: str) -> dict[str, Any]:
    """Engine options: linear attention by Triton, for FlashInfer may be missing."""
    from vllm.engine.arg_utils import EngineArgs

    option = "gdn_prefill_backend"
    known = option in {field.name for field in fields(EngineArgs)}
    return {option: "triton"} if kind == "linear_attention" and known else {}


@pytest.mark.parametrize("kind", ["sinks", "moe", "soft_cap", "alibi", *HYBRIDS])
def test_models(kind: str, prompts: list[list[int]], tmp_path: Path) -> None:
    needs(kind)
    model = make_tiny_model(kind, tmp_path)
    expected = logprobs(model, "TRITON_ATTN", prompts, **options_of(kind))
    check_close(logprobs(model, "SPARSEK", prompts, **options_of(kind)), expected)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_hybrids(kind: str, prompts: list[list[int]], tmp_path: Path) -> None:
    """In chunks, evicted in mid-answer, and after prefixes that are known in part and whole.

    Pages of the two backends hold other numbers of tokens, so their steps differ: tokens may part
    at ties.
    """
    needs(kind)
    model = make_tiny_model(kind, tmp_path)
    dtype = "bfloat16" if kind == "linear_attention" else "float32"  # vLLM's kernels for it
    long = [token for prompt in prompts for token in prompt] + prompts[-1][::-1]
    options = {**LIMITS, "dtype": dtype, "max_model_len": 4096, "max_num_batched_tokens": 256}
    options |= {"enable_prefix_caching": True, "mamba_cache_mode": "align", **options_of(kind)}
    asked: dict[str, Any] = {"max_tokens": 32, "logprobs": 5}
    found: dict[str, list[Any]] = {}
    for backend in ("SPARSEK", "TRITON_ATTN"):
        settings = COVERING if backend == "SPARSEK" else None
        with engine(model, backend, settings, **options) as llm:
            before = ran(llm)
            with preempting_all(llm, step=20) as counter:
                answers = generate(llm, prompts, together=True, **asked)
            assert counter["preempted"] > 0
            assert llm.reset_prefix_cache()
            # The state of a prompt's last whole page is kept, of whatever size.
            answers += generate(llm, [[*long[:1290], *prompts[0]]], together=False, **asked)
            answers += generate(llm, [long, long], together=False, **asked)
            assert (ran(llm) > before) == (backend == "SPARSEK")
        hits = [answer.num_cached_tokens for answer in answers[-3:]]
        assert 0 == hits[0] < hits[1] < hits[2]
        found[backend] = answers
    pairs = zip(found["SPARSEK"], tokens(found["TRITON_ATTN"]), strict=True)
    gaps = [gap_where_parted(*pair) for pair in pairs]
    print("answers part at logprob gaps", gaps)
    assert all(gap is None or gap <= TIES[dtype] for gap in gaps)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_fp8_cache(eager: bool, llama: Path, prompts: list[list[int]]) -> None:
    """As near to the 16-bit cache's answers as Triton attention's."""
    options = {"kv_cache_dtype": "fp8", "enforce_eager": eager}
    exact = logprobs(llama, "TRITON_ATTN", prompts)
    found = [logprobs(llama, name, prompts, **options) for name in ("SPARSEK", "TRITON_ATTN")]
    ours, theirs = ((one - exact).abs().mean() for one in found)
    print(f"fp8, mean |d logprob|: SPARSEK {ours:.4f}, TRITON_ATTN {theirs:.4f}")
    assert 0 < ours <= 1.5 * theirs


def test_images(prompts: list[list[int]], tmp_path: Path) -> None:
    """An image's tokens are a decoder's like others: causal, in pages, selected by score."""
    # vLLM cannot import the model without torchvision, nor beside a newer Transformers
    pytest.importorskip("torchvision")
    pytest.importorskip("vllm.model_executor.models.llava", exc_type=ImportError)
    from PIL import Image
    from vllm import SamplingParams

    model = make_tiny_model("images", tmp_path)
    generator = torch.Generator().manual_seed(8)
    pixels = torch.randint(0, 256, (2, IMAGE_SIZE, IMAGE_SIZE, 3), generator=generator)
    images = [Image.fromarray(one.to(torch.uint8).numpy()) for one in pixels]
    text = prompts[-1][:600]
    request = {"prompt_token_ids": [*text[:40], IMAGE_TOKEN, *text[40:]]}
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    options = {**LIMITS, "skip_tokenizer_init": False, "dtype": "bfloat16"}
    found = {}
    for backend in ("SPARSEK", "TRITON_ATTN"):
        with engine(model, backend, COVERING if backend == "SPARSEK" else None, **options) as llm:
            before = ran(llm)
            requests = [{**request, "multi_modal_data": {"image": image}} for image in images]
            outputs = llm.generate(requests, params, use_tqdm=False)
            assert (ran(llm) > before) == (backend == "SPARSEK")
        rows = [output.prompt_logprobs[-560:] for output in outputs]
        pairs = [zip(text[-560:], row, strict=True) for row in rows]
        found[backend] = torch.tensor([[e[token].logprob for token, e in row] for row in pairs])
    assert (found["SPARSEK"][0] - found["SPARSEK"][1]).abs().mean() > 0.01  # the image is seen
    check_close(found["SPARSEK"], found["TRITON_ATTN"])


def test_a_model_without_attention(prompts: list[list[int]], tmp_path: Path) -> None:
    """SPARSEK has nothing to do: the flag changes no token."""
    model = make_tiny_model("no_attention", tmp_path)
    found = []
    for backend in ("SPARSEK", "TRITON_ATTN"):
        with engine(model, backend, **LIMITS) as llm:
            before = ran(llm)
            found.append(tokens(generate(llm, prompts, together=False)))
            assert ran(llm) == before
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
def test_quantised_weights(method: str, prompts: list[list[int]], tmp_path: Path) -> None:
    """vLLM quantises to fp8 itself; the others are formats of checkpoints."""
    model = make_tiny_model("llama", tmp_path)
    options = {"dtype": "float16"}
    if method == "fp8":
        options["quantization"] = method
    else:
        quantise(model, method)
    expected = logprobs(model, "TRITON_ATTN", prompts, **options)
    check_close(logprobs(model, "SPARSEK", prompts, **options), expected)
