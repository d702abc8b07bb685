"""Launching the cache write."""

from __future__ import annotations

import torch

from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.config import next_power_of_2
from sparsek_kernels.paged.policy import ceil_div
from sparsek_kernels.paged.write.kernels.write import write_kv_kernel


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store new rows."""
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    _, heads, page_size, dim = k_cache.shape
    block_d = next_power_of_2(dim)
    block_h = max(1, min(next_power_of_2(heads), 256 // block_d))
    run(
        write_kv_kernel, (tokens, ceil_div(heads, block_h)),
        k_cache, v_cache, key, value, slot_mapping, 1.0 / k_scale, 1.0 / v_scale,
        *k_cache.stride()[:3], *v_cache.stride()[:3], *key.stride()[:2], *value.stride()[:2],
        NUM_HEADS=heads, HEAD_DIM=dim, BLOCK_D=block_d, BLOCK_H=block_h, PAGE_SIZE=page_size,
        num_warps=4,
    )  # fmt: skip
