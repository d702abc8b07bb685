"""Compiling the kernels of sparse steps while the server starts.

vLLM runs decodes before it captures them in CUDA graphs, but no prefill that is long enough to be
sparse, and of the decodes beside a prefill, which no graph holds, not every number: their kernels
would be compiled while requests wait for them.  On a GPU the layers run them while vLLM measures
memory: the scratch that they leave is none that the KV cache may take.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger

from sparsek_backend.vllm_backend import compat
from sparsek_backend.vllm_backend.engine import engine_of
from sparsek_backend.vllm_backend.sleep import make_to_stay
from sparsek_kernels.common.recording import compiling
from sparsek_kernels.paged.attend.config import MANY_PROGRAMS
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.lengths import batch_of_lengths
from sparsek_kernels.paged.plan import everything
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy, ceil_div
from sparsek_kernels.paged.scratch import held_bytes

logger = init_logger(f"vllm.{__name__}")

_MOST_DECODES, _MOST_TILES = 640, 576
"""Decodes and query tiles, up to where each has programs to itself."""
_LONG_DECODE, _LONG_PREFILL = 1 << 13, 1 << 16
"""Tokens that keep as many programs busy as any longer context that is attended whole."""


def doubled(most: int) -> list[int]:
    """The powers of two below ``most``, and ``most``; nothing for 0.

    Kernels are compiled for ranges of such numbers.  Each range goes up to twice its start, or
    further, but for the last one, which ``most`` is in.
    """
    return [1 << power for power in range(max(most - 1, 0).bit_length())] + [most] * (most > 0)


def prefill_shapes(
    policy: SelectionPolicy, max_model_len: int, max_tokens: int, max_num_seqs: int
) -> list[tuple[int, int, int, int]]:
    """``(context, query tokens, prompts, least)`` of steps that need the kernels of every prefill.

    ``least`` are the tokens of all prompts but the first.  Programs share a query tile the more,
    the longer the context and the fewer the tiles.  So there is every context with its last tile
    alone, and the longest with every number of tiles, of one prompt or several.
    """
    contexts = doubled(min(max_model_len, _LONG_PREFILL) if policy.is_band else max_model_len)
    if not policy.is_band:  # a shorter prompt is attended whole
        contexts = [context for context in contexts if not policy.sees_all(context - 1)]
    if not contexts:
        return []
    tile = policy.query_tile
    least, longest = contexts[0], contexts[-1]
    most = min(longest, max_tokens, _MOST_TILES * tile)
    tiles = most // tile
    prompts = min((_MOST_TILES - tiles) // 2, max_num_seqs, most)
    shapes = [(context, min((context - 1) % tile + 1, most), 1) for context in contexts]
    shapes += [(longest, number * tile, 1) for number in doubled(tiles)]
    shapes += [(longest, most, number) for number in doubled(prompts)]
    return [(*shape, least) for shape in dict.fromkeys(shapes)]


def decode_shapes(
    policy: SelectionPolicy,
    max_model_len: int,
    max_num_seqs: int,
    num_kv_heads: int,
    query_len: int = 1,
) -> list[tuple[int, int]]:
    """``(decodes, context)`` of steps that together need the kernels of every step of decodes.

    Programs share a decode the more, the longer the context and the fewer the decodes; many have
    fewer warps.  So there is every context with one decode, and with the fewest that are many, and
    the longest with every number.

    Args:
        query_len: new tokens of a decode; no context is shorter.
    """
    selects = policy.selects_blocks
    longest = max_model_len if selects else min(max_model_len, _LONG_DECODE)
    contexts = list(dict.fromkeys(max(context, query_len) for context in doubled(longest)))
    most = min(max_num_seqs, _MOST_DECODES)
    few = dict.fromkeys((1, min(ceil_div(MANY_PROGRAMS, num_kv_heads), most)))
    shapes = [(count, context) for count in few for context in contexts]
    return list(dict.fromkeys([*shapes, *((count, contexts[-1]) for count in doubled(most))]))


def made_up_prefill(
    context: int, tokens: int, prompts: int, least: int, width: int, device: torch.device
) -> PagedBatch:
    """Prompts with ``tokens`` new tokens between them; all pages are page 0.

    Args:
        context: tokens of the first, the new ones included.
        least: of each of the others, if they have no more new ones.
        width: columns of the block table, enough for the longest context.
    """
    counts = [tokens // prompts + (index < tokens % prompts) for index in range(prompts)]
    lengths = [context, *(max(least, count) for count in counts[1:])]
    table = torch.zeros(prompts, width, dtype=torch.int32, device=device)
    return batch_of_lengths(table, counts, lengths)


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
    """Run made-up decodes and prefills that need every kernel, through one layer of each kind.

    vLLM builds the pages of an engine twice, the first time to measure CUDA graphs: a
    kind of layer that has run is not run again.

    Args:
        layers: vLLM's attention layers, bound to their policies.
        query_len: most query tokens of a decode.
        rotation: :attr:`PagedBatch.rotation` of the engine's steps.
    """
    begin = time.perf_counter()
    ready = engine_of(vllm_config).ready_kernels
    pages = (spec.block_size, spec.page_size_bytes, query_len)
    kinds = {(*pages, *layer.impl.kernel_key): layer for layer in layers}
    new = [layer for kind, layer in kinds.items() if kind not in ready]
    ready.update(kinds)
    # scratch that kernels keep for later calls stays
    count = make_to_stay(partial(_run, new, spec, vllm_config, device, query_len, rotation))
    if count:
        logger.info(
            "SPARSEK kernels are ready (%d steps, %.1f s, kept in Triton's cache); they hold "
            "%.2f GiB of scratch",
            count,
            time.perf_counter() - begin,
            held_bytes(device) / (1 << 30),
        )


def _run(
    layers: Iterable[Any],
    spec: Any,
    vllm_config: Any,
    device: torch.device,
    query_len: int,
    rotation: torch.Tensor | None,
) -> int:
    """Return how many made-up steps were run.

    First all of their kernels are compiled, many at a time.
    """
    on_gpu = device.type == "cuda"
    passes: list[AbstractContextManager[None]] = [nullcontext()]
    if on_gpu:
        passes.insert(0, compiling(len(os.sched_getaffinity(0))))
    with torch.inference_mode(), torch.cuda.device(device) if on_gpu else nullcontext():
        for each in passes:
            count = 0
            with each:
                for layer in layers:
                    for batch, policy in _made_up_steps(
                        layer.impl, spec.block_size, vllm_config, device, query_len
                    ):
                        step = replace(batch, rotation=rotation)
                        layer.impl.dummy_run(layer, _one_page(spec, device), step, policy)
                        count += 1
        if count and on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # the KV cache takes all free memory next
    return count


def _made_up_steps(
    impl: Any, page_size: int, vllm_config: Any, device: torch.device, query_len: int
) -> Iterator[tuple[PagedBatch, StepPolicy]]:
    """The steps that a layer's kernels are compiled by, each made when it is due."""
    if impl.fallback_reason is not None:
        return
    scheduler, length = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    width, most, own = ceil_div(length, page_size), scheduler.max_num_seqs, impl.policy
    # Records of many tokens are written by a kernel of their own.
    together = min(length, scheduler.max_num_batched_tokens)
    yield made_up_prefill(together, together, 1, together, width, device), own
    if impl.batch_invariant:  # one configuration for tokens of every step
        yield made_up_decodes(1, query_len, length, width, device), own
        yield made_up_prefill(length, min(length, 2), 1, length, width, device), own
        return
    if impl.dcp_world_size == 1:  # else decodes go through kernels of their own
        shapes = decode_shapes(own.decode, length, most, impl.num_kv_heads, query_len)
        for count, context in shapes:
            yield made_up_decodes(count, query_len, context, width, device), own
    for prefill, longest in prefill_policies(own.prefill, length, impl.flash is not None):
        policy = replace(own, prefill=prefill)
        for shape in prefill_shapes(prefill, longest, scheduler.max_num_batched_tokens, most):
            yield made_up_prefill(*shape, width, device), policy


def prefill_policies(
    policy: SelectionPolicy, max_model_len: int, flash: bool
) -> list[tuple[SelectionPolicy, int]]:
    """The policies by which our kernels attend prompts but for their ends, and dense segments.

    Each has the longest context in which it does.

    Args:
        flash: whether FlashAttention attends those that it can.
    """
    rule = replace(policy, dense_last=0).within(max_model_len)
    found = [(rule, max_model_len)]
    if rule.longest_shallow is not None:  # shorter prompts have kernels of their own
        found.append((rule.at(0), rule.longest_shallow))
    if policy.dense_last or not policy.is_band:
        found.append((everything(policy), max_model_len))
    return [each for each in found if not (flash and each[0].is_band)]


def _one_page(spec: Any, device: torch.device) -> torch.Tensor:
    """A KV cache of one page of zeros, laid out as vLLM lays them out."""
    itemsize = spec.dtype.itemsize
    elements, content = spec.page_size_bytes // itemsize, compat.content_bytes(spec) // itemsize
    shape = (1, spec.num_kv_heads, spec.block_size, content)
    storage = torch.zeros(elements, dtype=spec.dtype, device=device)
    return storage.as_strided(shape, (elements, spec.block_size * content, content, 1))
