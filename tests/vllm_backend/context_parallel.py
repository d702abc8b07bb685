"""Slots of decode context parallel ranks on a CPU, for which vLLM has no code.

vLLM's own is a Triton kernel; its replacement on CPUs asserts that there is one rank.  An engine's
workers import this file as their ``worker_extension_cls``.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.block_table import BlockTable


def compute_slot_mapping(
    table: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
) -> None:
    """Write the slot of every new token, -1 where another rank holds it; as vLLM's kernel does."""
    size, ranks, run = table.block_size, table.dcp_world_size, table.cp_kv_cache_interleave_size
    counts = query_start_loc[: num_reqs + 1].diff()
    request = torch.arange(num_reqs).repeat_interleave(counts)
    positions = positions[: request.numel()]
    block, offset = positions // (size * ranks), positions % (size * ranks)
    page = table.block_table.gpu[request, block].long()
    slot = page * size + offset // (ranks * run) * run + offset % run
    slots = table.slot_mapping.gpu
    slots.fill_(-1)
    own = offset // run % ranks == table.dcp_rank
    slots[: request.numel()] = torch.where(own, slot, -1)


BlockTable.compute_slot_mapping = compute_slot_mapping


class Extension:
    """Nothing more than the import."""
