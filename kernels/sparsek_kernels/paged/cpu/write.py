"""Torch form of the cache write: keys, values and the sketch of the keys they touch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparsek_kernels.paged.sketch import (
    VECTOR_SIZE,
    mean_key,
    quantise,
    rotate,
    view_rows,
)


def write_kv_eager(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    """Torch form of :func:`sparsek_kernels.paged.write_kv`."""
    page_size, dim = k_cache.shape[2:]
    slots = slot_mapping[: key.shape[0]]
    if slots.numel() == 1 and k_summary is not None:
        _write_one(key[0], value[0], k_cache, v_cache, k_summary, int(slots[0]))
        return
    if bool((slots < 0).any()):
        keep = slots >= 0
        slots, key, value = slots[keep], key[keep], value[keep]
    if slots.numel() == 0:
        return
    pages, offsets = slots // page_size, slots % page_size
    k_cache[pages, :, offsets] = key.to(k_cache.dtype)
    v_cache[pages, :, offsets] = value.to(v_cache.dtype)
    if k_summary is None:
        return
    filled = offsets % VECTOR_SIZE + 1
    if slots.numel() > 1:  # keep the last token of each vector: it knows how much the vector holds
        last = filled == VECTOR_SIZE
        last[:-1] |= slots[1:] != slots[:-1] + 1
        last[-1] = True
        pages, offsets, filled = pages[last], offsets[last], filled[last]
    vector = offsets // VECTOR_SIZE
    keys = k_cache.unflatten(2, (-1, VECTOR_SIZE))[pages, :, vector]
    written = (torch.arange(VECTOR_SIZE) < filled[:, None])[:, None, :, None]
    mean = mean_key(keys.masked_fill_(~written, 0.0), filled[:, None, None])
    view_rows(k_summary, page_size, dim)[pages, :, vector] = quantise(rotate(mean))


def _write_one(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor,
    slot: int,
) -> None:
    """A single decoded token, key and value ``[Hkv, D]``: slices instead of index tensors."""
    if slot < 0:
        return
    page_size, dim = k_cache.shape[2:]
    page, offset = divmod(slot, page_size)
    k_cache[page, :, offset] = key
    v_cache[page, :, offset] = value
    vector = offset // VECTOR_SIZE
    keys = k_cache[page, :, vector * VECTOR_SIZE : offset + 1]
    missing = VECTOR_SIZE - keys.shape[1]
    mean = mean_key(F.pad(keys, (0, 0, 0, missing)), keys.shape[1])
    view_rows(k_summary, page_size, dim)[page, :, vector] = quantise(rotate(mean))
