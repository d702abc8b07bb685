"""Compiling the kernels of sparse steps while the server starts.

vLLM runs decodes before it captures them in CUDA graphs, but no prefill that is long enough to be
sparse, and of the decodes beside a prefill, which no graph holds, not every number: their kernels
would be compiled while requests wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger

from sparsek_backend.vllm_backend import compat
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.lengths import batch_of_lengths
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div

logger = init_logger(f"vllm.{__name__}")

_EACH_NUMBER, _STEP, _MOST_DECODES, _MOST_TILES = 32, 8, 640, 576
"""Decodes and query tiles: every number up to the first, then steps, up to where each has programs
to itself."""
_MOST_CONTEXT = 1 << 22
"""Tokens of all prompts of a step, so that a step takes milliseconds."""
_LONG = 8192
"""Tokens that keep as many programs busy as any longer context."""


def prefill_shapes(
    policy: SelectionPolicy, max_model_len: int, max_tokens: int, max_num_seqs: int
) -> list[tuple[int, int, int]]:
    """``(context, query tokens, prompts)`` of steps that need the kernels of every prefill.

    A few programs share each query tile: as many as the number of tiles and the blocks of the
    context leave room for.  So there are whole chunks and shorter ones, down to the few tokens that
    end a prompt or that decodes leave room for, and chunks of several prompts, which have more
    tiles; each at every context of a power of two or half as much again that is not attended whole.

    Args:
        max_model_len: longest context.
        max_tokens: most tokens of a step.
        max_num_seqs: most requests of a step.
    """
    numbers = (*range(_EACH_NUMBER), *range(_EACH_NUMBER, _MOST_TILES + 1, _STEP))
    shapes = []
    for context in sparse_contexts(policy, max_model_len, between=True):
        most = min(context, max_tokens, _MOST_TILES * policy.query_tile)
        tokens = (max(number * policy.query_tile, 1) for number in numbers)
        shapes += [(context, each, 1) for each in (*(few for few in tokens if few < most), most)]
        room = (_MOST_TILES - ceil_div(most, policy.query_tile)) // 2
        room = min(room, max_num_seqs, most, _MOST_CONTEXT // context)
        shapes += [(context, most, prompts) for prompts in numbers if 1 < prompts <= room]
    return list(dict.fromkeys(shapes))


def decode_shapes(
    policy: SelectionPolicy, max_model_len: int, max_num_seqs: int
) -> list[tuple[int, int]]:
    """``(decodes, context)`` of steps that together need the kernels of every step of decodes.

    A few programs share each decode: as many as the number of decodes leaves room for.  That
    changes slowly where decodes are many.  The longest context decides how scores are sorted.

    Args:
        max_model_len: longest context.
        max_num_seqs: most requests of a step.
    """
    contexts = sparse_contexts(policy, max_model_len) or [min(max_model_len, _LONG)]
    few = range(1, min(max_num_seqs, _EACH_NUMBER) + 1)
    many = range(_EACH_NUMBER + _STEP, min(max_num_seqs, _MOST_DECODES) + 1, _STEP)
    return [(count, contexts[0]) for count in (*few, *many)] + [
        (1, context) for context in contexts[1:]
    ]


def sparse_contexts(
    policy: SelectionPolicy, max_model_len: int, *, between: bool = False
) -> list[int]:
    """Every power of two that is not attended whole, and the longest context.

    Args:
        between: add half as much again as each power of two.
    """
    powers = [1 << power for power in range(max_model_len.bit_length())]
    if between:
        powers = sorted({*powers, *(3 * power // 2 for power in powers)})
    lengths = dict.fromkeys((*(power for power in powers if power < max_model_len), max_model_len))
    return [length for length in lengths if not policy.sees_all(length - 1)]


def made_up_prefill(
    context: int, tokens: int, prompts: int, width: int, device: torch.device
) -> PagedBatch:
    """Prompts of ``context`` tokens, ``tokens`` new ones between them; all pages are page 0.

    Args:
        width: columns of the block table, enough for the longest context.
    """
    counts = [tokens // prompts + (index < tokens % prompts) for index in range(prompts)]
    table = torch.zeros(prompts, width, dtype=torch.int32, device=device)
    return batch_of_lengths(table, counts, (context,) * prompts)


def made_up_decodes(
    count: int, query_len: int, context: int, width: int, device: torch.device
) -> PagedBatch:
    """``count`` requests that decode ``query_len`` tokens each; all of their pages are page 0.

    Args:
        context: tokens of each, the new ones included.
        width: columns of the block table, enough for the longest context.
    """
    table = torch.zeros(count, width, dtype=torch.int32, device=device)
    return batch_of_lengths(table, (query_len,) * count, (context,) * count, decodes=count)


def warm_up(
    layers: Iterable[Any],
    spec: Any,
    vllm_config: Any,
    device: torch.device,
    query_len: int = 1,
    rotation: torch.Tensor | None = None,
) -> None:
    """Run made-up decodes of every number and sparse prefills of every kind.

    They go through one layer of each kind.  How many programs share a decode or a query tile
    depends on their number, and is compiled into the kernel.

    Args:
        layers: vLLM's attention layers, bound to their policies.
        spec: their KV cache spec.
        vllm_config: the engine's configuration.
        device: where to run.
        query_len: most query tokens of a decode.
        rotation: :attr:`PagedBatch.rotation` of the engine's steps.
    """
    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as thread:
        # vLLM makes the pages of an engine with sleep mode in a memory pool whose content it drops
        # when the engine sleeps.  The pool takes the allocations of this thread alone, so scratch
        # that kernels keep for later calls is made in another one.
        steps = thread.submit(_run, layers, spec, vllm_config, device, query_len, rotation)
        count = steps.result()
    if count:
        logger.info_once(
            "SPARSEK kernels are ready (%.1f s, kept in Triton's cache)",
            time.perf_counter() - begin,
        )


def _run(
    layers: Iterable[Any],
    spec: Any,
    vllm_config: Any,
    device: torch.device,
    query_len: int,
    rotation: torch.Tensor | None,
) -> int:
    """Return how many made-up steps were run."""
    kinds = {layer.impl.kernel_key: layer for layer in layers}
    count = 0
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), on_device:
        for layer in kinds.values():
            for batch in _made_up_steps(
                layer.impl, spec.block_size, vllm_config, device, query_len
            ):
                step = replace(batch, rotation=rotation)
                layer.impl.dummy_run(layer, _one_page(spec, device), step)
                count += 1
        if count and device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # the KV cache takes all free memory next
    return count


def _made_up_steps(
    impl: Any, page_size: int, vllm_config: Any, device: torch.device, query_len: int
) -> Iterator[PagedBatch]:
    """The steps that a layer's kernels are compiled by, each made when it is due."""
    if impl.fallback_reason is not None:
        return
    scheduler, length = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    width, most = ceil_div(length, page_size), scheduler.max_num_seqs
    if impl.dcp_world_size == 1:  # else decodes go through kernels of their own
        for count, context in decode_shapes(impl.own.policy.decode, length, most):
            yield made_up_decodes(count, query_len, context, width, device)
    prefill = impl.own.policy.prefill
    if impl.flash is None or not prefill.is_band:
        limits = (length, scheduler.max_num_batched_tokens, most)
        for context, tokens, prompts in prefill_shapes(prefill, *limits):
            yield made_up_prefill(context, tokens, prompts, width, device)


def _one_page(spec: Any, device: torch.device) -> torch.Tensor:
    """A KV cache of one page of zeros, laid out as vLLM lays them out."""
    itemsize = spec.dtype.itemsize
    elements, content = spec.page_size_bytes // itemsize, compat.content_bytes(spec) // itemsize
    shape = (1, spec.num_kv_heads, spec.block_size, content)
    storage = torch.zeros(elements, dtype=spec.dtype, device=device)
    return storage.as_strided(shape, (elements, spec.block_size * content, content, 1))
