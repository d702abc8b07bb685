"""Launching the cache write."""

from __future__ import annotations

import torch

from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.config import next_power_of_2
from sparsek_kernels.paged.index.page_records.launch_write import record_warps, write_records
from sparsek_kernels.paged.policy import ceil_div
from sparsek_kernels.paged.record import view_records
from sparsek_kernels.paged.scratch import overlap_options
from sparsek_kernels.paged.write.kernels.write import write_kv_kernel

TOGETHER = 256
"""Tokens up to which one launch writes rows and records.

A program that completes a segment looks through the slots of all of them.
"""


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store new rows, and with ``k_summary`` the records that they complete."""
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    _, heads, page_size, dim = k_cache.shape
    block_d = next_power_of_2(dim)
    together = k_summary is not None and tokens <= TOGETHER
    block_h = 1 if together else max(1, min(next_power_of_2(heads), 256 // block_d))
    records: torch.Tensor = k_cache
    strides: tuple[int, ...] = (0, 0, 0)
    if together and k_summary is not None:
        records = view_records(k_summary, page_size, dim)
        strides = records.stride()[:3]
    run(
        write_kv_kernel, (tokens, ceil_div(heads, block_h)),
        k_cache, v_cache, records, key, value, slot_mapping, tokens, 1.0 / k_scale, 1.0 / v_scale,
        *k_cache.stride()[:3], *v_cache.stride()[:3], *key.stride()[:2], *value.stride()[:2],
        strides,
        NUM_HEADS=heads, HEAD_DIM=dim, BLOCK_D=block_d, BLOCK_H=block_h, PAGE_SIZE=page_size,
        RECORDS=together, TRIGGER=overlap_options(k_cache.device, together)["OVERLAP"],
        num_warps=record_warps(k_cache) if together else 4,
    )  # fmt: skip
    if k_summary is not None and not together:
        write_records(k_cache, k_summary, slot_mapping)
