"""The cache write on a CPU."""

from __future__ import annotations

import torch


def write_kv_eager(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store new rows."""
    page_size = k_cache.shape[2]
    slots = slot_mapping[: key.shape[0]]
    if slots.numel() == 1:  # slices take less time than index tensors
        slot = int(slots)
        if slot < 0:
            return
        page, offset = divmod(slot, page_size)
        k_cache[page, :, offset] = key[0]
        v_cache[page, :, offset] = value[0]
    else:
        if bool((slots < 0).any()):
            keep = slots >= 0
            slots, key, value = slots[keep], key[keep], value[keep]
        pages, offsets = slots // page_size, slots % page_size
        k_cache[pages, :, offsets] = key.to(k_cache.dtype)
        v_cache[pages, :, offsets] = value.to(v_cache.dtype)
