"""One segment of a step through the Triton launches, on tensors of any device.

On a CPU the kernels run in Triton's interpreter; the api would take the torch path there.
"""

from __future__ import annotations

import torch

from sparsek_kernels.paged.api import default_indexers
from sparsek_kernels.paged.attend import launch as attend_launch
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.base import Indexer, Indexers
from sparsek_kernels.paged.index.cell_means import CellMeans
from sparsek_kernels.paged.index.cell_means import launch as cell_means_launch
from sparsek_kernels.paged.index.infllm import InfLLM
from sparsek_kernels.paged.index.infllm import launch as infllm_launch
from sparsek_kernels.paged.index.page_records import PageRecords
from sparsek_kernels.paged.index.page_records import launch as records_launch
from sparsek_kernels.paged.index.seer import Seer
from sparsek_kernels.paged.index.seer import launch as seer_launch
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment, each_segment, plan_step, plan_tokens
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy
from sparsek_kernels.paged.write import launch as write_launch


def select_launched(operands: PagedOperands, segment: Segment, index: Indexer) -> Chosen:
    """What an indexer's launches choose."""
    if isinstance(index, PageRecords):
        return records_launch.select(operands, segment)
    if isinstance(index, CellMeans):
        return Chosen(cell_means_launch.select(operands, segment))
    if isinstance(index, InfLLM):
        return Chosen(infllm_launch.select(operands, segment))
    if isinstance(index, Seer):
        return Chosen(seer_launch.select(operands, segment, index.gates))
    return index.select(operands, segment)


def write_launched(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    pages: object = None,
    **scales: float,
) -> None:
    """What ``write_kv`` does on a GPU, where it has not found out where the ``pages`` are."""
    write_launch.write_kv(key, value, k_cache, v_cache, k_summary, slots, **scales)


def attend_launched(operands: PagedOperands, segment: Segment, index: Indexer | None) -> None:
    """What ``attend_segment`` does on a GPU."""
    chosen = None if index is None else select_launched(operands, segment, index)
    attend_launch.attend_segment(operands, segment, chosen)


def run_launched(
    operands: PagedOperands,
    batch: PagedBatch,
    policy: SelectionPolicy | StepPolicy,
    indexers: Indexers | None = None,
    *,
    batch_invariant: bool = False,
) -> None:
    """What ``paged_attention`` does on a GPU; writes ``operands.out``."""
    rule = StepPolicy.of(policy)
    indexers = default_indexers(rule) if indexers is None else indexers
    tokens, heads = operands.q.shape[:2]
    if batch_invariant:
        segments = plan_tokens(batch, rule.decode, heads, tokens, operands.page_size)
    else:
        segments = plan_step(batch, rule)
    for mine, segment in each_segment(operands, segments):
        attend_launched(mine, segment, indexers.of(segment))
