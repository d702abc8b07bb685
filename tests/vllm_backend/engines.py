"""In-process vLLM engines for the tests: started, spied on, and stopped again."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from sparsek_backend.bench.serve_worker import read_stats

requires_cpu_vllm = pytest.mark.skipif(
    "not __import__('vllm.platforms').platforms.current_platform.is_cpu()",
    reason="compares with CPU_ATTN",
)


def memory_of_engine() -> dict[str, int | float]:
    """Options of an engine that takes little memory, and starts beside others.

    A GPU need not have much left: vLLM asks for a share of it to be free, of which it takes the
    pages alone. On a CPU it clears them first: a GiB takes longest of all.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {"kv_cache_memory_bytes": 128 << 20}
    return {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.01}


@functools.cache
def _register_kernels_once() -> None:
    """Every engine on a CPU puts C++ in place of vLLM's Triton kernels; they stay replaced."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    register = functools.cache(platform.register_triton_kernel_overrides)
    platform.register_triton_kernel_overrides = staticmethod(register)


@contextmanager
def quickly() -> Iterator[None]:
    """Start or stop an engine on a CPU without what takes long and changes nothing.

    vLLM searches the whole heap for garbage eight times, half a second each beside torch and vLLM's
    own modules.  At the end it lets later searches look at what ``tests/conftest.py`` keeps out of
    them.  It imports itself in a process of its own to inspect an architecture that it has not seen
    on this machine, lest it touch a GPU.
    """
    from vllm.model_executor.models import registry

    _register_kernels_once()
    with (
        mock.patch.multiple(gc, collect=lambda *_: 0, freeze=lambda: None, unfreeze=lambda: None),
        mock.patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()),
    ):
        yield


def multiply_experts_in_fp32(patch: pytest.MonkeyPatch) -> None:
    """Have vLLM's kernel of experts multiply float32 as it is, where it takes TF32 by default.

    TF32 is coarse enough that the order in which GPUs add up decides between blocks.
    """
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_moe_kernel

    patch.setenv("TRITON_F32_DEFAULT", "ieee")
    fused_moe_kernel.device_caches.clear()  # of kernels that another test compiled


def forget_engines() -> None:
    """Let another engine start in this process."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.envs import disable_envs_cache
    from vllm.platforms import current_platform

    disable_envs_cache()  # an engine before this one has frozen what vLLM reads of the environment
    # vLLM's first model runner forbids captures when it has made its own; its second never allows
    # them again, and would refuse every engine after that in this process.
    set_cudagraph_capturing_enabled(True)
    # Torch frees a pool of graphs with its last graph; vLLM would capture into it again.
    type(current_platform)._global_graph_pool = None


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
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    forget_engines()
    options = {
        "enforce_eager": True,
        "max_num_seqs": 8,
        "dtype": "float32",
        "seed": 0,
        **memory_of_engine(),
        **options,
    }
    changing = quickly if current_platform.is_cpu() else nullcontext
    with changing():
        try:
            llm = LLM(
                str(model),
                attention_backend=backend,
                additional_config={"sparsek": settings} if settings else {},
                **options,
            )
        except Exception:
            cleanup_dist_env_and_memory()  # the next engine may want other groups
            raise
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


def generate_by_both(
    model: Path, settings: dict[str, Any], prompts: Sequence[Sequence[int]], **options: Any
) -> tuple[list[list[int]], list[Any]]:
    """Greedy tokens of two data-parallel engines behind one front end.

    Returns:
        The tokens of every prompt by the first engine, then by the second; and of the first engine,
        which is the one that vLLM asks, what :func:`read_stats` finds in its workers.
    """
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(model),
        attention_backend="SPARSEK",
        additional_config={"sparsek": settings},
        data_parallel_size=2,
        **{"enforce_eager": True, "dtype": "float32", "seed": 0, **memory_of_engine(), **options},
    )
    params = SamplingParams(
        temperature=0,
        max_tokens=16,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def serve() -> tuple[list[list[int]], list[Any]]:
        llm = AsyncLLM.from_engine_args(arguments)

        async def one(rank: int, index: int) -> list[int]:
            request = {"prompt_token_ids": list(prompts[index])}
            name = f"{rank} {index}"
            async for output in llm.generate(request, params, name, data_parallel_rank=rank):
                return list(output.outputs[0].token_ids)
            raise AssertionError("no answer")

        try:
            places = [(rank, index) for rank in range(2) for index in range(len(prompts))]
            found = await asyncio.gather(*(one(*place) for place in places))
            return found, await llm.collective_rpc(read_stats)
        finally:
            with suppress(psutil.NoSuchProcess):  # vLLM names one that has just ended
                llm.shutdown()

    return asyncio.run(serve())


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


@contextmanager
def preempting_all(llm: Any, step: int) -> Iterator[Counter[str]]:
    """Before the scheduler's ``step``-th step from now, evict every running request."""
    counter: Counter[str] = Counter()
    target = scheduler(llm)
    schedule = target.schedule

    def evicting(*args: Any, **kwargs: Any) -> Any:
        counter["steps"] += 1
        if counter["steps"] == step:
            counter["preempted"] = len(target.running)
            target.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args, **kwargs)

    with mock.patch.object(target, "schedule", evicting):
        yield counter


def layers(llm: Any) -> list[Any]:
    """The attention layers of an engine."""
    return list(model_runner(llm).vllm_config.compilation_config.static_forward_context.values())


def pages_of_request(llm: Any, prompt: Sequence[int], **sampling: Any) -> tuple[Any, list[Any]]:
    """The answer, and K, V and summaries of the prompt's whole pages, in order, of every layer."""
    manager = scheduler(llm).kv_cache_manager
    given: list[int] = []
    allocate = manager.allocate_slots

    def allocating(request: Any, *args: Any, **kwargs: Any) -> Any:
        found = allocate(request, *args, **kwargs)
        given[:] = manager.get_block_ids(request.request_id)[0]
        return found

    with mock.patch.object(manager, "allocate_slots", allocating):
        (answer,) = generate(llm, [prompt], together=False, **sampling)
    parts = []
    for layer in layers(llm):
        views = layer.impl._pages.view(layer.kv_cache)
        assert views.summary is not None
        pages = given[: (len(prompt) - 1) // views.keys.shape[2]]
        parts += [part[pages].clone() for part in (views.keys, views.values, views.summary)]
    return answer, parts


def shuffle_free_pages(llm: Any, seed: int) -> None:
    """Hand out the free KV pages in another order from now on, and forget cached prefixes."""
    import random

    assert llm.reset_prefix_cache()
    pool = scheduler(llm).kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    random.Random(seed).shuffle(blocks)
    pool.free_blocks(blocks)
