"""In-process vLLM engines for the tests: started, spied on, and stopped again."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

requires_cpu_vllm = pytest.mark.skipif(
    "not __import__('vllm.platforms').platforms.current_platform.is_cpu()",
    reason="compares with CPU_ATTN",
)


@functools.cache
def _register_kernels_once() -> None:
    """Every engine on a CPU puts C++ in place of vLLM's Triton kernels; they stay replaced."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    register = functools.cache(platform.register_triton_kernel_overrides)
    platform.register_triton_kernel_overrides = staticmethod(register)


@contextmanager
def _quickly() -> Iterator[None]:
    """Start or stop an engine on a CPU without a search of the whole heap at every step.

    vLLM collects garbage eight times, half a second each beside torch and vLLM's own modules.
    """
    _register_kernels_once()
    with mock.patch.object(gc, "collect", return_value=0):
        yield


@contextmanager
def engine(
    model: Path, backend: str, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[Any]:
    """A ``vllm.LLM`` of a model folder, shut down at the end.

    Args:
        model: Hugging Face folder.
        backend: name after ``--attention-backend``.
        settings: the ``sparsek`` section of ``--additional-config``.
        options: more arguments of ``LLM``.
    """
    from vllm import LLM
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.platforms import current_platform

    # vLLM's first model runner forbids captures when it has made its own; its second never allows
    # them again, and would refuse every engine after that in this process.
    set_cudagraph_capturing_enabled(True)
    options = {
        "enforce_eager": True,
        "max_num_seqs": 8,
        "dtype": "float32",
        "seed": 0,
        **options,
    }
    changing = _quickly if current_platform.is_cpu() else nullcontext
    with changing():
        llm = LLM(
            str(model),
            attention_backend=backend,
            additional_config={"sparsek": settings} if settings else {},
            **options,
        )
    try:
        yield llm
    finally:
        with changing():
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def generate(
    llm: Any, prompts: Sequence[Sequence[int]], *, together: bool, **sampling: Any
) -> list[Any]:
    """Greedy completions of token lists, one request at a time or all of them together."""
    from vllm import SamplingParams

    sampling = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, **sampling}
    params = SamplingParams(detokenize=False, **sampling)
    requests = [{"prompt_token_ids": list(ids)} for ids in prompts]
    if together:
        return list(llm.generate(requests, params, use_tqdm=False))
    return [llm.generate([request], params, use_tqdm=False)[0] for request in requests]


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    """The generated tokens of each request."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def scheduler(llm: Any) -> Any:
    """The engine's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def model_runner(llm: Any) -> Any:
    """The engine's model runner."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@contextmanager
def counted_preemptions(llm: Any) -> Iterator[Counter[str]]:
    """Count how often the scheduler evicts a running request."""
    counter: Counter[str] = Counter()
    target = scheduler(llm)
    preempt = target._preempt_request

    def counting(*args: Any, **kwargs: Any) -> Any:
        counter["preempted"] += 1
        return preempt(*args, **kwargs)

    with mock.patch.object(target, "_preempt_request", counting):
        yield counter


@contextmanager
def counted_forwards() -> Iterator[Counter[str]]:
    """Count calls of the forward methods of SPARSEK and of CPU_ATTN."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from sparsek_backend.vllm_backend.sparsek.impl import SparseKImpl

    counter: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            counter[name] += 1
            return original(*args, **kwargs)

        return forward

    with (
        mock.patch.object(SparseKImpl, "forward", counting("SPARSEK", SparseKImpl.forward)),
        mock.patch.object(
            CPUAttentionBackendImpl,
            "forward",
            counting("CPU_ATTN", CPUAttentionBackendImpl.forward),
        ),
    ):
        yield counter


def shuffle_free_pages(llm: Any, seed: int) -> None:
    """Hand out the free KV pages in another order from now on, and forget cached prefixes."""
    import random

    assert llm.reset_prefix_cache()
    pool = scheduler(llm).kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    random.Random(seed).shuffle(blocks)
    pool.free_blocks(blocks)
