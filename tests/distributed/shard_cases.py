"""A step of decodes and prefills on ranks that hold the pages of its sequences between them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from sparsek_backend.vllm_backend.sparsek import shards
from sparsek_backend.vllm_backend.sparsek.selection import LayerSelection
from sparsek_backend.vllm_backend.sparsek.shards import (
    ContextRanks,
    attend_shards,
    shard_step,
)
from sparsek_kernels.paged import SelectionPolicy, StepPolicy
from sparsek_kernels.paged.api import default_indexers
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import ceil_div
from tests.kernels.paged.cache_cases import Case, make_case

LENGTHS, QUERIES, DECODES, HEADS, DIM = [300, 65, 517, 400, 131], [1, 1, 1, 250, 131], 3, 4, 32
EXTRA = 2  # elements per token that the summaries take


def whole_step(page_size: int) -> Case:
    """The step as one rank has it."""
    sizes: dict[str, Any] = {"heads": HEADS, "kv_heads": 1, "dim": DIM, "page_size": page_size}
    return make_case(LENGTHS, QUERIES, DECODES, **sizes)


def sinks() -> torch.Tensor:
    """A learned logit of each query head."""
    return torch.linspace(-1.0, 3.0, HEADS)


def view(cache: torch.Tensor, summary_bytes: int) -> Any:
    """K, V and summaries of pages ``[pages, 1, page_size, 2 D + EXTRA]``."""
    flat, page = cache.view(cache.shape[0], 1, -1), cache.shape[2]
    both = flat[..., : page * 2 * DIM].unflatten(-1, (page, 2 * DIM))
    behind = flat[..., page * 2 * DIM :].view(torch.uint8)[..., :summary_bytes]
    return SimpleNamespace(keys=both[..., :DIM], values=both[..., DIM:], summary=behind)


def own_pages(case: Case, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's cache and block table: every ``ranks``-th page of each sequence."""
    page_size = case.k_cache.shape[2]
    pages = [ceil_div(length, page_size * ranks) for length in LENGTHS]
    cache = torch.full((sum(pages) + 2, 1, page_size, 2 * DIM + EXTRA), float("nan"))
    table = torch.zeros(len(LENGTHS), max(pages) + 1, dtype=torch.int32)
    views = view(cache, case.k_summary.shape[-1])
    here = iter(range(sum(pages) + 1, 0, -1))
    for request, count in enumerate(pages):
        for own in range(count):
            table[request, own] = page = next(here)
            logical = own * ranks + rank
            if logical * page_size < LENGTHS[request]:
                source = int(case.batch.block_table[request, logical])
                views.keys[page] = case.k_cache[source]
                views.values[page] = case.v_cache[source]
                views.summary[page] = case.k_summary[source]
    return cache, table


def attend(
    mesh: DeviceMesh,
    policy: SelectionPolicy | StepPolicy,
    page_size: int,
    gathered_tokens: int,
) -> np.ndarray:
    """This rank's heads of the step's output; both prefills' pages are gathered at once, or not."""
    shards.GATHERED_TOKENS = gathered_tokens
    parts = [2] if gathered_tokens >= sum(LENGTHS[DECODES:]) else [1, 1]
    size, rank = mesh.size(), mesh.get_local_rank()
    case = whole_step(page_size)
    cache, table = own_pages(case, rank, size)
    batch = replace(
        case.batch,
        block_table=table,
        seq_lens_host=tuple(LENGTHS),
        query_lens_host=tuple(QUERIES),
        _derived={},
    )
    ranks = ContextRanks(mesh.get_group(), rank, size)
    step = shard_step(batch, page_size, ranks)
    own = ranks.own_heads(case.q)
    assert torch.equal(ranks.gather_heads(own), case.q)
    out = torch.full_like(own, float("nan"))
    summary_bytes = case.k_summary.shape[-1]
    held = view(cache, summary_bytes)
    operands = PagedOperands(
        own, held.keys, held.values, out, DIM**-0.5, held.summary, sinks().view(size, -1)[rank]
    )
    rule = StepPolicy.of(policy)
    selection = LayerSelection(rule, default_indexers(rule))
    reader: Any = SimpleNamespace(
        view=lambda pages: view(pages, summary_bytes), head_size=DIM, summaries=True
    )
    with patch.object(native_decode, "supports", return_value=False):  # C may draw another list
        attend_shards(operands, cache, replace(step, prefills=()), selection, reader)
        assert out[DECODES:].isnan().all()
        assert [part.batch.num_requests for part in step.prefills] == parts
        attend_shards(operands, cache, step, selection, reader)
    return out.numpy()
