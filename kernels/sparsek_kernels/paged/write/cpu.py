"""The cache write on a CPU: keys, values and the sketch of the keys they touch."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.index.key_means import native as native_sketch
from sparsek_kernels.paged.index.key_means.sketch import (
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
    """:func:`sparsek_kernels.paged.write_kv` on a CPU."""
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
        if slots.numel() == 0:
            return
        pages, offsets = slots // page_size, slots % page_size
        k_cache[pages, :, offsets] = key.to(k_cache.dtype)
        v_cache[pages, :, offsets] = value.to(v_cache.dtype)
    if k_summary is None:
        return
    if native_sketch.supports(k_cache, k_summary):
        native_sketch.sketch_slots(k_cache, k_summary, slots)
    else:
        _sketch_slots(k_cache, k_summary, slots)


def _sketch_slots(k_cache: torch.Tensor, k_summary: torch.Tensor, slots: torch.Tensor) -> None:
    """Torch form of :func:`native_sketch.sketch_slots`."""
    page_size, dim = k_cache.shape[2:]
    filled = slots % VECTOR_SIZE + 1
    if slots.numel() > 1:  # keep the last token of each vector: it knows how much the vector holds
        last = filled == VECTOR_SIZE
        last[:-1] |= slots[1:] != slots[:-1] + 1
        last[-1] = True
        slots, filled = slots[last], filled[last]
    pages, vector = slots // page_size, slots % page_size // VECTOR_SIZE
    keys = k_cache.unflatten(2, (-1, VECTOR_SIZE))[pages, :, vector]
    written = (torch.arange(VECTOR_SIZE) < filled[:, None])[:, None, :, None]
    mean = mean_key(keys.masked_fill_(~written, 0.0), filled[:, None, None])
    view_rows(k_summary, page_size, dim)[pages, :, vector] = quantise(rotate(mean))
